"""Pairing in order: never crossing, gaps where something is missing, and the same answer as trying everything."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from astray.comparison.pair import sequence_alignment as stream
from astray.comparison.pair.sequence_alignment import GAP, NEXT, CallStream, pair_streams


def of(kinds, details=None, names=None, sizes=None) -> CallStream:
    count = len(kinds)
    kinds = np.array([ord(kind) for kind in kinds] if isinstance(kinds, str) else kinds, np.int64)
    zeros = np.zeros(count, np.int64)
    return CallStream(
        kinds,
        zeros if details is None else np.array(details, np.int64),
        zeros if names is None else np.array(names, np.int64),
        np.full(count, np.nan) if sizes is None else np.array(sizes, np.float64),
    )


def pairs(reference: CallStream, candidate: CallStream) -> list[tuple[int, int]]:
    left, right = pair_streams(reference, candidate)
    assert (np.diff(left) > 0).all()
    assert (np.diff(right) > 0).all()
    assert (reference.kind[left] == candidate.kind[right]).all()
    return list(zip(left.tolist(), right.tolist(), strict=True))


def text(reference: str, candidate: str) -> str:
    """The candidate's calls under those of the reference, a dash for none."""
    found = dict(pairs(of(reference), of(candidate)))
    return "".join(candidate[found[place]] if place in found else "-" for place in range(len(reference)))


def test_what_is_left_out_is_a_gap_and_pairing_resumes():
    assert text("abcdefgh", "abcdefgh") == "abcdefgh"
    assert text("abcdefgh", "abcfgh") == "abc--fgh"
    assert text("abfgh", "abcdefgh") == "abfgh"
    assert text("abcdefgh", "xbcdeygh") == "-bcde-gh"
    assert text("abc", "xyz") == "---"
    assert text("", "abc") == text("abc", "").strip("-") == ""


def test_neighbours_tell_which_of_several_it_is():
    """One matmul more in front: those that follow belong to their own neighbours."""
    assert pairs(of("smas"), of("mxsmas")) == [(0, 2), (1, 3), (2, 4), (3, 5)]


def test_details_names_and_sizes_each_decide():
    assert pairs(of("m", [7]), of("mm", [8, 7])) == [(0, 1)]
    assert pairs(of("m", names=[7]), of("mm", names=[8, 7])) == [(0, 1)]
    assert pairs(of("m", sizes=[1.0]), of("mm", sizes=[2.0, 1.003])) == [(0, 1)]


def test_of_pairings_that_are_worth_the_same_the_earliest_is_taken():
    """What happens once belongs to the first of two times, not to the last, whichever stream is the longer one."""
    once, twice = of("abc"), of("abcabc")
    assert pairs(once, twice) == pairs(twice, once) == [(0, 0), (1, 1), (2, 2)]
    assert pairs(of("m"), of("mmm")) == [(0, 0)]


def worth(reference: CallStream, candidate: CallStream, chosen: list[tuple[int, int]]) -> int:
    total = int(sum(stream._worth(reference, candidate, i)[j] for i, j in chosen))
    total += NEXT * sum((i + 1, j + 1) in chosen for i, j in chosen)
    return total - GAP * (len(reference) + len(candidate) - 2 * len(chosen))


def best(reference: CallStream, candidate: CallStream) -> int:
    """By trying every pairing."""
    tried = [worth(reference, candidate, [])]
    for count in range(1, min(len(reference), len(candidate)) + 1):
        for left in combinations(range(len(reference)), count):
            for right in combinations(range(len(candidate)), count):
                chosen = list(zip(left, right, strict=True))
                fit = all(reference.kind[i] == candidate.kind[j] for i, j in chosen)
                tried += [worth(reference, candidate, chosen)] if fit else []
    return max(tried)


@pytest.mark.parametrize("seed", range(40))
def test_no_pairing_is_better(seed):
    random = np.random.default_rng(seed)
    sides = [of(*(random.integers(0, most, length) for most in (3, 2, 2))) for length in random.integers(1, 7, 2)]
    assert worth(*sides, pairs(*sides)) == best(*sides)


def layers(count: int, random: np.random.Generator) -> tuple[CallStream, np.ndarray]:
    """A stream of equal layers, as the ops of a model are, without any names."""
    kinds, details = random.integers(0, 18, 40), random.integers(0, 8, 40)
    return of(np.tile(kinds, count), np.tile(details, count)), np.arange(40 * count)


def thinned(whole: CallStream, share: float, random: np.random.Generator) -> tuple[CallStream, np.ndarray]:
    kept = np.flatnonzero(random.random(len(whole)) >= share)
    return CallStream(*(column[kept] for column in whole)), kept


@pytest.mark.parametrize(("share", "found"), [(0.05, 0.999), (0.2, 0.98), (0.5, 0.9)])
def test_streams_longer_than_a_window_with_calls_left_out(share, found):
    random = np.random.default_rng(0)
    whole, _ = layers(100, random)
    part, places = thinned(whole, share, random)
    left, right = pair_streams(whole, part)
    assert (places[right] == left).sum() / len(part) >= found


@pytest.mark.parametrize("turned", [False, True])
def test_a_long_block_that_only_one_side_has(turned):
    random = np.random.default_rng(0)
    whole, _ = layers(60, random)
    block = of(random.integers(100, 130, 9000))
    joined = CallStream(*(np.concatenate([a[:1000], b, a[1000:]]) for a, b in zip(whole, block, strict=True)))
    places = np.concatenate([np.arange(1000), np.arange(10_000, 9000 + len(whole))])
    left, right = pair_streams(joined, whole) if turned else pair_streams(whole, joined)
    assert np.array_equal(*((left, places[right]) if turned else (places[left], right)))


def test_sides_of_very_different_lengths():
    whole, _ = layers(100, np.random.default_rng(0))
    part = whole.part(2000, 2030)
    left, right = pair_streams(part, whole)
    assert len(left) == 30
    left, right = pair_streams(whole, part)
    assert len(right) == 30
