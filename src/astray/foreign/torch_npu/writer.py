"""Writes the rows of a recording as torch_npu.hooks does: whole calls, one after another, in either of its forms.

Rows come in the order of observation: the inputs of a call, then what runs inside of it, then its outputs; gradients of
several calls may interleave. A dump has the tensors of a call together, so a call is held until it is over: a forward
call until something runs that is not inside of it, a backward call until enough others have begun, or a forward call
does.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from astray.errors import RunError, RunExists
from astray.foreign import array_files as npy
from astray.foreign.torch_npu.arrays import tensor_files
from astray.foreign.torch_npu.lines import as_numbers, format_numbers, summarise
from astray.foreign.torch_npu.names import SAMPLE, SUMMARY, Array, Direction, path_order, stem, written_path
from astray.records import Phase, Role, Statistics
from astray.stats import DTYPES
from astray.store.run import RankRun
from astray.store.run_info import End, RunInfo
from astray.store.safe_paths import file_name
from astray.wording import numeral

_HELD_BACKWARDS = 16
"""How many backward calls are held: a function of several autograd nodes gets its gradients one by one."""
_TENSOR_ROLES = ("input", "output")


def first_positions(count: int, samples: int) -> npt.NDArray[np.int64]:
    """The positions of the elements that a recording keeps for sampled lines: the first, in row-major order."""
    return np.arange(min(count, samples), dtype=np.int64)


class TorchNpuTranslator:
    """Writes one rank into `form`, which may be replaced by another while the recording runs.

    first_only: rows have the values at `first_positions` only.
    """

    def __init__(self, form: DumpForm, *, first_only: bool = False) -> None:
        self.form = form
        self.first_only = first_only
        self.lost: Counter[str] = Counter()
        self._call_rows: dict[int, CallRow] = {}
        self._held: dict[int, PendingCall] = {}
        self._step: int | None = None
        self._with_modules: bool | None = None  # False where functions were recorded: the tool records nothing else

    def take(self, step: int, rows: RankRun) -> None:
        if self._step not in (None, step):
            self.lost["the beginning of a step"] += 1
        self._step = step
        self._note_calls(rows)
        tensors = rows.tensors
        columns = [tensors[name].tolist() for name in ("seq", "role", "path", "dtype", "shape")]
        for row, (seq, role, path, dtype, shape) in enumerate(zip(*columns, strict=True)):
            call_row = self._call_rows.get(seq)
            if call_row is None or call_row.stem is None or role not in _TENSOR_ROLES:
                self.lost[_describe_lost(call_row, role)] += 1
                continue
            self._write_finished(seq)
            call = self._held.setdefault(seq, PendingCall(seq, call_row))
            call.is_new = True
            tensor = self._tensor(rows, row, call_row, role, path, dtype, shape)
            if tensor is not None:
                call.tensors.append(tensor)

    def sync(self) -> None:
        """Write the calls that have results and got nothing new since the last sync: they are over."""
        for call in list(self._held.values()):
            if call.has_results and not call.is_new:
                self._write(call)
            call.is_new = False

    def end_step(self, step: int) -> None:  # noqa: ARG002 - as a Translator has it
        self.write_all()
        self._call_rows.clear()

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
            has_line = kind == "function" and phase != "update"  # the line of `optimizer.step()` is not the call's
            frames = rows.stack(stack) if has_line and stack is not None and stack >= 0 else []
            name = stem(kind, type, frames[0].code if frames else "")
            if kind == "module" and not self._with_modules:
                name = None
                self.lost["a call of a module, around those of functions"] += 1
            parent = parent if parent is not None and parent >= 0 else None
            self._call_rows[seq] = CallRow(name, phase, parent, site.rpartition("/")[2], kind, bool(recompute))
            if name is not None:
                self.lost["the module in which a function was called"] += kind != "module" and not site.startswith("/")
                self.lost["the name of a module"] += kind == "module"
                self.lost["that a call is a recomputation"] += bool(recompute)
                self.lost["that a call is part of an update"] += phase == "update"
        self.lost += Counter()  # drops the zeros

    def _write_finished(self, seq: int) -> None:
        """Write the calls that are over, since a tensor of this one has come."""
        if not self._held or (seq in self._held and len(self._held) == 1):
            return
        row, running = self._call_rows[seq], {seq, *self._enclosing(seq)}
        finished = [call for call in self._held.values() if call.row.phase == "backward"]
        if row.phase == "backward" or row.recompute:  # otherwise the backward pass is over
            finished = finished[: max(len(finished) - _HELD_BACKWARDS, 0)]
        finished += [call for call in self._held.values() if call.row.phase != "backward" and call.seq not in running]
        for call in finished:
            self._write(call)

    def _enclosing(self, seq: int) -> list[int]:
        """The calls that a forward call runs in."""
        enclosing: list[int] = []
        row = self._call_rows.get(seq)
        while row is not None and row.phase != "backward":
            if row.parent is None or row.parent in enclosing:  # the parents of a damaged run may form a cycle
                break
            enclosing.append(row.parent)
            row = self._call_rows.get(row.parent)
        return enclosing

    def _tensor(
        self, rows: RankRun, row: int, call_row: CallRow, role: Role, path: str, dtype: str, shape: tuple[int, ...]
    ) -> CallTensor | None:
        tensors = rows.tensors
        is_sample = int(tensors.numbers("sampled")[row]) >= 0 and not self.first_only
        is_part = tensors["part"][row] is not None or is_sample
        elements = None if is_part or dtype not in DTYPES else rows.values(row)
        if elements is None:
            self.lost["a tensor without its values"] += 1
            return None
        side, position = written_path(call_row.function, role, path, call_row.phase)
        values = as_numbers(elements, dtype)
        if not self.form.sample:
            return CallTensor(side, position, dtype, shape, values)
        known = Statistics.of({name: tensors.numbers(name)[row].item() for name in Statistics._fields})
        summary = None if self.first_only and known is None else summarise(values, known)
        return CallTensor(side, position, dtype, shape, values[:SAMPLE].copy(), summary or (math.nan,) * SUMMARY)

    def _write(self, call: PendingCall) -> None:
        del self._held[call.seq]
        if call.tensors:
            self.form.write(call, self.lost)


def translate(
    path: Path, rank: int, info: RunInfo, *, overwrite: bool, sample: bool = False, arrays: bool | None = None
) -> TorchNpuTranslator:
    """A translator that writes a rank: into a ".pkl" of JSON lines, or into a folder of .npy files.

    sample: of each tensor the first ten values, maximum, minimum and mean. arrays: whether into a folder; by default
    where the path has no suffix such as ".pkl".
    """
    arrays = not path.suffix if arrays is None else arrays
    own_path = rank_path(path, rank, info.world_size, folder=arrays)
    try:
        if own_path.is_dir() != arrays and own_path.exists():
            wanted = "folder" if arrays else "file"
            raise RunError(f"{own_path} is {'not a' if arrays else 'a'} folder. Give the name of a {wanted}.")
        if own_path.exists() and (not arrays or any(own_path.iterdir())) and not overwrite:
            raise RunExists(f"{own_path} is there already. Choose another, or overwrite it with --force.")
        own_path.parent.mkdir(parents=True, exist_ok=True)
        for old in tensor_files(own_path) if arrays and own_path.exists() else ():
            old.unlink()
        return TorchNpuTranslator(ArrayFolder(own_path) if arrays else LineFile(own_path, sample))
    except OSError as error:
        raise RunError(f"{own_path} cannot be written: {error.strerror}.") from None


def _describe_lost(row: CallRow | None, role: str) -> str:
    """A tensor that the format has no name for, in a few words."""
    if row is None:
        return "a tensor of a call whose row has gone"
    if role == "gradient":
        return "the gradient of a parameter"
    if row.kind == "module":
        words = {"parameter": "a parameter", "state": "a buffer"}
        return f"{words.get(role, 'a tensor')} of a module"
    if role == "state" and row.kind == "function":
        return "the state of a random generator"
    return "a value that the program saved" if row.kind == "custom" else f"a tensor of a {row.kind} call"


# -- the two forms of a dump -------------------------------------------------------------------------------------------

MOST_DIGITS = 9
"""Digits of a tensor's position in the name of a file; `arrays.py` reads no more."""


