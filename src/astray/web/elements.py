"""The kept values of one tensor, block by block in float64, and which index each of them has in the tensor.

Values on disk are memory-mapped, those of checkpoints are streamed: a tensor is never in memory as a whole. A complex
tensor is read as real numbers, with one more axis of length 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.evidence import ALL_VALUES, KeptSelection
from astray.comparison.pair.layouts import Layout
from astray.errors import RunError
from astray.part import Part, Span
from astray.stats import dtypes
from astray.stats.kernels import sample_positions
from astray.store import CheckpointRank, RankRun

Floats = npt.NDArray[np.float64]

BLOCK = 1 << 18
"""Elements that are looked at together: 2 MB of float64, so that a handful of them stay in the cache."""


class Block(NamedTuple):
    """A box of a tensor that is contiguous in row-major order."""

    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


def blocks(shape: tuple[int, ...], most: int = BLOCK) -> Iterator[Block]:
    """Boxes of at most so many elements that make up a tensor, in row-major order.

    >>> [block.shape for block in blocks((2, 3, 4), most=8)]
    [(1, 2, 4), (1, 1, 4), (1, 2, 4), (1, 1, 4)]
    """
    if 0 in shape:
        return
    inner = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = next((axis for axis, size in enumerate(inner) if size <= most), 0)
    if not shape:
        yield Block((), ())
        return
    step = max(1, most // inner[cut])
    rest = shape[cut + 1 :]
    for prefix in np.ndindex(*shape[:cut]):
        for begin in range(0, shape[cut], step):
            length = min(step, shape[cut] - begin)
            yield Block((*prefix, begin, *(0,) * len(rest)), (*(1,) * cut, length, *rest))


class Elements:
    """What was kept of one tensor.

    shape: of the kept values: of the tensor, of a slice of it, or the number of samples; followed by 2 if complex.
    tensor: the shape of the tensor itself.
    kept: which of its values these are.
    """

    def __init__(
        self,
        source: npt.NDArray[Any] | tuple[CheckpointRank, int],
        dtype: str,
        tensor: tuple[int, ...],
        kept: KeptSelection,
    ) -> None:
        self._source = source
        self.dtype = dtype
        self.tensor = tensor
        self.kept = kept
        self.complex = dtypes.find(dtype).kind == "complex"
        shape = source.shape if isinstance(source, np.ndarray) else tensor
        self.shape: tuple[int, ...] = (*shape, 2) if self.complex else tuple(shape)

    @classmethod
    def read(cls, rank: RankRun, row: int) -> Elements | None:
        """The kept values of a row; None when none were. Raises RunError when they should be there and are not."""
        tensors = rank.tensors
        dtype, shape = str(tensors["dtype"][row]), tuple(tensors["shape"][row])
        if dtype not in dtypes.DTYPES:
            return None
        if isinstance(rank, CheckpointRank):
            return cls((rank, row), dtype, shape, ALL_VALUES)
        values = rank.verified(row)
        if values is None:
            return None
        return cls(values, dtype, shape, KeptSelection(tensors["part"][row], int(tensors.numbers("sampled")[row])))

    def narrowed(self, to: KeptSelection) -> Elements:
        """The elements of a selection that is part of this one."""
        if to == self.kept or not isinstance(self._source, np.ndarray):
            return self
        return Elements(self.kept.narrow(self._source, to), self.dtype, self.tensor, to)

    def laid_out(self, layout: Layout) -> Elements:
        """The same numbers as another run lays them out. Raises RunError where only some of them were kept."""
        if self.kept != ALL_VALUES:
            raise RunError(
                "The candidate kept some values only, and the mapping lays this tensor out in another way: they are "
                "not those of the reference."
            )
        source = self._source
        values = source if isinstance(source, np.ndarray) else source[0].verified(source[1])
        if values is None:
            raise RunError("The values of the candidate are not there any more.")
        return Elements(layout.apply(values), self.dtype, layout.shape(self.tensor), ALL_VALUES)

    @property
    def size(self) -> int:
        """How many real numbers there are."""
        return prod(self.shape)

    def walk(self, sizes: Iterable[int]) -> Iterator[Floats]:
        """The numbers in row-major order, in flat arrays of these sizes."""
        unit = 2 if self.complex else 1
        if isinstance(self._source, np.ndarray):
            flat, begin = self._source.reshape(-1), 0
            for size in sizes:
                yield self._decoded(flat[begin : begin + size // unit])
                begin += size // unit
            return
        rank, row = self._source
        stream = (self._decoded(block) for block in rank.blocks(row))
        rest = np.empty(0)
        for size in sizes:
            parts, count = [rest], len(rest)
            while count < size:
                parts.append(next(stream, np.empty(0)))
                if not len(parts[-1]):
                    raise RunError(f"{self.tensor} values end too early.")
                count += len(parts[-1])
            whole = np.concatenate(parts)
            yield whole[:size]
            rest = whole[size:]

    def _decoded(self, raw: npt.NDArray[Any]) -> Floats:
        return dtypes.widen(raw, self.dtype).reshape(-1)

    def index(self, flat: int) -> list[int]:
        """The index in the tensor of one of these numbers; of a complex one followed by 0 (real) or 1 (imaginary)."""
        position, *part = divmod(flat, 2) if self.complex else (flat,)
        shape = self.tensor if self.kept.part is None else Part.parse(self.kept.part).shape_of(self.tensor)
        if self.kept.sampled >= 0:
            position = int(sample_positions(prod(shape), self.kept.sampled)[position])
        index = [int(each) for each in np.unravel_index(position, shape)]
        if self.kept.part is not None:
            index = _in_tensor(index, Part.parse(self.kept.part), self.tensor)
        return [*index, *part]


def _in_tensor(index: list[int], part: Part, shape: tuple[int, ...]) -> list[int]:
    """The index in the tensor of an element of a slice of it."""
    between = len(shape) - len(part.first) - len(part.last)
    if between < 0:  # a slice of more axes than the tensor has takes all
        return index
    spans = (*part.first, *(Span(),) * between, *part.last)
    return [span.indices(size)[at] for span, size, at in zip(spans, shape, index, strict=True)]
