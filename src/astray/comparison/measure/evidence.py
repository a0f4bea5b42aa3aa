"""What a pair can be judged by: the pairs of one rank with all that both runs kept of them, as columns.

Reads the pairs of `alignment` and the runs, feeds `measurements` and `judge`. The best source that both sides have is
used: all values, else those of the slice or the sample that both sides kept, else statistics, which bound the error
from below, else fingerprints, which say only whether the bits are the same. A side that kept every value holds whatever
the other kept. Two slices are the same when their texts are: one that lies inside another is taken for a different one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.measure.custom_metrics import CustomMetrics
from astray.comparison.measure.pieces import Pieces
from astray.comparison.pair.alignment import Alignment
from astray.comparison.pair.layouts import Layout
from astray.comparison.rows import Bools, Floats, Ints, Rows
from astray.comparison.verdict import EvidenceSource, Reason
from astray.part import Part
from astray.stats.dtypes import DTYPES
from astray.stats.kernels import sample_positions
from astray.store import DictionaryColumn

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
    layouts: Sequence[Layout] = ()  # those of the mapping, by the codes of the candidate's `layout` column
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
        return {name: reference for name, (reference, _) in both.items()}, {
            name: candidate for name, (_, candidate) in both.items()
        }

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
        """For each pair the reasons (flags) about how its rows were made of several, and whether they are compared."""
        if self.selected_from is not None:
            return self.selected_from.evidence.remarks[self.selected_from.at]
        apart = np.append(self.candidate.columns["apart"], 0)[self.pairs.candidate] > 0
        return self._of_joined("remark") | np.where(apart & self.pairs.matched, np.int64(Reason.APART), np.int64(0))

    @cached_property
    def merged(self) -> Bools:
        """For each pair whether statistics were added up in another order: of parts, or of elements that were moved."""
        return (
            (self._of_joined("merged") > 0) | self._moved_pairs
            if self.selected_from is None
            else self.selected_from.evidence.merged[self.selected_from.at]
        )

    @property
    def _moved_pairs(self) -> Bools:
        found = np.zeros(len(self.pairs.reference), np.bool_)
        at = np.flatnonzero(self.pairs.matched)
        found[at] = self.moved(at)
        return found

    def moved(self, at: Ints) -> Bools:
        """Where a layout rule puts the candidate's elements into the reference's order."""
        return np.asarray(self.candidate.columns["moved"][self.pairs.candidate[at]] > 0)

    def has_layout(self, at: Ints) -> Bools:
        """Where the mapping has a rule for how the candidate's tensor is laid out."""
        return np.asarray(self.candidate.columns["layout"][self.pairs.candidate[at]] >= 0)

    def layout(self, pair: int) -> Layout | None:
        """How the candidate's tensor is to be laid out; None where it lies as the reference's does."""
        rule = int(self.candidate.columns["layout"][self.pairs.candidate[pair]])
        return self.layouts[rule] if rule >= 0 else None

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
        dtype_reference, dtype_candidate = self.sides("dtype", at)
        return np.asarray(np.maximum(self.precisions[dtype_reference], self.precisions[dtype_candidate]))

    @cached_property
    def bits(self) -> npt.NDArray[np.int8]:
        """For each pair: 1 the same fingerprint, 0 another one, −1 not known (or of different dtypes)."""
        if self.selected_from is not None:
            return self.selected_from.evidence.bits[self.selected_from.at]
        bits = np.full(len(self.pairs.reference), -1, np.int8)
        at = np.flatnonzero(self.pairs.matched)
        if len(at) and self.same_fingerprint_kind:
            known = self._has_fingerprints(at) & ~self.moved(at)
            bits[at] = np.where(known, np.equal(*self.numbers("fingerprint", at)), -1)
        return bits

    def _has_fingerprints(self, at: Ints) -> Bools:
        """Where both sides have fingerprints of one dtype."""
        known = self.reference.known("fingerprint", self.pairs.reference[at])
        known &= self.candidate.known("fingerprint", self.pairs.candidate[at])
        return known & np.equal(*self.sides("dtype", at))

    def has_same_fingerprint(self, at: Ints) -> Bools:
        """Where both sides were recorded with the same bits, whatever the mapping does to them.

        Not where all elements are one number, for then they have no order.
        """
        if not self.same_fingerprint_kind:
            return np.zeros(len(at), np.bool_)
        several = np.less(*(self.candidate.statistic(name, self.pairs.candidate[at]) for name in ("min", "max")))
        return np.asarray(several & self._has_fingerprints(at) & np.equal(*self.numbers("fingerprint", at)))

    def value_locations(self, at: Ints) -> Iterator[tuple[int, ...]]:
        """For each pair where the values of both sides lie, and what else a measurement of them depends on."""
        names = ("blob_file", "blob_offset", "blob_bytes", "sampled")
        columns = [column for name in names for column in self.numbers(name, at)]
        columns += [column for name in ("dtype", "part", "shape") for column in self.sides(name, at)]
        columns += [self.bits[at], self.candidate.columns["layout"][self.pairs.candidate[at]]]
        return zip(*(column.tolist() for column in columns), strict=True)

    def kept_values(self, at: Ints) -> tuple[npt.NDArray[np.int8], Bools]:
        """What can be compared of the kept values; and where both sides kept some, but none that the other did."""
        source, apart = np.zeros(len(at), np.int8), np.zeros(len(at), np.bool_)
        files, others = self.numbers("blob_file", at)
        both = np.flatnonzero((files >= 0) & (others >= 0))
        if len(both):
            reference, candidate = map(KeptValues, self.sides("part", at[both]), self.numbers("sampled", at[both]))
            shared = shared_source(reference, candidate)
            # A slice or a sample of a tensor that is laid out in another way holds other elements.
            other = self.has_layout(at[both]) & ~candidate.whole
            shared = np.where(other, EvidenceSource.NONE, shared).astype(np.int8)
            apart[both] = shared == EvidenceSource.NONE
            # A slice may lie outside of the tensor.
            empty = np.minimum(*self.numbers("blob_bytes", at[both])) == 0
            empty &= np.maximum(reference.part, candidate.part) >= 0
            source[both] = np.where(empty, EvidenceSource.NONE, shared)
        return source, apart

    def tensors(self, pair: int) -> tuple[int, int]:
        """The rows of a pair in the tables of both runs."""
        return (
            int(self.reference.tensor[self.pairs.reference[pair]]),
            int(self.candidate.tensor[self.pairs.candidate[pair]]),
        )

    def dtype_names(self, pair: int) -> tuple[str, str]:
        """The dtypes of a pair."""
        codes = self.sides("dtype", np.array([pair]))
        return self.dtypes[codes[0][0]], self.dtypes[codes[1][0]]

    def selections(self, pair: int) -> tuple[KeptSelection, KeptSelection]:
        """Which values of a pair's tensors were kept."""
        at = np.array([pair])
        reference, candidate = (
            KeptSelection(None if part[0] < 0 else self.parts[part[0]], int(sampled[0]))
            for part, sampled in zip(self.sides("part", at), self.numbers("sampled", at), strict=True)
        )
        return reference, candidate

    def source_without_values(self, at: Ints) -> npt.NDArray[np.int8]:
        """The best source that both sides have besides kept values."""
        source = np.where(self.bits[at] >= 0, EvidenceSource.FINGERPRINT, EvidenceSource.NONE).astype(np.int8)
        count_reference, count_candidate = self.numbers("count", at)
        source[(count_reference >= 0) & (count_candidate >= 0)] = EvidenceSource.STATISTICS
        return source


