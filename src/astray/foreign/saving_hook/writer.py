"""Writes the rows of a recording as the saving hook's files: outputs of leaf modules, and gradients of parameters.

Each file is there in full or not at all, as soon as its row has come. Steps are laid end to end: the format counts
forwards alone. Of a gradient it is what one backward brought that is saved, not what has accumulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from astray.errors import RunExists
from astray.foreign import array_files as npy
from astray.foreign.saving_hook.files import FileName, Folder, compose, is_draft, parse, rank_folders
from astray.stats.dtypes import DTYPES
from astray.store.columns import Table
from astray.store.run import RankRun, to_numpy_dtype
from astray.store.run_format.folder import recording_errors
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import MOST_NAME_BYTES
from astray.wording import counted

ACCUMULATED = "a gradient that has accumulated"
AGAIN = "an output that was computed again for the backward"

_IN_FLIGHT = 64
"""Calls of so many micro steps are remembered, for tensors that are still to come: no pipeline is deeper."""


class Limit(NamedTuple):
    """How many files are saved, in all and of each micro step; all of them where it is not above 0."""

    total: int = 0
    per_step: int = 0


EVERYTHING: Mapping[Folder, Limit] = {"tensors": Limit(), "grads": Limit()}


def translate(
    path: Path, rank: int, info: RunInfo, *, overwrite: bool, limits: Mapping[Folder, Limit] = EVERYTHING
) -> SavingTranslator:
    """Make room for the files of a rank, and give what writes them.

    limits: of each folder that is written. Raises RunExists where files are already there, unless told to overwrite
    them: then those of this form are removed, and nothing else is.
    """
    homes: dict[Folder, Path] = {folder: path / folder / f"rank_{rank}" for folder in limits}
    with recording_errors(path):
        for folder, home in homes.items():
            _clear(home, folder, overwrite)
            if rank == 0 and overwrite and path.is_dir():
                for number, stale in rank_folders(path, folder)[0].items():
                    if number >= info.world_size:
                        _clear(stale, folder, overwrite)
            home.mkdir(parents=True, exist_ok=True)
    return SavingTranslator(homes, limits)


def _clear(home: Path, folder: Folder, overwrite: bool) -> None:
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

    def __init__(self, homes: Mapping[Folder, Path], limits: Mapping[Folder, Limit]) -> None:
        self.lost: Counter[str] = Counter()
        self._homes = homes
        self._limits = limits
        self._saved: Counter[Folder] = Counter()
        self._of_micro: Counter[tuple[Folder, int]] = Counter()
        self._calls = _SavedCalls()
        self._brought: set[int] = set()  # events of which the gradient that one backward brought has been saved

    @property
    def is_full(self) -> bool:
        """Whether nothing that may still come would be saved."""
        return all(0 < limit.total <= self._saved[folder] for folder, limit in self._limits.items())

    def take(self, step: int, rows: RankRun) -> None:
        """Some more rows of a step, in their order."""
        if self._calls.begin(step):
            self.lost["where a step begins"] += 1
            self._brought.clear()
        self._calls.add(rows.calls)
        tensors = rows.tensors
        seqs, roles, paths = tensors.numbers("seq").tolist(), tensors["role"], tensors["path"]
        for row, seq in enumerate(seqs):
            call = self._calls.of.get(seq)
            if call is None:
                self.lost["a tensor of a call that is not known"] += 1
                continue
            folder, what = self._place(seq, call, roles[row], paths[row])
            if folder is None:
                self.lost[what] += 1
            elif folder in self._homes and self._may_save(folder, call.micro):
                self._save(folder, call, paths[row], rows, row)
        self._calls.forget()

    def sync(self) -> None:
        """The files tell of everything."""

    def end_step(self, step: int) -> None:
        """Nothing more of this step will come."""

    def close(self, end: End) -> None:
        """Nothing more will come."""

    def _place(self, seq: int, call: _SavedCall, role: str, path: str) -> tuple[Folder | None, str]:
        """The folder that a tensor is saved in, or else what is lost."""
        if call.kind == "parameter" and role == "gradient":
            if path == "added":
                self._brought.add(seq)
            elif seq in self._brought:  # which came before it
                self._brought.discard(seq)
                return None, ACCUMULATED
            return "grads", ""
        if call.kind != "module":
            return None, f"a tensor of a {call.kind}" if call.kind != "op" else "a tensor of an op"
        if call.phase == "backward":
            return None, "a gradient of a module's inputs or outputs"
        if role != "output":
            return None, {"input": "an input", "parameter": "a parameter"}.get(role, "a buffer")
        if call.recompute:
            return None, AGAIN
        if seq in self._calls.around:
            return None, "an output of a module with others in it"
        return "tensors", ""

    def _may_save(self, folder: Folder, micro: int) -> bool:
        total, per_step = self._limits[folder]
        if 0 < total <= self._saved[folder]:
            return False
        return per_step <= 0 or self._of_micro[folder, micro] < per_step

    def _save(self, folder: Folder, call: _SavedCall, path: str, rows: RankRun, row: int) -> None:
        values = rows.values(row)
        tensors, dtype = rows.tensors, rows.tensors["dtype"][row]
        if values is None or dtype not in DTYPES:
            self.lost["a tensor whose values were not recorded"] += 1
            return
        if tensors["part"][row] is not None or tensors.numbers("sampled")[row] >= 0:
            self.lost["a tensor of which only some values were recorded"] += 1
            return
        name = compose(folder, FileName(self._saved[folder], call.site, call.type, call.micro, path))
        if name is None:
            self.lost[f"a tensor whose file would have a name of more than {MOST_NAME_BYTES} bytes"] += 1
            return
        known = to_numpy_dtype(values, dtype)
        if known.dtype != values.dtype:
            self.lost[f"the dtype {dtype}, stored as {known.dtype}"] += 1
        npy.write_npy(self._homes[folder] / name, known)
        self._saved[folder] += 1
        if self._limits[folder].per_step > 0:
            self._of_micro[folder, call.micro] += 1


class _SavedCall(NamedTuple):
    kind: str
    site: str
    type: str
    phase: str
    micro: int  # counted over all steps
    parent: int
    recompute: bool


class _SavedCalls:
    """The calls whose tensors may still come."""

    def __init__(self) -> None:
        self.of: dict[int, _SavedCall] = {}
        self.around: set[int] = set()  # those that have modules inside
        self._step: int | None = None
        self._begin = self._next = 0  # the micro step that the step began with, and the one after its last
        self._of_micro: dict[int, list[int]] = {}

    def begin(self, step: int) -> bool:
        """Say of which step the next calls are; whether it begins now, and another was before it."""
        if step == self._step:
            return False
        self._step, self._begin = step, self._next
        self.of.clear()
        self.around.clear()
        self._of_micro.clear()
        return self._begin > 0

    def add(self, calls: Table) -> None:
        """Take calls of the step. Its micro steps come after those of the steps before."""
        columns: list[Any] = [calls[name] for name in ("kind", "site", "type", "phase", "micro", "parent", "recompute")]
        for seq, *fields in zip(calls.numbers("seq").tolist(), *(column.tolist() for column in columns), strict=True):
            call = _SavedCall(*fields)
            call = call._replace(micro=self._begin + call.micro)
            self.of[seq] = call
            self._of_micro.setdefault(call.micro, []).append(seq)
            if call.phase == "forward":
                self._next = max(self._next, call.micro + 1)
            if call.kind == "module" and call.phase == "forward":
                self._mark(call.parent)

    def _mark(self, parent: int) -> None:
        """Whatever is around a module is no leaf."""
        while parent >= 0 and parent not in self.around and parent in self.of:
            self.around.add(parent)
            parent = self.of[parent].parent

    def forget(self) -> None:
        """Let go of old micro steps: a recording may go on in one step for as long as the program runs."""
        for micro in [micro for micro in self._of_micro if micro < self._next - _IN_FLIGHT]:
            for seq in self._of_micro.pop(micro):
                self.of.pop(seq, None)
                self.around.discard(seq)
