"""How far apart the two sides of pairs are: by statistics for whole columns of pairs, by kept values pair by pair.

Reads `evidence`, feeds `judge.measuring`. Values are read for pairs whose bits differ, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure import metrics
from astray.comparison.measure.evidence import ALL_VALUES, Evidence, Progress, ReadBlocks
from astray.comparison.measure.pieces import Pieces, contrast_blocks, contrast_pieces, flat_blocks
from astray.comparison.pair.layouts import Layout
from astray.comparison.rows import Bools, Floats, Ints, Rows
from astray.comparison.verdict import Reason
from astray.errors import RunError
from astray.stats.dtypes import DTYPES
from astray.stats.kernels import Contrast, Slices, Strided, contrast, measure, slice_errors

SHUFFLED = 0.01
"""Numbers in another order are further off than this."""


class MeasuredPairs(NamedTuple):
    """What a source shows of some pairs: how far off, whether nothing or surely something differs, and why."""

    error: Floats
    equal: Bools
    differs: Bools
    size_unknown: Bools  # values surely differ by more than rounding, and how much is not known
    nonfinite: Bools
    reason: Ints
    metrics: dict[str, Floats]


def measure_statistics(evidence: Evidence, at: Ints) -> MeasuredPairs:
    """Bound the errors of many pairs from below by their statistics."""
    reference, candidate = evidence.statistics(at)
    eps = evidence.eps(at)
    count, zeros = evidence.numbers("count", at)[0], evidence.numbers("zeros", at)
    found = metrics.bounds(reference, candidate, count, metrics.summing_slack(reference, candidate, eps, count))
    error = metrics.error_of_statistics(found)
    same = metrics.equal_statistics(reference, candidate)
    bits_differ = evidence.bits[at] == 0
    bad = metrics.has_nonfinite(reference, count), metrics.has_nonfinite(candidate, count)
    has_counts = ~metrics.lacks_nonfinite_counts(reference, candidate)
    counts_differ = (reference["nan"] != candidate["nan"]) | (reference["inf"] != candidate["inf"])
    nonfinite = np.where(
        has_counts, counts_differ, (bad[0] != bad[1]) | metrics.has_other_nonfinite(reference, candidate)
    )
    # Bits that differ while nothing else does may be 0 against −0, the payload of a NaN, or a change too small to show.
    but_for_order = metrics.equal_but_for_order(reference, candidate) & (np.equal(*zeros) | ~has_counts)
    alike = bits_differ & but_for_order
    summed_alike = evidence.merged[at] & but_for_order  # parts were added up in another order than the whole
    telling = (count > 1) & (zeros[0] == 0) & (reference["nan"] == 0) & metrics.rounding_shows(eps, count)
    reordered = alike & telling & (eps > 0)
    reason = (
        np.where(alike & ~reordered, Reason.SAME_STATISTICS, 0)
        | np.where(reordered, Reason.REORDERED, 0)
        | np.where((reference["absmax"] == 0) & (candidate["absmax"] != 0), Reason.ZERO_REFERENCE, 0)
        | np.where(bad[0] & ~nonfinite, Reason.NONFINITE_BOTH, 0)
        | np.where(count == 0, Reason.EMPTY, 0)
    )
    same_dtype = np.equal(*evidence.sides("dtype", at))
    nothing_off = np.isnan(error) | alike | summed_alike  # NaN: no finite element, so nothing that could be off
    return MeasuredPairs(
        error=np.where(nothing_off, 0.0, error),
        equal=same & same_dtype & ~bits_differ & ~nonfinite & ~evidence.merged[at],
        differs=(~same & ~summed_alike) | bits_differ,
        size_unknown=reordered | (alike & (eps == 0)),
        nonfinite=nonfinite,
        reason=reason.astype(np.int64),
        metrics=found,
    )


class _PairMeasurement(NamedTuple):
    """What was measured of the values of a pair."""

    error: float
    equal: bool
    differs: bool
    nonfinite: bool
    reason: int
    metrics: list[float]


def measure_values(evidence: Evidence, at: Ints, progress: Progress | None) -> tuple[Ints, MeasuredPairs]:
    """Measure the kept values pair by pair. Returns the pairs that could be read, and their measurements.

    One call's output is the next one's input, and its values are stored once: what lies at the same two places on the
    disk is not measured again.
    """
    known: dict[tuple[int, ...], _PairMeasurement | None] = {}
    pairs: list[int] = []
    found: list[_PairMeasurement] = []
    for done, (pair, location) in enumerate(zip(at.tolist(), evidence.value_locations(at), strict=True), 1):
        if location not in known:
            known[location] = _measure(evidence, pair)
        measurement = known[location]
        if measurement is not None:
            pairs.append(pair)
            found.append(measurement)
        if progress is not None:
            progress(done, len(at))
    names = (*metrics.METRICS, *metrics.SLICES, *evidence.custom_metrics.names)
    measured = np.array([one.metrics for one in found]).reshape(-1, len(names)).T
    return np.array(pairs, np.int64), MeasuredPairs(
        error=np.array([one.error for one in found], np.float64),
        equal=np.array([one.equal for one in found], np.bool_),
        differs=np.array([one.differs for one in found], np.bool_),
        size_unknown=np.zeros(len(pairs), np.bool_),
        nonfinite=np.array([one.nonfinite for one in found], np.bool_),
        reason=np.array([one.reason for one in found], np.int64),
        metrics=dict(zip(names, measured, strict=True)),
    )


def _measure(evidence: Evidence, pair: int) -> _PairMeasurement | None:
    """None when the values of a side cannot be read."""
    layout = evidence.layout(pair)
    pieces = _pieces(evidence, pair) if layout is None else None
    if pieces is not None:
        plain = _measure_pieces(evidence, pair, *pieces)
        if plain.error > SHUFFLED:
            reference, candidate = (side.samples_last() for side in pieces)
            if reference is not None and candidate is not None and reference.fits(candidate):
                last = _measure_pieces(evidence, pair, reference, candidate)
                return min(plain, last, key=lambda measurement: measurement.error)
        return plain
    if evidence.blocks is not None and not evidence.custom_metrics.names:
        return _measure_blocks(evidence, pair, evidence.blocks)
    both = _read(evidence, pair)
    if both is None:
        return None
    found = contrast(both.reference, both.candidate)
    custom = evidence.custom_metrics(*both.arrays, (both.reference.dtype, both.candidate.dtype))
    return _PairMeasurement(
        error=metrics.error_of_values(found, both.absmax, both.rms),
        equal=both.equal,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, both.rms),
        metrics=[*_metrics(found, _slices(both, found)), *custom],
    )


def _pieces(evidence: Evidence, pair: int) -> tuple[Pieces, Pieces] | None:
    """Both sides of a pair in pieces, if one of them is; None where some values only were kept."""
    if evidence.pieces is None or evidence.selections(pair) != (ALL_VALUES, ALL_VALUES):
        return None
    reference, candidate = (read(row) for read, row in zip(evidence.pieces, evidence.tensors(pair), strict=True))
    if reference is None or candidate is None or max(len(reference.parts), len(candidate.parts)) < 2:
        return None
    dim = reference.dim if len(reference.parts) > 1 else candidate.dim
    reference, candidate = reference._replace(dim=dim), candidate._replace(dim=dim)
    return (reference, candidate) if reference.fits(candidate) else None


def _measure_pieces(evidence: Evidence, pair: int, reference: Pieces, candidate: Pieces) -> _PairMeasurement:
    dtypes = evidence.dtype_names(pair)
    found, equal = contrast_pieces(reference, candidate, dtypes)
    custom = evidence.custom_metrics
    absmax = _recorded_absmax(evidence, pair)
    if np.isnan(absmax):
        absmax = float(np.fmax.reduce([_absmax(Strided.from_numpy(part, dtypes[0])) for part in reference.parts]))
    return _PairMeasurement(
        error=metrics.error_of_values(found, absmax),
        equal=equal,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, 0.0),
        metrics=[*_metrics(found), *(custom(reference.whole, candidate.whole, dtypes) if custom.names else [])],
    )


def _measure_blocks(evidence: Evidence, pair: int, read: tuple[ReadBlocks, ReadBlocks]) -> _PairMeasurement | None:
    """Like `_measure`, with no more than a block in memory; of a tensor that is laid out anew, the candidate's own."""
    rows, layout = evidence.tensors(pair), evidence.layout(pair)
    try:
        blocks = read[1](rows[1]) if layout is None else _laid_out_blocks(evidence, rows[1], layout)
        found, equal = contrast_blocks(read[0](rows[0]), blocks, evidence.dtype_names(pair))
    except RunError:
        return None
    return _PairMeasurement(
        error=metrics.error_of_values(found, _recorded_absmax(evidence, pair)),
        equal=equal,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, 0.0),
        metrics=_metrics(found),
    )