class PairSelection(NamedTuple):
    """All the pairs that some were taken of, and which those are."""

    evidence: Evidence
    at: Ints


# -- which values were kept, and what both sides have of them ----------------------------------------------------------


class KeptValues(NamedTuple):
    """The values kept of one side's tensors: the code of the slice and the size of the sample they are, −1 for none."""

    part: Ints
    sampled: Ints

    @property
    def whole(self) -> Bools:
        """Where every value was kept."""
        return (self.part < 0) & (self.sampled < 0)


def shared_source(reference: KeptValues, candidate: KeptValues) -> npt.NDArray[np.int8]:
    """What can be compared of the values of tensors of which both sides kept some; NONE where each kept others."""
    same_sample = (reference.sampled == candidate.sampled) | (reference.sampled < 0) | (candidate.sampled < 0)
    shared = reference.whole | candidate.whole | ((reference.part == candidate.part) & same_sample)
    sliced, sampled = (np.maximum(*sides) >= 0 for sides in zip(reference, candidate, strict=True))
    source = np.where(sampled, EvidenceSource.SAMPLE, np.where(sliced, EvidenceSource.SLICE, EvidenceSource.VALUES))
    return np.where(shared, source, EvidenceSource.NONE).astype(np.int8)


class KeptSelection(NamedTuple):
    """The values kept of one tensor: those of a slice, or a sample. None and −1: all of them."""

    part: str | None
    sampled: int

    def intersection(self, other: KeptSelection) -> KeptSelection:
        """What both sides kept. Only for sides that `shared_source` lets compare."""
        return KeptSelection(self.part if self.part is not None else other.part, max(self.sampled, other.sampled))

    def narrow(self, values: npt.NDArray[Any], to: KeptSelection) -> npt.NDArray[Any]:
        """Take from the values of this selection those of another that lies in it."""
        if self.part is None and to.part is not None:
            values = Part.parse(to.part).cut(values)
        if self.sampled < 0 <= to.sampled:
            values = values.reshape(-1)[sample_positions(values.size, to.sampled)]
        return values


ALL_VALUES = KeptSelection(None, -1)


def is_partial(source: Ints) -> Bools:
    """Where a pair was judged by some of its values and not all."""
    return np.isin(source, (EvidenceSource.SAMPLE, EvidenceSource.SLICE))


def with_part(source: Ints, part: Ints) -> Ints:
    """One number for a source and the code of the slice it is of, −1 for none; `source_labels` reads it."""
    return source + (part + 1) * len(EvidenceSource)


def source_labels(codes: Ints, parts: list[str]) -> DictionaryColumn[str]:
    """The sources in words, the worst first; `codes` are those of `with_part`, or of a source alone."""
    found = np.flatnonzero(np.bincount(codes, minlength=1)).tolist()
    found.sort(key=lambda code: (code % len(EvidenceSource), code))
    number = np.full(max(found, default=0) + 1, -1, np.int32)
    number[found] = np.arange(len(found))
    return DictionaryColumn(
        number[codes],
        [_label(EvidenceSource(code % len(EvidenceSource)), code // len(EvidenceSource) - 1, parts) for code in found],
    )


def _label(source: EvidenceSource, part: int, parts: list[str]) -> str:
    if part < 0:
        return source.name.lower()
    return f"{'sample' if source == EvidenceSource.SAMPLE else 'values'} of the slice {parts[part]}"
