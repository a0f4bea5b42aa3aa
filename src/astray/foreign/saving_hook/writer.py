"""Writes the rows of a recording as the saving hook's files: outputs of leaf modules, and gradients of parameters.

Each file is written whole, as soon as its row has come. Micro steps are numbered through all steps: the format counts
forwards only. A gradient is saved as one backward computed it, not as it has accumulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from astray.errors import RunExists
from astray.foreign import array_files as npy
from astray.foreign.saving_hook.files import FileName, FolderName, compose, is_draft, parse, rank_folders
from astray.stats.dtypes import DTYPES
from astray.store.columns import Table
from astray.store.run import RankRun, to_numpy_dtype
from astray.store.run_format.folder import recording_errors
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import MOST_NAME_BYTES
from astray.wording import counted

ACCUMULATED = "a gradient that has accumulated"
SPARSE = "a gradient that holds only some rows"
RECOMPUTED = "an output that was computed again for the backward"

_IN_FLIGHT = 64
"""How many micro steps calls are remembered for tensors that come later: no pipeline is deeper."""


class Limit(NamedTuple):
    """The most files to save, in all and of each micro step; no limit where it is not above 0."""

    total: int = 0
    per_step: int = 0


UNLIMITED: Mapping[FolderName, Limit] = {"tensors": Limit(), "grads": Limit()}
NO_NAMES: Mapping[str, str] = {}


def translate(
    path: Path,
    rank: int,
    info: RunInfo,
    *,
    overwrite: bool,
    limits: Mapping[FolderName, Limit] = UNLIMITED,
    names: Mapping[str, str] = NO_NAMES,
) -> SavingTranslator:
    """Prepare the folders of a rank, and return the translator that writes into them.

    limits: of each folder that is written. names: what layers and parameters are called in the names of files, by their
    sites; by default as their sites. Raises RunExists where there are files already, unless they may be
    overwritten: then the files of this format are removed, and nothing else.
    """
    homes: dict[FolderName, Path] = {folder: path / folder / f"rank_{rank}" for folder in limits}
    with recording_errors(path):
        for folder, home in homes.items():
            _clear(home, folder, overwrite)
            if rank == 0 and overwrite and path.is_dir():
                for number, stale in rank_folders(path, folder)[0].items():
                    if number >= info.world_size:
                        _clear(stale, folder, overwrite)
            home.mkdir(parents=True, exist_ok=True)
    return SavingTranslator(homes, limits, names)


def _clear(home: Path, folder: FolderName, overwrite: bool) -> None:
    if not home.is_dir():
        return
    old = [file for file in home.iterdir() if parse(folder, file.name) is not None or is_draft(file.name)]
    if old and not overwrite:
        raise RunExists(
            f"{home} already holds {counted(len(old), 'file')} of a recording. Choose another folder, or pass "
            "overwrite=True (--force on the command line)."
        )
    for file in old:
        file.unlink()


class SavingTranslator:
    """Writes one rank. It is a `Translator`."""

    def __init__(
        self, homes: Mapping[FolderName, Path], limits: Mapping[FolderName, Limit], names: Mapping[str, str] = NO_NAMES
    ) -> None:
        self.lost: Counter[str] = Counter()
        self._homes = homes
        self._limits = limits
        self._names = names
        self._saved: Counter[FolderName] = Counter()
        self._saved_of_micro: Counter[tuple[FolderName, int]] = Counter()
        self._calls = _RecentCalls()
        self._saved_added: set[int] = set()  # calls whose `added` gradient has been saved

    @property
    def is_full(self) -> bool:
        """Whether the limits of all folders are reached."""
        return all(0 < limit.total <= self._saved[folder] for folder, limit in self._limits.items())

    def take(self, step: int, rows: RankRun) -> None:
        """Take more rows of a step, in order."""
        if self._calls.begin(step):
            self.lost["where a step begins"] += 1
            self._saved_added.clear()
        self._calls.add(rows.calls)
        tensors = rows.tensors
        seqs, roles, paths = tensors.numbers("seq").tolist(), tensors["role"], tensors["path"]
        for row, seq in enumerate(seqs):
            call = self._calls.by_seq.get(seq)
            if call is None:
                self.lost["a tensor of a call that is not known"] += 1
                continue
            folder, lost = self._folder_of(seq, call, roles[row], paths[row])
            if folder is None:
                self.lost[lost] += 1
            elif folder in self._homes and self._may_save(folder, call.micro):
                self._save(folder, call, paths[row], rows, row)
        self._calls.drop_old()

    def sync(self) -> None:
        """Nothing to do: each file is complete when it is written."""

    def end_step(self, step: int) -> None:
        """Nothing more of this step will come."""

    def close(self, end: End) -> None:
        """Nothing more will come."""

    def _folder_of(self, seq: int, call: _SavedCall, role: str, path: str) -> tuple[FolderName | None, str]:
        """The folder that a tensor is saved in; None and a description of what is lost where there is none."""
        if call.kind == "parameter" and role == "gradient":
            if path not in ("added", "grad"):
                return None, SPARSE
            if path == "added":
                self._saved_added.add(seq)
            elif seq in self._saved_added:  # which came first
                self._saved_added.discard(seq)
                return None, ACCUMULATED
            return "grads", ""
        if call.kind != "module":
            return None, f"a tensor of a {call.kind}" if call.kind != "op" else "a tensor of an op"
        if call.phase == "backward":
            return None, "a gradient of a module's inputs or outputs"
        if role != "output":
            return None, {"input": "an input", "parameter": "a parameter"}.get(role, "a buffer")
        if call.recompute:
            return None, RECOMPUTED
        if seq in self._calls.with_modules:
            return None, "an output of a module with others in it"
        return "tensors", ""

    def _may_save(self, folder: FolderName, micro: int) -> bool:
        total, per_step = self._limits[folder]
        if 0 < total <= self._saved[folder]:
            return False
        return per_step <= 0 or self._saved_of_micro[folder, micro] < per_step

    def _save(self, folder: FolderName, call: _SavedCall, path: str, rows: RankRun, row: int) -> None:
        values = rows.values(row)
        tensors, dtype = rows.tensors, rows.tensors["dtype"][row]
        if values is None or dtype not in DTYPES:
            self.lost["a tensor whose values were not recorded"] += 1
            return
        if tensors["part"][row] is not None or tensors.numbers("sampled")[row] >= 0:
            self.lost["a tensor of which only some values were recorded"] += 1
            return
        site = self._names.get(call.site, call.site)
        name = compose(folder, FileName(self._saved[folder], site, call.type, call.micro, path))
        if name is None:
            self.lost[f"a tensor whose file would have a name of more than {MOST_NAME_BYTES} bytes"] += 1
            return
        known = to_numpy_dtype(values, dtype)
        if known.dtype != values.dtype:
            self.lost[f"the dtype {dtype}, stored as {known.dtype}"] += 1
        npy.write_npy(self._homes[folder] / name, known)
        self._saved[folder] += 1
        if self._limits[folder].per_step > 0:
            self._saved_of_micro[folder, call.micro] += 1


class _SavedCall(NamedTuple):
    kind: str
    site: str
    type: str
    phase: str
    micro: int  # counted over all steps
    parent: int
    recompute: bool


class _RecentCalls:
    """The calls whose tensors may still come, by their number."""

    def __init__(self) -> None:
        self.by_seq: dict[int, _SavedCall] = {}
        self.with_modules: set[int] = set()  # calls with modules inside, which are not leaves
        self._step: int | None = None
        self._first_micro = self._next_micro = 0  # of the current step, and after its last
        self._of_micro: dict[int, list[int]] = {}

    def begin(self, step: int) -> bool:
        """Begin a step if it is not the current one. Returns whether it begins after another."""
        if step == self._step:
            return False
        self._step, self._first_micro = step, self._next_micro
        self.by_seq.clear()
        self.with_modules.clear()
        self._of_micro.clear()
        return self._first_micro > 0

    def add(self, calls: Table) -> None:
        """Add calls of the step, with micro steps numbered on from the steps before."""
        columns: list[Any] = [calls[name] for name in ("kind", "site", "type", "phase", "micro", "parent", "recompute")]
        for seq, *fields in zip(calls.numbers("seq").tolist(), *(column.tolist() for column in columns), strict=True):
            call = _SavedCall(*fields)
            call = call._replace(micro=self._first_micro + call.micro)
            self.by_seq[seq] = call
            self._of_micro.setdefault(call.micro, []).append(seq)
            if call.phase == "forward":
                self._next_micro = max(self._next_micro, call.micro + 1)
            if call.kind == "module" and call.phase == "forward":
                self._mark_enclosing(call.parent)

    def _mark_enclosing(self, parent: int) -> None:
        """Mark the calls around a module: they are not leaves."""
        while parent >= 0 and parent not in self.with_modules and parent in self.by_seq:
            self.with_modules.add(parent)
            parent = self.by_seq[parent].parent

    def drop_old(self) -> None:
        """Drop old micro steps: a recording may stay in one step for as long as the program runs."""
        for micro in [micro for micro in self._of_micro if micro < self._next_micro - _IN_FLIGHT]:
            for seq in self._of_micro.pop(micro):
                self.by_seq.pop(seq, None)
                self.with_modules.discard(seq)
