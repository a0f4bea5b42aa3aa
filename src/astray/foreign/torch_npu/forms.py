"""The two forms of a dump of torch_npu.hooks, as they are written call by call: lines in a file, arrays in a folder."""

from __future__ import annotations

from collections import Counter
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from astray.foreign import array_files as npy
from astray.foreign.torch_npu import numbers
from astray.foreign.torch_npu.dumped import Array
from astray.foreign.torch_npu.names import Side, order
from astray.numerals import numeral
from astray.records import Phase
from astray.stats import DTYPES
from astray.store.file_names import file_name

MOST_DIGITS = 9
"""Of a tensor's place in the name of a file: what `arrays.py` reads."""


class Called(NamedTuple):
    """What a call's row says. `stem` is None where these dumps have no name for it.

    again: it is a forward call that is done again for a backward pass.
    """

    stem: str | None
    phase: Phase
    parent: int | None
    function: str
    kind: str
    again: bool


class Kept(NamedTuple):
    """A tensor of a call, on its way into the dump. `summary` is there when `values` are only the first of it."""

    side: Side
    path: str
    dtype: str
    shape: tuple[int, ...]
    values: Array
    summary: tuple[float, ...] = ()


class Held:
    """A call whose tensors are still coming."""

    def __init__(self, seq: int, called: Called) -> None:
        self.seq = seq
        self.called = called
        self.tensors: list[Kept] = []
        self.is_new = True  # something came since the files were last brought up to date

    @property
    def name(self) -> str:
        phase = "backward" if self.called.phase == "backward" else "forward"
        return f"{self.called.stem}_{phase}"

    @property
    def has_results(self) -> bool:
        return self.called.phase == "backward" or any(one.side == "output" for one in self.tensors)

    def in_order(self) -> list[Kept]:
        """Inputs before outputs, each by their places."""
        return sorted(self.tensors, key=lambda one: (one.side == "output", order(one.path)))


class Form(Protocol):
    """Where whole calls are written to."""

    sample: bool

    def write(self, call: Held, lost: Counter[str]) -> None:
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

    def write(self, call: Held, lost: Counter[str]) -> None:  # noqa: ARG002 - everything can be said
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


def line(name: str, one: Kept) -> str:
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

    def write(self, call: Held, lost: Counter[str]) -> None:
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
                    npy.write(self.path / name, self._array(one, lost))
            self._number += bool(tensors)

    def close(self) -> None:
        """Every file is written and closed."""

    def _name(self, name: str, side: str, place: int, shape: tuple[int, ...]) -> str | None:
        strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        sizes, steps = (",".join(map(str, one)) for one in (shape, strides))
        form = f"{side}{place}_shape[{sizes}]_stride[{steps}]_offset[0]_format[2]"
        return file_name(f"{self._number}_{name}_{form}", ".npy")

    def _array(self, one: Kept, lost: Counter[str]) -> Array:
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
