"""What a pair can be judged by, and what that shows. The best source that both sides have is used.

Reads the pairs of `alignment` and the runs, feeds `judge`. A pair is measured by all its values, else by those of the
slice or the sample that both sides kept (`kept_values`), else by its statistics, which bound the error from below, else
by its fingerprint, which says only whether the bits are the same. Values are read for pairs whose bits differ, one at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure import kept_values as kept
from astray.comparison.measure import metrics
from astray.comparison.measure.custom_metrics import CustomMetrics
from astray.comparison.measure.kept_values import EvidenceSource, KeptSelection, KeptValues
from astray.comparison.measure.pieces import Pieces, contrast_blocks, contrast_pieces
from astray.comparison.pair.alignment import Alignment
from astray.comparison.rows import Bools, Floats, Ints, Rows
from astray.comparison.verdict import Reason
from astray.errors import RunError
from astray.stats.dtypes import DTYPES
from astray.stats.kernels import Contrast, Slices, Strided, contrast, measure, slice_errors

ReadValues = Callable[[int], npt.NDArray[Any] | None]
"""Gives the kept values of a tensor row, or None when they cannot be read."""

ReadBlocks = Callable[[int], Iterator[npt.NDArray[Any]]]
"""Gives the values of a row in row-major order, in flat arrays of bounded size. Raises RunError where it cannot."""

ReadPieces = Callable[[int], Pieces | None]
"""Gives the values of a row that was joined from several, piece by piece, or None when it was not or they are lost."""

Progress = Callable[[int, int], None]
"""Called after each pair of values with how many are done, and how many there are."""

STATISTICS = ("min", "max", "mean", "std", "l2", "absmax")
COUNTS = ("nan", "inf")


SHUFFLED = 0.01
"""Numbers in another order are further off than this."""


@dataclass(frozen=True)
class Evidence:
    """The pairs of one rank with what both runs recorded of them. Columns are read by pair number."""

    reference: Rows
    candidate: Rows
    pairs: Alignment
    dtypes: list[str]  # the names behind the codes of the `dtype` columns
    roles: list[str]  # and of the `role` columns
    phases: list[str]  # and of the `phase` columns
    parts: list[str]  # and of the `part` columns
    paths: list[str]  # and of the `path` columns
    read_reference: ReadValues
    read_candidate: ReadValues
    custom_metrics: CustomMetrics
    tolerance: Floats  # for each pair what the user allows, NaN where no tolerance was given
    pieces: tuple[ReadPieces, ReadPieces] | None = None  # where micro steps were joined
    blocks: tuple[ReadBlocks, ReadBlocks] | None = None  # of checkpoints, whose tensors may be larger than memory
    same_fingerprint_kind: bool = True  # whether the fingerprints of both runs were made in the same way
    selected_from: PairSelection | None = None  # where these are some of the pairs

    def take(self, at: Ints) -> Evidence:
        """Some of the pairs, with what is known of them."""
        pairs = Alignment(self.pairs.reference[at], self.pairs.candidate[at])
        return replace(self, pairs=pairs, tolerance=self.tolerance[at], selected_from=PairSelection(self, at))

    def sides(self, name: str, at: Ints) -> tuple[Ints, Ints]:
        """A column of keys or forms on both sides."""
        return (
            self.reference.columns[name][self.pairs.reference[at]],
            self.candidate.columns[name][self.pairs.candidate[at]],
        )

    def numbers(self, name: str, at: Ints) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """A recorded number of the tensors on both sides."""
        return (
            self.reference.statistic(name, self.pairs.reference[at]),
            self.candidate.statistic(name, self.pairs.candidate[at]),
        )

    def statistics(self, at: Ints) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """The six statistics and the non-finite counts on both sides."""
        both = {name: self.numbers(name, at) for name in (*STATISTICS, *COUNTS)}
        return {name: left for name, (left, _) in both.items()}, {name: right for name, (_, right) in both.items()}

    @cached_property
    def mixed(self) -> float:
        """The share of different dtypes among all pairs."""
        if self.selected_from is not None:
            return self.selected_from.evidence.mixed
        at = np.flatnonzero(self.pairs.matched)
        return float(np.not_equal(*self.sides("dtype", at)).mean()) if len(at) else 0.0

    @cached_property
    def steps(self) -> Ints:
        """The step of each pair, −1 for those that only one side has."""
        step = np.append(self.reference.columns["step"], -1)[self.pairs.reference]
        return np.where(self.pairs.matched, step, -1)

    @cached_property
    def first_step(self) -> int:
        """The first step of all pairs, 0 where there are none."""
        if self.selected_from is not None:
            return self.selected_from.evidence.first_step
        known = self.steps[self.pairs.matched]
        return int(known.min()) if len(known) else 0

    @cached_property
    def remarks(self) -> Ints:
        """For each pair the reasons (flags) about how its rows were made of several; 0 for recorded rows."""
        return (
            self._of_joined("remark")
            if self.selected_from is None
            else self.selected_from.evidence.remarks[self.selected_from.at]
        )

    @cached_property
    def merged(self) -> Bools:
        """For each pair whether statistics of a side were put together from those of its parts."""
        return (
            self._of_joined("merged") > 0
            if self.selected_from is None
            else self.selected_from.evidence.merged[self.selected_from.at]
        )

    def _of_joined(self, name: str) -> Ints:
        """A column that only the rows of joined micro steps have, of both sides together; 0 for all others."""
        found = np.zeros(len(self.pairs.reference), np.int32)
        for rows, at in ((self.reference, self.pairs.reference), (self.candidate, self.pairs.candidate)):
            if rows.run is not None and name in rows.run.tensors:
                column = rows.run.tensors.numbers(name)[rows.tensor]
                found |= np.append(column, 0).astype(np.int32)[at]
        return found

    @cached_property
    def kinds(self) -> Ints:
        """The kind of each dtype as a number. An unknown dtype is a kind of its own."""
        names = [DTYPES[name].kind if name in DTYPES else name for name in self.dtypes]
        return np.unique(names, return_inverse=True)[1] if names else np.empty(0, np.int64)

    @cached_property
    def precisions(self) -> Floats:
        """The epsilon of each dtype; 0 for those that must be exactly equal."""
        return np.array([DTYPES[name].eps if name in DTYPES else 0.0 for name in self.dtypes])

    def eps(self, at: Ints) -> Floats:
        """The coarser of the two sides' epsilons."""
        left, right = self.sides("dtype", at)
        return np.asarray(np.maximum(self.precisions[left], self.precisions[right]))

    @cached_property
    def bits(self) -> npt.NDArray[np.int8]:
        """For each pair: 1 the same fingerprint, 0 another one, −1 not known (or of different dtypes)."""
        if self.selected_from is not None:
            return self.selected_from.evidence.bits[self.selected_from.at]
        bits = np.full(len(self.pairs.reference), -1, np.int8)
        at = np.flatnonzero(self.pairs.matched)
        if len(at) and self.same_fingerprint_kind:
            known = self.reference.known("fingerprint", self.pairs.reference[at])
            known &= self.candidate.known("fingerprint", self.pairs.candidate[at])
            known &= np.equal(*self.sides("dtype", at))
            bits[at] = np.where(known, np.equal(*self.numbers("fingerprint", at)), -1)
        return bits

    def places(self, at: Ints) -> Iterator[tuple[int, ...]]:
        """For each pair where the values of both sides lie, and all else that a measurement of them depends on."""
        names = ("blob_file", "blob_offset", "blob_bytes", "sampled")
        columns = [column for name in names for column in self.numbers(name, at)]
        columns += [column for name in ("dtype", "part", "shape") for column in self.sides(name, at)]
        columns.append(self.bits[at])
        return zip(*(column.tolist() for column in columns), strict=True)

    def kept_values(self, at: Ints) -> tuple[npt.NDArray[np.int8], Bools]:
        """What can be compared of the kept values; and where both sides kept some, but none that the other did."""
        source, apart = np.zeros(len(at), np.int8), np.zeros(len(at), np.bool_)
        files, others = self.numbers("blob_file", at)
        both = np.flatnonzero((files >= 0) & (others >= 0))
        if len(both):
            one, other = map(KeptValues, self.sides("part", at[both]), self.numbers("sampled", at[both]))
            found = kept.shared(one, other)
            apart[both] = found == EvidenceSource.NONE
            nothing = (np.maximum(one.part, other.part) >= 0) & (np.minimum(*self.numbers("blob_bytes", at[both])) == 0)
            source[both] = np.where(nothing, EvidenceSource.NONE, found)  # the slice lies outside of the tensor
        return source, apart

    def selections(self, pair: int) -> tuple[KeptSelection, KeptSelection]:
        """Which values of a pair's tensors were kept."""
        at = np.array([pair])
        one, other = (
            KeptSelection(None if part[0] < 0 else self.parts[part[0]], int(sampled[0]))
            for part, sampled in zip(self.sides("part", at), self.numbers("sampled", at), strict=True)
        )
        return one, other

    def source_without_values(self, at: Ints) -> npt.NDArray[np.int8]:
        """The best source that both sides have besides kept values."""
        source = np.where(self.bits[at] >= 0, EvidenceSource.FINGERPRINT, EvidenceSource.NONE).astype(np.int8)
        left, right = self.numbers("count", at)
        source[(left >= 0) & (right >= 0)] = EvidenceSource.STATISTICS
        return source


