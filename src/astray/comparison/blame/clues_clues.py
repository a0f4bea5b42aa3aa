"""Sentences about a divergence between joined micro steps: in which of them it is, and whether it is a mere factor.

Reads the two rows that a report shows, feeds `first`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from astray.comparison.measure.metrics import error_of_values
from astray.comparison.measure.pieces import Pieces, stretches
from astray.comparison.pair.joined_rank import JoinedRank
from astray.errors import RunError
from astray.stats.kernels import Strided, contrast
from astray.wording import counted

SCALED = ("min", "max", "std", "l2", "absmax")
"""Statistics that grow with a positive factor, and are no small difference of large numbers."""

SAME_FACTOR = 1e-4
"""How far apart the factors of statistics may be: rounding is far smaller, and a factor that matters far larger."""


def sentences(
    reference: JoinedRank, candidate: JoinedRank, row_reference: int, row_candidate: int, limit: float
) -> Iterator[str]:
    """What there is to say of these rows; `limit` is how far off one may be."""
    if row_reference < 0 or row_candidate < 0:
        return
    yield from _where(reference, candidate, row_reference, row_candidate, limit)
    yield from _factor(reference, candidate, row_reference, row_candidate)


def _where(reference: JoinedRank, candidate: JoinedRank, one: int, other: int, limit: float) -> Iterator[str]:
    """Which micro steps are off, of the run that has more of them, if it is not all."""
    try:
        here, there = reference.pieces(one), candidate.pieces(other)
    except RunError:
        return
    kinds = [str(run.tensors["dtype"][row])[:7] == "complex" for run, row in ((reference, one), (candidate, other))]
    if here is None or there is None or kinds[0] != kinds[1] or not here.fits(there._replace(dim=here.dim)):
        return
    finer = "candidate" if len(there.parts) > len(here.parts) else "reference"
    parts = there if finer == "candidate" else here
    wrong = _wrong(here, there, parts, reference, candidate, one, other, limit)
    if 0 < len(wrong) < len(parts.parts):
        run, row = (candidate, other) if finer == "candidate" else (reference, one)
        micro = run.micro(row)
        named = ", ".join(str(micro[number]) for number in wrong)
        yield (
            f"Of the {counted(len(parts.parts), 'micro step')} of the {finer} "
            f"{'only micro ' if len(wrong) == 1 else 'micro '}{named} {'is' if len(wrong) == 1 else 'are'} off."
        )


def _wrong(
    here: Pieces, there: Pieces, parts: Pieces, reference: JoinedRank, candidate: JoinedRank, one: int, other: int,
    limit: float,
) -> list[int]:  # fmt: skip
    """The numbers of the parts that are off by more than the limit."""
    dtypes = str(reference.tensors["dtype"][one]), str(candidate.tensors["dtype"][other])
    absmax = float(reference.tensors.numbers("absmax")[one])
    found: list[int] = []
    begin = 0
    for left, right in stretches(here, there):
        number = max(at for at, bound in enumerate(parts.bounds[:-1]) if bound <= begin)
        begin += left.shape[here.dim]
        apart = contrast(Strided.from_numpy(left, dtypes[0]), Strided.from_numpy(right, dtypes[1]))
        if apart.nonfinite_mismatch or not error_of_values(apart, absmax) <= limit:
            found.append(number)
    return sorted(set(found))


def _factor(reference: JoinedRank, candidate: JoinedRank, one: int, other: int) -> Iterator[str]:
    """Whether the candidate's tensor is the reference's times a number, as a loss that was divided twice makes it."""
    left = {name: float(reference.tensors.numbers(name)[one]) for name in SCALED}
    right = {name: float(candidate.tensors.numbers(name)[other]) for name in SCALED}
    if not all(map(math.isfinite, (*left.values(), *right.values()))) or not left["l2"] or not right["l2"]:
        return
    factor = right["l2"] / left["l2"]
    apart = max(abs(right[name] - factor * left[name]) for name in SCALED)
    if abs(factor - 1) <= SAME_FACTOR or apart > SAME_FACTOR * right["absmax"]:
        return
    counts = [len(run.tables.rows(row)) for run, row in ((reference, one), (candidate, other))]
    text = f"The candidate's is {factor:.5g} times the reference's, by every statistic"
    if any(abs(factor - ratio) <= SAME_FACTOR * ratio for ratio in (counts[0] / counts[1], counts[1] / counts[0])):
        yield (
            f"{text}, and one run has {max(counts)} micro steps where the other has {min(counts)}: is the loss "
            "divided by their number in one run only?"
        )
    else:
        yield f"{text}: a constant factor."