def _laid_out_blocks(evidence: Evidence, row: int, layout: Layout) -> Iterator[npt.NDArray[Any]]:
    values = evidence.read_candidate(row)
    if values is None:
        raise RunError("The values of the candidate cannot be read.")
    return flat_blocks(layout.apply(values))


def _metrics(sums: Contrast, slices: Slices | None = None) -> list[float]:
    return [*(metric(sums) for metric in metrics.METRICS.values()), *metrics.of_slices(slices, sums)]


class _Both(NamedTuple):
    """The values of a pair. The arrays are here to be kept alive."""

    reference: Strided
    candidate: Strided
    absmax: float
    rms: float  # of the whole reference, where the values are of a slice
    equal: bool
    is_whole: bool
    arrays: tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _read(evidence: Evidence, pair: int) -> _Both | None:
    rows, selections = evidence.tensors(pair), evidence.selections(pair)
    reference, candidate = evidence.read_reference(rows[0]), evidence.read_candidate(rows[1])
    if reference is None or candidate is None:
        return None
    layout = evidence.layout(pair)
    candidate = candidate if layout is None else layout.apply(candidate)
    common = selections[0].intersection(selections[1])
    reference, candidate = selections[0].narrow(reference, common), selections[1].narrow(candidate, common)
    if reference.size != candidate.size:
        return None
    candidate = candidate.reshape(reference.shape)  # where dimensions of size 1 do not count
    dtypes = evidence.dtype_names(pair)
    strided = Strided.from_numpy(reference, dtypes[0]), Strided.from_numpy(candidate, dtypes[1])
    absmax = _recorded_absmax(evidence, pair)
    if np.isnan(absmax):
        absmax = _absmax(strided[0])
    # The bits are compared only where fingerprints do not show already that they differ.
    same_dtype = strided[0].dtype == strided[1].dtype
    equal = same_dtype and evidence.bits[pair] != 0 and reference.tobytes() == candidate.tobytes()
    rms = 0.0 if common.part is None else _rms(evidence.reference, int(evidence.pairs.reference[pair]))
    return _Both(*strided, absmax, rms, equal, common == ALL_VALUES, (reference, candidate))


