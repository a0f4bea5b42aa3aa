"""Which values the two sides of a pair kept, and what both have of them: all, those of a slice, or a sample of either.

Reads the columns of both runs, feeds `evidence`. A side that kept everything holds whatever the other kept. Two slices
are the same when their texts are: one that lies inside another is taken for a different one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Bools, Ints
from astray.part import Part
from astray.stats.kernels import sample_positions
from astray.store import DictionaryColumn


class EvidenceSource(IntEnum):
    """What a pair was judged by, from the worst to the best."""

    NONE = 0
    FINGERPRINT = 1
    STATISTICS = 2
    SAMPLE = 3  # of the tensor, or of a slice of it
    SLICE = 4
    VALUES = 5


class KeptValues(NamedTuple):
    """The values kept of one side's tensors: the code of the slice and the size of the sample they are, −1 for none."""

    part: Ints
    sampled: Ints

    @property
    def whole(self) -> Bools:
        """Where every value was kept."""
        return (self.part < 0) & (self.sampled < 0)


def shared(one: KeptValues, other: KeptValues) -> npt.NDArray[np.int8]:
    """What can be compared of the values of tensors of which both sides kept some; NONE where each kept others."""
    same_sample = (one.sampled == other.sampled) | (one.sampled < 0) | (other.sampled < 0)
    found = one.whole | other.whole | ((one.part == other.part) & same_sample)
    sliced, sampled = (np.maximum(*sides) >= 0 for sides in zip(one, other, strict=True))
    source = np.where(sampled, EvidenceSource.SAMPLE, np.where(sliced, EvidenceSource.SLICE, EvidenceSource.VALUES))
    return np.where(found, source, EvidenceSource.NONE).astype(np.int8)


class KeptSelection(NamedTuple):
    """The values kept of one tensor: those of a slice, or a sample. None and −1: all of them."""

    part: str | None
    sampled: int

    def both(self, other: KeptSelection) -> KeptSelection:
        """What two sides have in common that share anything."""
        return KeptSelection(self.part if self.part is not None else other.part, max(self.sampled, other.sampled))

    def narrow(self, values: npt.NDArray[Any], to: KeptSelection) -> npt.NDArray[Any]:
        """Take from the values of this selection those of another that lies in it."""
        if self.part is None and to.part is not None:
            values = Part.parse(to.part).cut(values)
        if self.sampled < 0 <= to.sampled:
            values = values.reshape(-1)[sample_positions(values.size, to.sampled)]
        return values


ALL = KeptSelection(None, -1)
"""Every value."""


def is_partial(source: Ints) -> Bools:
    """Where a pair was judged by some of its values and not all."""
    return np.isin(source, (EvidenceSource.SAMPLE, EvidenceSource.SLICE))


def with_part(source: Ints, part: Ints) -> Ints:
    """One number for a source and the code of the slice it is of, −1 for none; `labelled` reads it."""
    return source + (part + 1) * len(EvidenceSource)


def labelled(codes: Ints, parts: list[str]) -> DictionaryColumn[str]:
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
