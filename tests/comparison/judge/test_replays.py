"""What two replays of one call say together, and how much of a difference is the call's own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.judge.replays import (
    CallReplay,
    ReplayedPair,
    ReplayedResult,
    Sides,
    find_out,
    own_share,
)
from astray.comparison.judge.thresholds import OWN_SHARE

FINE = ReplayedResult("bfloat16", ulps=0.5, plain=0.5, ratio=1.0, tile_ratio=1.0, surprise=0.25)
OFF = ReplayedResult("bfloat16", ulps=41.0, plain=0.5, ratio=82.0, tile_ratio=40.0, surprise=20.0)
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("reference", "candidate", "alike", "share", "finding"),
    [
        (FINE, OFF, True, 0.0, "candidate"),
        (OFF, FINE, False, 1.0, "reference"),
        (OFF, OFF, True, 0.0, "both"),
        (FINE, FINE, False, 0.0, "arguments"),
        (FINE, FINE, True, OWN_SHARE, "inputs"),
        (FINE, FINE, True, 0.6, "neither"),
        (FINE, FINE._replace(surprise=math.nan), True, 0.0, "candidate"),
    ],
)
def test_what_two_replays_say(reference, candidate, alike, share, finding):
    assert find_out(reference, candidate, alike, lambda: share).finding == finding


def test_how_much_is_its_own_is_asked_only_where_it_decides():
    def share() -> float:
        raise AssertionError

    assert find_out(FINE, OFF, True, share).finding == "candidate"
    assert find_out(FINE, FINE, False, share).finding == "arguments"


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (
            ReplayedPair("candidate", FINE, OFF),
            "the candidate's result is 41 ulps from the exact one, 82 times as far as bfloat16 can do on its inputs; "
            "the reference's is fine (0.50 ulps)",
        ),
        (
            ReplayedPair("candidate", FINE, OFF._replace(ulps=2.5, ratio=2.0, tile_ratio=5.1)),
            "the candidate's result is 2.5 ulps from the exact one and, in one tile, 5.1 times as far as bfloat16 can "
            "do; the reference's is fine (0.50 ulps)",
        ),
        (
            ReplayedPair("reference", OFF, FINE),
            "it is the reference that is wrong here: the reference's result is 41 ulps from the exact one, 82 times as "
            "far as bfloat16 can do on its inputs; the candidate's is fine (0.50 ulps)",
        ),
        (
            ReplayedPair("candidate", FINE._replace(unequal=0), OFF._replace(unequal=3)),
            "the candidate's result differs in 3 elements from what the call gives for its inputs; the reference's is "
            "fine (equal)",
        ),
        (
            ReplayedPair("candidate", FINE, OFF._replace(ulps=math.inf)),
            "the candidate's result is not finite where the exact one of its inputs is, or the other way round; the "
            "reference's is fine (0.50 ulps)",
        ),
        (
            ReplayedPair("inputs", FINE, FINE),
            "both results are what the call gives for its inputs (reference 0.50 ulps, candidate 0.50 ulps): the "
            "difference came in with them",
        ),
        (ReplayedPair("not replayed", reason="random numbers"), "not replayed: random numbers"),
    ],
)
def test_a_pair_in_words(pair, text):
    assert str(pair) == text


def call(draws: bool = False, dtypes: tuple[str, ...] = ("torch.float32",)) -> CallReplay:
    return CallReplay({}, draws, frozenset(dtypes), lambda _: (np.zeros(1), np.zeros(1)))


def test_calls_that_draw_or_cast_otherwise_do_not_compute_alike():
    assert call().computes_like(call())
    assert call().computes_like(call(dtypes=("torch.bfloat16",)))
    assert not call().computes_like(call(draws=True))
    assert not call().computes_like(call(dtypes=("torch.float32", "torch.bfloat16")))


MEASURED = ["values", "worst", "slices", "typical", "norm", "mean", "extremes"]


def sides(own: float, came_in: float) -> Sides:
    """A tensor that is off by so much because of its inputs, and by so much because of its kernel: in one direction."""
    exact = RANDOM.normal(size=(32, 48)) + 0.5
    moved = exact * (1 + came_in)
    return Sides(exact, exact, moved * (1 + own), moved)


@pytest.mark.parametrize("measure", MEASURED)
def test_how_much_of_a_difference_is_the_call_s_own(measure):
    assert own_share(sides(0.0, 1e-3), measure, 0, 3) == pytest.approx(0, abs=1e-6)
    assert own_share(sides(1e-3, 0.0), measure, 0, 3) == pytest.approx(1)
    assert own_share(sides(1e-3, 3e-3), measure, 0, 3) == pytest.approx(0.25, rel=0.02)


def test_rounding_that_averages_out_is_all_of_the_elements_and_nothing_of_the_mean():
    """A kernel that is biased shifts the mean by far more than inputs do, whatever the elements show."""
    exact = RANDOM.normal(size=(64, 64))
    scattered = exact + 1e-3 * RANDOM.normal(size=exact.shape)
    biased = Sides(exact, exact, scattered + 1e-4, scattered)
    assert own_share(biased, "values", math.nan, math.nan) < 0.2
    assert own_share(biased, "mean", math.nan, math.nan) > 0.5


def test_what_cannot_be_told_is_its_own():
    exact = np.ones((2, 2))
    assert own_share(Sides(exact, exact, np.ones(4), exact), "values", 0, 0) == 1
    assert own_share(Sides(exact, exact, exact, exact), "values", 0, 0) == 1
    assert own_share(Sides(exact, exact, exact * math.nan, exact), "values", 0, 0) == 1