class CallRow(NamedTuple):
    """What is needed of a call's row. `stem` is None where these dumps have no name for the call."""

    stem: str | None
    phase: Phase
    parent: int | None
    function: str
    kind: str
    recompute: bool


class CallTensor(NamedTuple):
    """A tensor of a call, to be written. `summary` is set where `values` are only its first elements."""

    side: Direction
    path: str
    dtype: str
    shape: tuple[int, ...]
    values: Array
    summary: tuple[float, ...] = ()


class PendingCall:
    """A call whose tensors are still coming."""

    def __init__(self, seq: int, row: CallRow) -> None:
        self.seq = seq
        self.row = row
        self.tensors: list[CallTensor] = []
        self.is_new = True  # whether a tensor came since the last sync

    @property
    def name(self) -> str:
        phase = "backward" if self.row.phase == "backward" else "forward"
        return f"{self.row.stem}_{phase}"

    @property
    def has_results(self) -> bool:
        return self.row.phase == "backward" or any(tensor.side == "output" for tensor in self.tensors)

    def in_order(self) -> list[CallTensor]:
        """Inputs before outputs, both by position."""
        return sorted(self.tensors, key=lambda tensor: (tensor.side == "output", path_order(tensor.path)))


class DumpForm(Protocol):
    """One of the two forms of a dump, to which whole calls are written."""

    sample: bool

    def write(self, call: PendingCall, lost: Counter[str]) -> None:
        """Write a call. What has been written survives a kill."""

    def close(self) -> None:
        """Nothing more will come."""


