"""Writes the rows of a recording as torch_npu.hooks does: whole calls, one after another, in either of its forms.

Rows come as they are observed: the inputs of a call, then what runs inside of it, then its outputs; gradients of
several calls may mix. A dump has the tensors of a call together, so a call is held until it is over: a forward call
when something runs that is not inside of it, a backward call when enough others have begun, or the program goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, RunExists
from astray.foreign import array_files as npy
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.arrays import dumped_in
from astray.foreign.torch_npu.names import SAMPLE, SUMMARY, Array, Side, order, stem, written_path
from astray.records import Phase, Role, Statistics
from astray.stats import DTYPES
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import file_name
from astray.wording import numeral

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

    def __init__(self, form: DumpForm, *, first_only: bool = False) -> None:
        self.form = form
        self.first_only = first_only
        self.lost: Counter[str] = Counter()
        self._called: dict[int, CallRow] = {}
        self._held: dict[int, PendingCall] = {}
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
            call = self._held.setdefault(seq, PendingCall(seq, called))
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

    def end_step(self, step: int) -> None:  # noqa: ARG002 - as a Translator has it
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
            self._called[seq] = CallRow(found, phase, parent, site.rpartition("/")[2], kind, bool(recompute))
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
        self, rows: RankRun, row: int, called: CallRow, role: Role, path: str, dtype: str, shape: tuple[int, ...]
    ) -> CallTensor | None:
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
            return CallTensor(side, place, dtype, shape, plain)
        known = Statistics.of({name: tensors.numbers(name)[row].item() for name in Statistics._fields})
        whole = None if self.first_only and known is None else numbers.summary(plain, known)
        return CallTensor(side, place, dtype, shape, plain[:SAMPLE].copy(), whole or (math.nan,) * SUMMARY)

    def _write(self, call: PendingCall) -> None:
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


def _unnamed(called: CallRow | None, role: str) -> str:
    if called is None:
        return "a tensor of a call whose row has gone"
    if role == "gradient":
        return "the gradient of a parameter"
    if called.kind == "module":
        named = {"parameter": "a parameter", "state": "a buffer"}
        return f"{named.get(role, 'a tensor')} of a module"
    return "a value that the program saved" if called.kind == "custom" else f"a tensor of a {called.kind} call"


# -- the two forms of a dump, written call by call ---------------------------------------------------------------------

MOST_DIGITS = 9
"""Digits of a tensor's place in the name of a file; `arrays.py` reads no more."""


class CallRow(NamedTuple):
    """What a call's row says. `stem` is None where these dumps have no name for it.

    again: it is a forward call that is done again for a backward pass.
    """

    stem: str | None
    phase: Phase
    parent: int | None
    function: str
    kind: str
    again: bool


class CallTensor(NamedTuple):
    """A tensor of a call, on its way into the dump. `summary` is there when `values` are only the first of it."""

    side: Side
    path: str
    dtype: str
    shape: tuple[int, ...]
    values: Array
    summary: tuple[float, ...] = ()


class PendingCall:
    """A call whose tensors are still coming."""

    def __init__(self, seq: int, called: CallRow) -> None:
        self.seq = seq
        self.called = called
        self.tensors: list[CallTensor] = []
        self.is_new = True  # something came since the files were last brought up to date

    @property
    def name(self) -> str:
        phase = "backward" if self.called.phase == "backward" else "forward"
        return f"{self.called.stem}_{phase}"

    @property
    def has_results(self) -> bool:
        return self.called.phase == "backward" or any(one.side == "output" for one in self.tensors)

    def in_order(self) -> list[CallTensor]:
        """Inputs before outputs, each by their places."""
        return sorted(self.tensors, key=lambda one: (one.side == "output", order(one.path)))


class DumpForm(Protocol):
    """Where whole calls are written to."""

    sample: bool

    def write(self, call: PendingCall, lost: Counter[str]) -> None:
        """Write a call so that a kill takes no part of it that was written."""

    def close(self) -> None:
        """Nothing more will come."""


class LineFile:
    """A ".pkl" of JSON lines. A line is written at one go, and nothing waits in memory."""

    def __init__(self, path: Path, sample: bool) -> None:
        self.path = path
        self.sample = sample
        self._number = 0
        self._file: FileIO | None = FileIO(path, "wb")

    def write(self, call: PendingCall, lost: Counter[str]) -> None:  # noqa: ARG002 - everything can be said
        if self._file is None:  # another recording goes on with it
            self._file = FileIO(self.path, "ab")
        for one in call.in_order():
            name = f"{self._number}_{call.name}_{one.side}{'.' * bool(one.path)}{one.path}"
            self._file.write(line(name, one).encode())
            self._number += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def line(name: str, one: CallTensor) -> str:
    """The line of a tensor."""
    values = numbers.write(one.values, one.summary)
    return f"[{numbers.text(name)}, {values}, {numbers.text(f'torch.{one.dtype}')}, {list(one.shape)}]\n"


class ArrayFolder:
    """A folder of numpy's files. A call has two numbers: one for its inputs, one for its outputs."""

    sample = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        path.mkdir(parents=True, exist_ok=True)

    def write(self, call: PendingCall, lost: Counter[str]) -> None:
        for side in ("input", "output"):
            tensors = [one for one in call.in_order() if one.side == side]
            taken = {numeral(one.path or "0", MOST_DIGITS) for one in tensors}
            for one in tensors:
                place = numeral(one.path or "0", MOST_DIGITS)
                if place is None:  # a keyword, or inside of a list: there is no word for it in a file's name
                    lost["the place of a tensor inside of an argument"] += 1
                    place = next(free for free in range(len(taken) + 1) if free not in taken)
                    taken.add(place)
                name = self._name(call.name, side, place, one.shape)
                if name is None:
                    lost["the values of a tensor whose name no file can have"] += 1
                else:
                    npy.write_npy(self.path / name, self._array(one, lost))
            self._number += bool(tensors)

    def close(self) -> None:
        """Every file is written and closed."""

    def _name(self, name: str, side: str, place: int, shape: tuple[int, ...]) -> str | None:
        strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        sizes, steps = (",".join(map(str, one)) for one in (shape, strides))
        form = f"{side}{place}_shape[{sizes}]_stride[{steps}]_offset[0]_format[2]"
        return file_name(f"{self._number}_{name}_{form}", ".npy")

    def _array(self, one: CallTensor, lost: Counter[str]) -> Array:
        kind = DTYPES[one.dtype]
        if kind.storage.kind == "c":
            return one.values.view(kind.storage).reshape(one.shape)
        if kind.kind == "bool":
            return one.values.astype(np.bool_).reshape(one.shape)
        if kind.kind != "int" and kind.storage.kind != "f":
            lost[f"the dtype {one.dtype}, written as {one.values.dtype}"] += 1
        return one.values.reshape(one.shape) if kind.kind != "complex" else one.values.reshape(*one.shape, 2)


def place_of(path: Path, rank: int, world_size: int, *, folder: bool) -> Path:
    """Where a rank writes: at the path itself, or beside the others where there are several.

    >>> place_of(Path("out/npu.pkl"), 1, 2, folder=False)
    PosixPath('out/npu_rank1.pkl')
    """
    if world_size <= 1:
        return path
    return path / f"arrays_rank{rank}" if folder else path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