class PairSelection(NamedTuple):
    """All the pairs that some were taken of, and which those are."""

    evidence: Evidence
    at: Ints


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
    told = ~metrics.is_untold(reference, candidate)
    counts_differ = (reference["nan"] != candidate["nan"]) | (reference["inf"] != candidate["inf"])
    nonfinite = np.where(told, counts_differ, (bad[0] != bad[1]) | metrics.has_other_nonfinite(reference, candidate))
    # Bits that differ while nothing else does may be 0 against −0, the payload of a NaN, or a change too small to show.
    but_for_order = metrics.equal_but_for_order(reference, candidate) & (np.equal(*zeros) | ~told)
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
        reason=reason.astype(np.int32),
        metrics=found,
    )


class _Found(NamedTuple):
    """What was measured of the values of a pair."""

    error: float
    equal: bool
    differs: bool
    nonfinite: bool
    reason: int
    metrics: list[float]


def measure_values(evidence: Evidence, at: Ints, progress: Progress | None) -> tuple[Ints, MeasuredPairs]:
    """Measure the kept values pair by pair. Gives the pairs that could be read, and what was found.

    One call's output is the next one's input, and its values are stored once: what is known of two places on the disk
    is not measured again.
    """
    known: dict[tuple[int, ...], _Found | None] = {}
    pairs: list[int] = []
    found: list[_Found] = []
    for done, (pair, place) in enumerate(zip(at.tolist(), evidence.places(at), strict=True), 1):
        if place not in known:
            known[place] = _measure(evidence, pair)
        one = known[place]
        if one is not None:
            pairs.append(pair)
            found.append(one)
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
        reason=np.array([one.reason for one in found], np.int32),
        metrics=dict(zip(names, measured, strict=True)),
    )


