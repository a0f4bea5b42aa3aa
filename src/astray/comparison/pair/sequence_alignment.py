"""Pairs two streams of calls that are almost the same: some calls were fused, split, left out or repeated.

Feeds `alignment` where keys do not pair, and `mapping_draft`. A stream is a list of calls in order of execution. Two
calls may be paired when they are of the same kind; the more else they share, the better, and pairs that follow one
another are better still. Pairs never cross. What has no partner is a gap, and pairing resumes after it.

The best pairing is found by dynamic programming in a window that slides along both streams, so time grows with their
length and not with its square. Its two sides are in proportion to what is left of the streams: were they of one size,
the shorter stream's would reach further, and its calls be paired too early.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Floats, Ints

KIND, DETAIL, NAME, SIZE, NEXT, GAP = 4, 4, 4, 4, 3, 2
"""What a pair is worth for being of one kind, for equal details, an equal name, the same size of its numbers and for
following another pair; and what it costs to leave a call without a partner."""

SAME_SIZE = 0.01
"""Sizes are logarithms: so far apart are numbers that differ by seven in a thousand."""

WHOLE = 1 << 24
"""Streams with no more possible pairs than this are looked at as a whole, in 150 MB and a fraction of a second."""
WINDOW, LARGEST_WINDOW = 1024, 2048
COMMITTED = 0.5
"""The share of a window whose pairs are kept: what comes near its end might look otherwise with what lies behind."""
SPARSE = 0.25
"""A window with fewer pairs than this share of its shorter side is tried again, larger: much may have been left out."""
AHEAD = 1 << 17
"""How far a place is looked for where the streams are alike again, when a window has nothing in common."""
LONG_RUN = 16
"""So many calls in a row that are equal in everything belong together, whatever lies around them."""


class CallStream(NamedTuple):
    """Calls in order of execution. Equal numbers mean the same on both sides.

    kind: what was called; calls of different kinds are never paired. detail: its shapes. name: where it was
    called, as far as names can be compared. size: the logarithm of how large its numbers are, NaN where unknown.
    """

    kind: Ints
    detail: Ints
    name: Ints
    size: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def part(self, start: int, end: int) -> CallStream:
        at = slice(start, end)
        return CallStream(self.kind[at], self.detail[at], self.name[at], self.size[at])


def pair_streams(reference: CallStream, candidate: CallStream) -> tuple[Ints, Ints]:
    """The places of the paired calls in either stream, both ascending."""
    pairs: list[tuple[Ints, Ints]] = []
    i, j, size = 0, 0, WINDOW
    while i < len(reference) and j < len(candidate):
        run = _equal_run(reference, candidate, i, j)
        if run:
            pairs.append((np.arange(i, i + run), np.arange(j, j + run)))
            i, j = i + run, j + run
            continue
        high, wide, last = _window(len(reference) - i, len(candidate) - j, size)
        paired_reference, paired_candidate = _pair_window(reference.part(i, i + high), candidate.part(j, j + wide))
        sparse = len(paired_reference) < SPARSE * min(high, wide)
        if sparse and not last and size < LARGEST_WINDOW:
            size *= 2
            continue
        found = _resume(reference, candidate, i, j) if sparse and not last else None
        if found:
            i, j, size = *found, WINDOW
            continue
        if not last:
            kept = int(np.sum((paired_reference < COMMITTED * high) & (paired_candidate < COMMITTED * wide)))
            paired_reference, paired_candidate = paired_reference[:kept], paired_candidate[:kept]
        pairs.append((paired_reference + i, paired_candidate + j))
        if last:
            break
        # Without any pair both sides move on: nothing in this window belongs together.
        i += int(paired_reference[-1]) + 1 if len(paired_reference) else high // 2
        j += int(paired_candidate[-1]) + 1 if len(paired_candidate) else wide // 2
        size = WINDOW
    nothing = np.empty(0, np.int64)
    return np.concatenate([nothing, *(a for a, _ in pairs)]), np.concatenate([nothing, *(b for _, b in pairs)])


def _window(rows: int, columns: int, size: int) -> tuple[int, int, bool]:
    """How many calls of either stream to look at next, of so many that are left, and whether those are all."""
    if rows * columns <= WHOLE:
        return rows, columns, True
    skew = (columns / rows) ** 0.5
    return min(int(size / skew) + 1, rows), min(int(size * skew) + 1, columns), False


def _equal_run(reference: CallStream, candidate: CallStream, i: int, j: int) -> int:
    """How many calls from here on are equal in everything but size, if they are many, or all that is left."""
    length, total, step = 0, min(len(reference) - i, len(candidate) - j), 64
    while length < total:
        end = min(length + step, total)
        differ = np.zeros(end - length, np.bool_)
        for column_reference, column_candidate in zip(reference[:3], candidate[:3], strict=True):
            differ |= column_reference[i + length : i + end] != column_candidate[j + length : j + end]
        if differ.any():
            length += int(np.argmax(differ))
            break
        length, step = end, step * 4
    all_of_both = length == len(reference) - i == len(candidate) - j
    return length if all_of_both or length >= LONG_RUN else 0


def _resume(reference: CallStream, candidate: CallStream, i: int, j: int) -> tuple[int, int] | None:
    """Where the streams have a long run in common again, the soonest such place; None when there is none ahead."""
    runs_reference, runs_candidate = _runs(reference.part(i, i + AHEAD)), _runs(candidate.part(j, j + AHEAD))
    known, first = np.unique(runs_candidate, return_index=True)
    if not len(runs_reference) or not len(known):
        return None
    place = np.minimum(np.searchsorted(known, runs_reference), len(known) - 1)
    distance = np.where(known[place] == runs_reference, np.arange(len(runs_reference)) + first[place], 2 * AHEAD)
    nearest = int(np.argmin(distance))
    return (i + nearest, j + int(first[place[nearest]])) if distance[nearest] < 2 * AHEAD else None


def _runs(stream: CallStream) -> npt.NDArray[np.uint64]:
    """One number for each run of `LONG_RUN` calls, by everything but their size."""
    factors = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
    calls = sum(factor * column.astype(np.uint64) for factor, column in zip(factors, stream[:3], strict=True))
    calls = np.asarray(calls, np.uint64)
    calls ^= calls >> np.uint64(29)
    count = max(len(stream) - LONG_RUN + 1, 0)
    runs = np.zeros(count, np.uint64)
    for place in range(LONG_RUN):
        runs = runs * np.uint64(0xBF58476D1CE4E5B9) + calls[place : place + count]
    return runs


def _pair_window(reference: CallStream, candidate: CallStream) -> tuple[Ints, Ints]:
    """The best pairing of two short streams.

    `matched[i, j]` is the worth of the best pairing of the first i and j calls that ends with the pair of the last two,
    `best[i, j]` that of any.
    """
    rows, columns = len(reference), len(candidate)
    never = np.iinfo(np.int32).min // 2
    gaps = GAP * np.arange(columns + 1, dtype=np.int32)
    matched = np.full((rows + 1, columns + 1), never, np.int32)
    best = np.empty((rows + 1, columns + 1), np.int32)
    best[0] = -gaps
    for i in range(1, rows + 1):
        worth = _worth(reference, candidate, i - 1)
        before = np.maximum(matched[i - 1, :-1] + NEXT, best[i - 1, :-1])
        matched[i, 1:] = np.where(worth > 0, worth + before, never)
        row = np.maximum(best[i - 1] - GAP, matched[i]) + gaps
        best[i] = np.maximum.accumulate(row, out=row) - gaps
    return _trace(matched, best)


def _worth(reference: CallStream, candidate: CallStream, i: int) -> npt.NDArray[np.int32]:
    """What a call of the reference is worth as the partner of each of the candidate's; 0 for those of another kind."""
    found = np.full(len(candidate), KIND, np.int32)
    found += DETAIL * (candidate.detail == reference.detail[i])
    found += NAME * (candidate.name == reference.name[i])
    found += SIZE * (np.abs(candidate.size - reference.size[i]) < SAME_SIZE)
    return np.where(candidate.kind == reference.kind[i], found, 0)


def _trace(matched: npt.NDArray[np.int32], best: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """The pairs behind the last cell of `best`. Of pairings that are worth the same, the one with the earliest calls.

    So a stream in which everything happens once is paired with the first part of one in which it happens twice.
    """
    reference, candidate = [], []
    i, j = matched.shape[0] - 1, matched.shape[1] - 1
    following = False  # whether the pair after this one counts on this being a pair
    while i and j:
        if not following and best[i, j] == best[i, j - 1] - GAP:
            j -= 1
        elif not following and best[i, j] == best[i - 1, j] - GAP:
            i -= 1
        else:
            reference.append(i - 1)
            candidate.append(j - 1)
            i, j = i - 1, j - 1
            following = bool(matched[i, j] + NEXT >= best[i, j])
    return np.array(reference[::-1], np.int64), np.array(candidate[::-1], np.int64)