def _recorded_absmax(evidence: Evidence, pair: int) -> float:
    return float(evidence.reference.statistic("absmax", evidence.pairs.reference[[pair]])[0])


def _slices(both: _Both, sums: Contrast) -> Slices | None:
    """How far off the slices of a tensor of floats are; None where some of its values were kept."""
    names = {DTYPES[side.dtype].kind for side in (both.reference, both.candidate)}
    if not both.is_whole or not sums.max_abs_error or not names <= {"float", "complex"}:
        return None
    return slice_errors(both.reference, both.candidate, sums.max_abs_error)


def _absmax(tensor: Strided) -> float:
    statistics = measure(tensor, fingerprint=False).statistics
    return metrics.known(statistics.absmax if statistics is not None else None)


def _rms(rows: Rows, row: int) -> float:
    """The root of the mean square of a tensor by its statistics; 0 when there are none."""
    mean, std = (float(rows.statistic(name, np.array([row]))[0]) for name in ("mean", "std"))
    return float(np.nan_to_num(np.hypot(mean, std)))


def _reason(sums: Contrast, rms: float) -> int:
    reason = 0
    if sums.count == 0:
        reason |= Reason.EMPTY
    if sums.l2_reference == 0 and sums.l2_candidate and not rms:
        reason |= Reason.ZERO_REFERENCE
    if sums.nan_reference + sums.inf_reference and not sums.nonfinite_mismatch:
        reason |= Reason.NONFINITE_BOTH
    return reason