def _measure(evidence: Evidence, pair: int) -> _Found | None:
    """None when the values of a side cannot be read."""
    pieces = _pieces(evidence, pair)
    if pieces is not None:
        plain = _measure_pieces(evidence, pair, *pieces)
        inside = [side.samples_last() for side in pieces] if plain.error > SHUFFLED else []
        if len(inside) == 2 and inside[0] is not None and inside[1] is not None and inside[0].fits(inside[1]):
            return min(plain, _measure_pieces(evidence, pair, inside[0], inside[1]), key=lambda found: found.error)
        return plain
    if evidence.blocks is not None and not evidence.custom_metrics.names:
        return _measure_blocks(evidence, pair, evidence.blocks)
    both = _read(evidence, pair)
    if both is None:
        return None
    found = contrast(both.reference, both.candidate)
    own = evidence.custom_metrics(*both.arrays, (both.reference.dtype, both.candidate.dtype))
    return _Found(
        error=metrics.error_of_values(found, both.absmax, both.rms),
        equal=both.equal,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, both.rms),
        metrics=[*_metrics(found, _slices(both, found)), *own],
    )


def _pieces(evidence: Evidence, pair: int) -> tuple[Pieces, Pieces] | None:
    """Both sides of a pair in pieces, if one of them is; None where some values only were kept."""
    if evidence.pieces is None or evidence.selections(pair) != (kept.ALL, kept.ALL):
        return None
    left, right = int(evidence.pairs.reference[pair]), int(evidence.pairs.candidate[pair])
    here = evidence.pieces[0](int(evidence.reference.tensor[left]))
    there = evidence.pieces[1](int(evidence.candidate.tensor[right]))
    if here is None or there is None or max(len(here.parts), len(there.parts)) < 2:
        return None
    dim = here.dim if len(here.parts) > 1 else there.dim
    one, other = here._replace(dim=dim), there._replace(dim=dim)
    return (one, other) if one.fits(other) else None


