"""Compares two tensors that lie in pieces, each side cut in its own way, without ever putting them together.

Reads the parts of joined micro steps, feeds `evidence` and `joined_rank`. Where one side has four parts and the other
two, there are four stretches that are whole on both; each is compared by itself, and `merge_contrasts` adds up the
results, so that a batch is never held in memory. `merge_statistics` does so with recorded statistics, for whole columns
of tensors at once. Both are exact but for the rounding of float64.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Floats, Ints
from astray.stats.kernels import Contrast, Strided, contrast

Columns = dict[str, npt.NDArray[Any]]


class Pieces(NamedTuple):
    """The parts of a tensor, in order, and the dimension in which they follow each other.

    samples: how many samples of the batch each part has, 0 where that is not known.
    """

    dim: int
    parts: list[npt.NDArray[Any]]
    samples: tuple[int, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """Where each part begins along the dimension, and where the last one ends."""
        return [0, *np.cumsum([part.shape[self.dim] for part in self.parts]).tolist()]

    def fits(self, other: Pieces) -> bool:
        """Whether both have the same shape as wholes."""
        one, two = (list(side.parts[0].shape) for side in (self, other))
        if len(one) != len(two):
            return False
        one[self.dim], two[self.dim] = self.bounds[-1], other.bounds[-1]
        return one == two

    @property
    def whole(self) -> npt.NDArray[Any]:
        """All parts together."""
        return np.concatenate(self.parts, axis=self.dim) if len(self.parts) > 1 else self.parts[0]

    def samples_last(self) -> Pieces | None:
        """The same parts if their dimension is another one with the samples inside it, such as time · batch.

        Such parts do not follow each other, but lie side by side in each row of the outer dimension. None where a part
        has as many rows as samples, or sizes do not show it.
        """
        sizes = [part.shape[self.dim] for part in self.parts]
        if len(self.samples) != len(sizes) or 0 in self.samples or any(map(operator.mod, sizes, self.samples)):
            return None
        outer = set(map(operator.floordiv, sizes, self.samples))
        if len(outer) != 1 or outer == {1}:
            return None
        shapes = [
            (*part.shape[: self.dim], *outer, count, *part.shape[self.dim + 1 :]) for part, count in self._counted
        ]
        return Pieces(self.dim + 1, [part.reshape(shape) for part, shape in zip(self.parts, shapes, strict=True)])

    @property
    def _counted(self) -> Iterator[tuple[npt.NDArray[Any], int]]:
        return zip(self.parts, self.samples, strict=True)

    def between(self, begin: int, end: int) -> npt.NDArray[Any]:
        """A stretch that lies in one of the parts, as a view."""
        number = int(np.searchsorted(self.bounds, begin, side="right")) - 1
        first = self.bounds[number]
        cut: npt.NDArray[Any] = self.parts[number][(slice(None),) * self.dim + (slice(begin - first, end - first),)]
        return cut


def stretches(reference: Pieces, candidate: Pieces) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """What lies in one part on either side, both sides of it. Both must have the same size along the dimension."""
    bounds = sorted({*reference.bounds, *candidate.bounds})
    for begin, end in pairwise(bounds):
        yield reference.between(begin, end), candidate.between(begin, end)


def contrast_blocks(
    reference: Iterator[npt.NDArray[Any]], candidate: Iterator[npt.NDArray[Any]], dtypes: tuple[str, str]
) -> tuple[Contrast, bool]:
    """How far apart two tensors are that come in flat blocks, each side in its own; and whether they have the same
    bits.
    """
    found: list[Contrast] = []
    equal = dtypes[0] == dtypes[1]
    block_reference, block_candidate = np.empty(0), np.empty(0)
    while True:
        block_reference = block_reference if block_reference.size else next(reference, block_reference)
        block_candidate = block_candidate if block_candidate.size else next(candidate, block_candidate)
        size = min(block_reference.size, block_candidate.size)
        if not size:
            break
        sides = (
            Strided.from_numpy(block_reference[:size], dtypes[0]),
            Strided.from_numpy(block_candidate[:size], dtypes[1]),
        )
        found.append(contrast(*sides))
        equal = equal and block_reference[:size].tobytes() == block_candidate[:size].tobytes()
        block_reference, block_candidate = block_reference[size:], block_candidate[size:]
    return (found[0] if len(found) == 1 else merge_contrasts(found)), equal


def flat_blocks(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """The elements of a view in row-major order, in flat blocks: it is never copied as a whole."""
    rows = max(1, BLOCK * max(len(values), 1) // max(values.size, 1)) if values.ndim else 1
    for begin in range(0, len(values) if values.ndim else 1, rows):
        yield np.ascontiguousarray(values[begin : begin + rows] if values.ndim else values).reshape(-1)


BLOCK = 1 << 20
"""Elements in a block."""


def contrast_pieces(reference: Pieces, candidate: Pieces, dtypes: tuple[str, str]) -> tuple[Contrast, bool]:
    """How far apart two tensors are, and whether they have the same bits."""
    found: list[Contrast] = []
    equal = dtypes[0] == dtypes[1]
    for part_reference, part_candidate in stretches(reference, candidate):
        found.append(
            contrast(Strided.from_numpy(part_reference, dtypes[0]), Strided.from_numpy(part_candidate, dtypes[1]))
        )
        equal = equal and part_reference.tobytes() == part_candidate.tobytes()
    return merge_contrasts(found), equal


# -- merging -----------------------------------------------------------------------------------------------------------


EXTREMES: dict[str, np.ufunc] = {"min": np.fmin, "max": np.fmax, "absmax": np.fmax}
COUNTS = ("zeros", "nan", "inf", "count")


def merge_statistics(parts: Columns, begin: Ints) -> Columns:
    """The statistics of tensors of which each has some parts, from those of the parts, one tensor's after another's.

    begin: where the parts of each tensor begin. Where a part has no statistics (a count of −1), the whole has none.
    """
    if not len(begin):
        return {name: column[:0] for name, column in parts.items()}
    length = np.diff(np.append(begin, len(parts["count"])))
    found = {name: by.reduceat(parts[name], begin) for name, by in EXTREMES.items()}
    found |= {name: np.add.reduceat(parts[name], begin) for name in COUNTS}
    weight = np.maximum(parts["count"] - parts["nan"] - parts["inf"], 0).astype(np.float64)
    total = np.add.reduceat(weight, begin)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        # Scaled to at most 1, so that no square overflows unless a damaged row contradicts itself.
        scale = np.where(found["absmax"] > 0, found["absmax"], 1.0)
        mean, std, l2 = (_scaled(parts[name], np.repeat(scale, length), weight) for name in ("mean", "std", "l2"))
        middle = np.add.reduceat(mean * weight, begin) / total
        spread = np.add.reduceat((std**2 + (mean - np.repeat(middle, length)) ** 2) * weight, begin) / total
        found["mean"], found["std"] = middle * scale, np.sqrt(spread) * scale
        found["l2"] = np.where(total > 0, np.sqrt(np.add.reduceat(l2**2, begin)) * scale, np.nan)
    unknown = np.minimum.reduceat(parts["count"], begin) < 0
    for name, column in found.items():
        column[unknown] = -1 if name in COUNTS else np.nan
    return found


def _scaled(column: Floats, scale: Floats, weight: Floats) -> Floats:
    """A column of parts, with 0 for those that have nothing finite."""
    return np.where(weight > 0, column / scale, 0.0)


SUMS = (
    "count", "finite", "different", "rel_count", "within_tolerance", "within_1e3", "within_5e3", "nan_reference",
    "nan_candidate", "inf_reference", "inf_candidate", "nonfinite_mismatch",
)  # fmt: skip
TOTALS: dict[str, Callable[[list[float]], float]] = {
    "dot": math.fsum, "sum_abs_error": math.fsum, "sum_rel_error": math.fsum, "max_abs_error": max,
    "max_rel_error": max, "max_ulp": max, "l2_error": lambda parts: math.hypot(*parts),
    "l2_reference": lambda parts: math.hypot(*parts), "l2_candidate": lambda parts: math.hypot(*parts),
}  # fmt: skip
"""What is made of the numbers that parts have; None is left out."""


def merge_contrasts(parts: Sequence[Contrast]) -> Contrast:
    """The contrast of two tensors from those of their parts. It names no index, since parts may lie side by side."""
    found: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in SUMS}
    for name, total in TOTALS.items():
        known = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        found[name] = _total(total, known) if known else None
    some = [part for part in parts if part.finite]
    share = [part.finite / found["finite"] for part in some]
    ulps = [part.mean_ulp for part in some if part.mean_ulp is not None]
    found["mean_ulp"] = math.fsum(n * ulp for n, ulp in zip(share, ulps, strict=True)) if ulps else None
    for side in ("reference", "candidate"):
        moments = [(getattr(part, f"mean_{side}"), getattr(part, f"std_{side}")) for part in some]
        mean = math.fsum(n * mean for n, (mean, _) in zip(share, moments, strict=True))
        spread = [
            (math.sqrt(n) * std, math.sqrt(n) * (one - mean)) for n, (one, std) in zip(share, moments, strict=True)
        ]
        found[f"mean_{side}"] = mean if some else None
        found[f"std_{side}"] = math.hypot(*(number for pair in spread for number in pair)) if some else None
    nowhere = dict.fromkeys(("max_abs_index", "max_rel_index", "first_nonfinite_mismatch"), -1)
    return Contrast(cosine=_cosine(some, found["l2_reference"], found["l2_candidate"]), **found, **nowhere)


def _total(total: Callable[[list[float]], float], parts: list[float]) -> float:
    try:
        return total(parts)
    except OverflowError:  # beyond float64
        return math.inf
    except ValueError:  # what fsum has for infinities of both signs
        return math.nan


def _cosine(parts: list[Contrast], reference: float | None, candidate: float | None) -> float | None:
    """From the cosines of the parts, so that nothing overflows on the way."""
    if not reference or not candidate:
        return None
    norms = [[getattr(part, f"l2_{side}") for part in parts] for side in ("reference", "candidate")]
    norms_reference, norms_candidate = ([norm / max(side) for norm in side] for side in norms)
    cosines = [part.cosine or 0.0 for part in parts]  # there is none where a norm is 0, and then it does not count
    dot = math.fsum(
        cosine * one * other for cosine, one, other in zip(cosines, norms_reference, norms_candidate, strict=True)
    )
    return max(-1.0, min(1.0, dot / math.hypot(*norms_reference) / math.hypot(*norms_candidate)))
