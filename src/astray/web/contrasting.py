"""What the values of one pair tell: histograms of both sides and of the difference, the worst elements, heat maps.

Two passes over the blocks of both tensors: one for the range of the numbers, the worst and the maps, one for the
histograms, which need the range. Of one run alone, the same of its numbers in place of the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.stats import dtypes
from astray.web.elements import Block, Elements, blocks
from astray.web.heat import Heat
from astray.web.histograms import Extent, Histogram, edges_of, is_steep
from astray.web.wire import Document
from astray.web.worst import Worst

Floats = npt.NDArray[np.float64]


class Contrasted(NamedTuple):
    """Parts of a detail; `heat` is None for a scalar or a sample."""

    histograms: Document | None
    worst: list[Document]
    heat: Document | None


def difference_of(reference: Floats, candidate: Floats) -> Floats:
    """candidate − reference; 0 where both are the same NaN or infinity, inf or −inf where only one is not finite.

    An infinite difference is how far a NaN is off, too: it says that there is no number for it.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        found = candidate - reference
    strange = ~np.isfinite(found)
    if strange.any():
        same = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
        found[strange & same] = 0.0
        found[np.isnan(found)] = np.inf
    return found


def contrast(reference: Elements, candidate: Elements) -> Contrasted:
    """Two tensors of equally many elements. Raises RunError when their values cannot be read."""
    if reference.size != candidate.size:
        raise RunError(f"{reference.size:,} values cannot be laid beside {candidate.size:,}.")
    extents, gaps, worst = (Extent(), Extent()), Extent(), Worst()
    heat = Heat(reference.shape) if reference.kept.sampled < 0 else None
    begin = 0
    for block, one, other in _both(reference, candidate):
        gap = difference_of(one, other)
        sizes = np.abs(gap)
        for extent, numbers in zip((*extents, gaps), (one, other, gap), strict=True):
            extent.add(numbers)
        worst.add(begin, sizes, one, other)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    told = [
        {"index": reference.index(place), "a": one, "b": other,
         "difference": difference_of(np.array([one]), np.array([other]))[0]}
        for place, one, other in worst.found()
    ]  # fmt: skip
    return Contrasted(
        _histograms(reference, candidate, extents, gaps),
        told,
        None if heat is None else heat.document(reference.complex),
    )


def _both(reference: Elements, candidate: Elements) -> Iterator[tuple[Block, Floats, Floats]]:
    plan = list(blocks(reference.shape))
    sizes = [block.size for block in plan]
    return zip(plan, reference.walk(sizes), candidate.walk(sizes), strict=True)


def _histograms(
    reference: Elements, candidate: Elements, extents: tuple[Extent, Extent], gaps: Extent
) -> Document | None:
    if extents[0].empty and extents[1].empty:
        return None
    whole = all(dtypes.find(side.dtype).kind in ("int", "bool") for side in (reference, candidate))
    edges = edges_of(*extents[0].joined(extents[1]), whole)
    sides = Histogram(edges), Histogram(edges)
    gap = None if gaps.empty else Histogram(edges_of(gaps.low, gaps.high, whole))
    for _, one, other in _both(reference, candidate):
        sides[0].add(one)
        sides[1].add(other)
        if gap is not None:
            gap.add(difference_of(one, other))
    return {
        "edges": edges,
        "a": sides[0].counts,
        "b": sides[1].counts,
        "difference": None if gap is None else gap.document(),
        "log": is_steep(*sides),
        "nonfinite": {"a": extents[0].strange(), "b": extents[1].strange(), "difference": gaps.strange()},
    }


def describe(values: Elements) -> Contrasted:
    """One tensor alone: the largest elements in place of the worst, and a map of where it is large."""
    extent, worst = Extent(), Worst()
    heat = Heat(values.shape) if values.kept.sampled < 0 else None
    plan = list(blocks(values.shape))
    begin = 0
    for block, numbers in zip(plan, values.walk([block.size for block in plan]), strict=True):
        sizes = np.abs(numbers)
        sizes[np.isnan(sizes)] = np.inf
        extent.add(numbers)
        worst.add(begin, sizes, numbers)
        if heat is not None:
            heat.add(block, sizes)
        begin += block.size
    told = [{"index": values.index(place), "a": one, "b": None, "difference": None} for place, one, _ in worst.found()]
    return Contrasted(_histogram(values, extent), told, None if heat is None else heat.document(values.complex))


def _histogram(values: Elements, extent: Extent) -> Document | None:
    if extent.empty:
        return None
    found = Histogram(edges_of(extent.low, extent.high, dtypes.find(values.dtype).kind in ("int", "bool")))
    for numbers in values.walk([block.size for block in blocks(values.shape)]):
        found.add(numbers)
    return {
        "edges": found.edges,
        "a": found.counts,
        "b": None,
        "difference": None,
        "log": is_steep(found),
        "nonfinite": {"a": extent.strange(), "b": {}, "difference": {}},
    }
