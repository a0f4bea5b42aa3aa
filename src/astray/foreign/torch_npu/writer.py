"""Writes the rows of a recording as torch_npu.hooks does: whole calls, one after another, in either of its forms.

Rows come as they are observed: the inputs of a call, then what runs inside of it, then its outputs; gradients of
several calls may mix. A dump has the tensors of a call together, so a call is held until it is over: a forward call
when something runs that is not inside of it, a backward call when enough others have begun, or the program goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, RunExists
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.arrays import dumped_in
from astray.foreign.torch_npu.dumped import SAMPLE, SUMMARY
from astray.foreign.torch_npu.forms import ArrayFolder, Called, Form, Held, Kept, LineFile, place_of
from astray.foreign.torch_npu.names import stem, written_path
from astray.records import Role, Statistics
from astray.stats import DTYPES
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo

_OPEN_GRADIENTS = 16
"""So many backward calls are held: a function of several autograd nodes gets its gradients one by one."""
_TENSOR_ROLES = ("input", "output")


def first_positions(count: int, samples: int) -> npt.NDArray[np.int64]:
    """Which elements a recording has to keep for sampled lines: the first, in row-major order."""
    return np.arange(min(count, samples), dtype=np.int64)


class TorchNpuTranslator:
    """Writes one rank into `form`, which may be replaced by another in between.

    first_only: the rows have the values at `first_positions`, and no others.
    """

    def __init__(self, form: Form, *, first_only: bool = False) -> None:
        self.form = form
        self.first_only = first_only
        self.lost: Counter[str] = Counter()
        self._called: dict[int, Called] = {}
        self._held: dict[int, Held] = {}
        self._step: int | None = None
        self._with_modules: bool | None = None  # beside functions, which the tool knows alone, they are left out

    def take(self, step: int, rows: RankRun) -> None:
        if self._step not in (None, step):
            self.lost["the beginning of a step"] += 1
        self._step = step
        self._note_calls(rows)
        tensors = rows.tensors
        columns = [tensors[name].tolist() for name in ("seq", "role", "path", "dtype", "shape")]
        for row, (seq, role, path, dtype, shape) in enumerate(zip(*columns, strict=True)):
            called = self._called.get(seq)
            if called is None or called.stem is None or role not in _TENSOR_ROLES:
                self.lost[_unnamed(called, role)] += 1
                continue
            self._end_others(seq)
            call = self._held.setdefault(seq, Held(seq, called))
            call.is_new = True
            kept = self._kept(rows, row, called, role, path, dtype, shape)
            if kept is not None:
                call.tensors.append(kept)

    def sync(self) -> None:
        """Calls to which nothing was added since the last time are over; those that still run are not."""
        for call in list(self._held.values()):
            if call.has_results and not call.is_new:
                self._write(call)
            call.is_new = False

    def step_over(self, step: int) -> None:  # noqa: ARG002 - as a Translator has it
        self.write_all()
        self._called.clear()

    def close(self, end: End) -> None:  # noqa: ARG002 - the format has no place for it
        self.write_all()
        self.form.close()

    def write_all(self) -> None:
        """Write every call, over or not."""
        for call in list(self._held.values()):
            self._write(call)

    def _note_calls(self, rows: RankRun) -> None:
        calls = rows.calls
        names = ("seq", "kind", "type", "site", "phase", "parent", "stack", "recompute")
        columns = [calls[name].tolist() for name in names]
        if self._with_modules is None and len(calls):
            self._with_modules = "function" not in columns[1]
        for seq, kind, type, site, phase, parent, stack, recompute in zip(*columns, strict=True):
            is_own = kind == "function" and phase != "update"  # an optimizer's line says nothing of what it calls
            frames = rows.stack(stack) if is_own and stack is not None and stack >= 0 else []
            found = stem(kind, type, frames[0].code if frames else "")
            if kind == "module" and not self._with_modules:
                found = None
                self.lost["a call of a module, around those of functions"] += 1
            parent = parent if parent is not None and parent >= 0 else None
            self._called[seq] = Called(found, phase, parent, site.rpartition("/")[2], kind, bool(recompute))
            if found is not None:
                self.lost["the module in which a function was called"] += kind != "module" and not site.startswith("/")
                self.lost["the name of a module"] += kind == "module"
                self.lost["that a call is a recomputation"] += bool(recompute)
                self.lost["that a call is part of an update"] += phase == "update"
        self.lost += Counter()  # without what was met zero times

    def _end_others(self, seq: int) -> None:
        """Write the calls that are over, now that something is seen of this one."""
        if not self._held or (seq in self._held and len(self._held) == 1):
            return
        called, around = self._called[seq], {seq, *self._around(seq)}
        backward = [call for call in self._held.values() if call.called.phase == "backward"]
        if called.phase == "backward" or called.again:  # else the backward pass is over
            backward = backward[: max(len(backward) - _OPEN_GRADIENTS, 0)]
        done = list(backward)
        done += [call for call in self._held.values() if call.called.phase != "backward" and call.seq not in around]
        for call in done:
            self._write(call)

    def _around(self, seq: int) -> list[int]:
        """The calls that a forward call runs in."""
        found: list[int] = []
        called = self._called.get(seq)
        while called is not None and called.phase != "backward":
            parent = called.parent
            if parent is None or parent in found:  # a damaged run may go in circles
                break
            found.append(parent)
            called = self._called.get(parent)
        return found

    def _kept(
        self, rows: RankRun, row: int, called: Called, role: Role, path: str, dtype: str, shape: tuple[int, ...]
    ) -> Kept | None:
        tensors = rows.tensors
        is_sample = int(tensors.numbers("sampled")[row]) >= 0 and not self.first_only
        is_part = tensors["part"][row] is not None or is_sample
        elements = None if is_part or dtype not in DTYPES else rows.values(row)
        if elements is None:
            self.lost["a tensor without its values"] += 1
            return None
        side, place = written_path(called.function, role, path, called.phase)
        plain = numbers.as_numbers(elements, dtype)
        if not self.form.sample:
            return Kept(side, place, dtype, shape, plain)
        known = Statistics.of({name: tensors.numbers(name)[row].item() for name in Statistics._fields})
        whole = None if self.first_only and known is None else numbers.summary(plain, known)
        return Kept(side, place, dtype, shape, plain[:SAMPLE].copy(), whole or (math.nan,) * SUMMARY)

    def _write(self, call: Held) -> None:
        del self._held[call.seq]
        if call.tensors:
            self.form.write(call, self.lost)


def translate(
    path: Path, rank: int, info: RunInfo, *, overwrite: bool, sample: bool = False, arrays: bool | None = None
) -> TorchNpuTranslator:
    """A translator that writes a rank: into a ".pkl" of JSON lines, or into a folder of files of numpy's.

    sample: of each tensor the first ten values, maximum, minimum and mean. arrays: the folder; by default where the
    path has no ending such as ".pkl".
    """
    arrays = not path.suffix if arrays is None else arrays
    place = place_of(path, rank, info.world_size, folder=arrays)
    try:
        if place.is_dir() != arrays and place.exists():
            raise RunError(f"{place} is {'no' if arrays else 'a'} folder. Give the name of a {_WANTED[arrays]}.")
        if place.exists() and (not arrays or any(place.iterdir())) and not overwrite:
            raise RunExists(f"{place} is there already. Choose another, or overwrite it with --force.")
        place.parent.mkdir(parents=True, exist_ok=True)
        for old in dumped_in(place) if arrays and place.exists() else ():
            old.unlink()
        return TorchNpuTranslator(ArrayFolder(place) if arrays else LineFile(place, sample))
    except OSError as error:
        raise RunError(f"{place} cannot be written: {error.strerror}.") from None


_WANTED = {False: "file", True: "folder"}


def _unnamed(called: Called | None, role: str) -> str:
    if called is None:
        return "a tensor of a call whose row has gone"
    if role == "gradient":
        return "the gradient of a parameter"
    if called.kind == "module":
        named = {"parameter": "a parameter", "state": "a buffer"}
        return f"{named.get(role, 'a tensor')} of a module"
    return "a value that the program saved" if called.kind == "custom" else f"a tensor of a {called.kind} call"