class LineFile:
    """A ".pkl" of JSON lines. Each line is one unbuffered write."""

    def __init__(self, path: Path, sample: bool) -> None:
        self.path = path
        self.sample = sample
        self._number = 0
        self._file: FileIO | None = FileIO(path, "wb")

    def write(self, call: PendingCall, lost: Counter[str]) -> None:  # noqa: ARG002 - loses nothing
        if self._file is None:  # closed by an earlier recording
            self._file = FileIO(self.path, "ab")
        for tensor in call.in_order():
            name = f"{self._number}_{call.name}_{tensor.side}{'.' * bool(tensor.path)}{tensor.path}"
            self._file.write(format_line(name, tensor).encode())
            self._number += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def format_line(name: str, tensor: CallTensor) -> str:
    """The line of a tensor."""
    values = format_numbers(tensor.values, tensor.summary)
    return f"[{json.dumps(name)}, {values}, {json.dumps(f'torch.{tensor.dtype}')}, {list(tensor.shape)}]\n"


class ArrayFolder:
    """A folder of .npy files. A call takes two numbers: one for its inputs, one for its outputs."""

    sample = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        path.mkdir(parents=True, exist_ok=True)

    def write(self, call: PendingCall, lost: Counter[str]) -> None:
        for side in ("input", "output"):
            tensors = [tensor for tensor in call.in_order() if tensor.side == side]
            taken = {numeral(tensor.path or "0", MOST_DIGITS) for tensor in tensors}
            for tensor in tensors:
                position = numeral(tensor.path or "0", MOST_DIGITS)
                if position is None:  # a keyword, or inside of a list, which a file's name cannot express
                    lost["the place of a tensor inside of an argument"] += 1
                    position = next(free for free in range(len(taken) + 1) if free not in taken)
                    taken.add(position)
                name = self._name(call.name, side, position, tensor.shape)
                if name is None:
                    lost["the values of a tensor whose name no file can have"] += 1
                else:
                    npy.write_npy(self.path / name, self._array(tensor, lost))
            self._number += bool(tensors)

    def close(self) -> None:
        """Every file is written and closed."""

    def _name(self, name: str, side: str, position: int, shape: tuple[int, ...]) -> str | None:
        strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        sizes, steps = (",".join(map(str, counts)) for counts in (shape, strides))
        layout = f"{side}{position}_shape[{sizes}]_stride[{steps}]_offset[0]_format[2]"
        return file_name(f"{self._number}_{name}_{layout}", ".npy")

    def _array(self, tensor: CallTensor, lost: Counter[str]) -> Array:
        dtype, values = DTYPES[tensor.dtype], tensor.values
        if dtype.storage.kind == "c":
            return values.view(dtype.storage).reshape(tensor.shape)
        if dtype.kind == "bool":
            return values.astype(np.bool_).reshape(tensor.shape)
        if dtype.kind != "int" and dtype.storage.kind != "f":
            lost[f"the dtype {tensor.dtype}, written as {values.dtype}"] += 1
        return values.reshape(tensor.shape) if dtype.kind != "complex" else values.reshape(*tensor.shape, 2)


def rank_path(path: Path, rank: int, world_size: int, *, folder: bool) -> Path:
    """Where a rank writes: at the path itself, or with several ranks beside the others.

    >>> rank_path(Path("out/npu.pkl"), 1, 2, folder=False)
    PosixPath('out/npu_rank1.pkl')
    """
    if world_size <= 1:
        return path
    return path / f"arrays_rank{rank}" if folder else path.with_name(f"{path.stem}_rank{rank}{path.suffix}")