def _measure_pieces(evidence: Evidence, pair: int, here: Pieces, there: Pieces) -> _Found:
    left, right = int(evidence.pairs.reference[pair]), int(evidence.pairs.candidate[pair])
    codes = (evidence.reference.columns["dtype"][left], evidence.candidate.columns["dtype"][right])
    dtypes = evidence.dtypes[codes[0]], evidence.dtypes[codes[1]]
    found, equal = contrast_pieces(here, there, dtypes)
    own = evidence.custom_metrics(here.whole, there.whole, dtypes) if evidence.custom_metrics.names else []
    absmax = float(evidence.reference.statistic("absmax", np.array([left]))[0])
    if np.isnan(absmax):
        absmax = float(np.fmax.reduce([_absmax(Strided.from_numpy(part, dtypes[0])) for part in here.parts]))
    return _Found(
        error=metrics.error_of_values(found, absmax),
        equal=equal,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, 0.0),
        metrics=[*_metrics(found), *own],
    )


def _measure_blocks(evidence: Evidence, pair: int, read: tuple[ReadBlocks, ReadBlocks]) -> _Found | None:
    """Like `_measure`, without ever having the whole of a tensor in memory. Its bits are known to differ."""
    left, right = int(evidence.pairs.reference[pair]), int(evidence.pairs.candidate[pair])
    codes = (evidence.reference.columns["dtype"][left], evidence.candidate.columns["dtype"][right])
    here, there = read[0](int(evidence.reference.tensor[left])), read[1](int(evidence.candidate.tensor[right]))
    try:
        found = contrast_blocks(here, there, (evidence.dtypes[codes[0]], evidence.dtypes[codes[1]]))
    except RunError:
        return None
    return _Found(
        error=metrics.error_of_values(found, float(evidence.reference.statistic("absmax", np.array([left]))[0])),
        equal=False,
        differs=found.different > 0,
        nonfinite=found.nonfinite_mismatch > 0,
        reason=_reason(found, 0.0),
        metrics=_metrics(found),
    )


def _metrics(found: Contrast, slices: Slices | None = None) -> list[float]:
    return [*(metric(found) for metric in metrics.METRICS.values()), *metrics.of_slices(slices, found)]


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
    left, right = int(evidence.pairs.reference[pair]), int(evidence.pairs.candidate[pair])
    here = evidence.read_reference(int(evidence.reference.tensor[left]))
    there = evidence.read_candidate(int(evidence.candidate.tensor[right]))
    if here is None or there is None:
        return None
    one, other = evidence.selections(pair)
    common = one.both(other)
    here, there = one.narrow(here, common), other.narrow(there, common)
    if here.size != there.size:
        return None
    there = there.reshape(here.shape)  # where dimensions of size 1 do not count
    dtypes = (evidence.reference.columns["dtype"][left], evidence.candidate.columns["dtype"][right])
    reference = Strided.from_numpy(here, evidence.dtypes[dtypes[0]])
    candidate = Strided.from_numpy(there, evidence.dtypes[dtypes[1]])
    absmax = float(evidence.reference.statistic("absmax", np.array([left]))[0])
    if np.isnan(absmax):
        absmax = _absmax(reference)
    # The bits are compared only where fingerprints do not show already that they differ.
    equal = reference.dtype == candidate.dtype and evidence.bits[pair] != 0 and here.tobytes() == there.tobytes()
    rms = 0.0 if common.part is None else _rms(evidence.reference, left)
    return _Both(reference, candidate, absmax, rms, equal, common == kept.ALL, (here, there))


def _slices(both: _Both, found: Contrast) -> Slices | None:
    """How far off the slices of a tensor of floats are; None where some of its values were kept."""
    names = {DTYPES[side.dtype].kind for side in (both.reference, both.candidate)}
    if not both.is_whole or not found.max_abs_error or not names <= {"float", "complex"}:
        return None
    return slice_errors(both.reference, both.candidate, found.max_abs_error)


def _absmax(tensor: Strided) -> float:
    statistics = measure(tensor, fingerprint=False).statistics
    return metrics.known(statistics.absmax if statistics is not None else None)


def _rms(rows: Rows, row: int) -> float:
    """The root of the mean square of a tensor by its statistics; 0 when there are none."""
    mean, std = (float(rows.statistic(name, np.array([row]))[0]) for name in ("mean", "std"))
    return float(np.nan_to_num(np.hypot(mean, std)))


def _reason(found: Contrast, rms: float) -> int:
    reason = 0
    if found.count == 0:
        reason |= Reason.EMPTY
    if found.l2_reference == 0 and found.l2_candidate and not rms:
        reason |= Reason.ZERO_REFERENCE
    if found.nan_reference + found.inf_reference and not found.nonfinite_mismatch:
        reason |= Reason.NONFINITE_BOTH
    return reason
