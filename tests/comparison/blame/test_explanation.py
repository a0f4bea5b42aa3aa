"""A surprise in words, and how sure a divergence is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.blame.explanation import SURENESS, explained, sureness, times
from astray.comparison.comparison import compare

ONES = np.ones(64, np.float32)


def said(**numbers) -> str:
    given = {"measure": "norm", "deviation": 0.5, "limit": 1e-3, "given": 1e-4, "rule": "model", "siblings": 0}
    return explained(**(given | numbers))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({}, "its norm or std is off by 0.50; what it came from (1.0e-04) explains at most 1.0e-03"),
        ({"given": 0.0}, "its norm or std is off by 0.50; rounding explains at most 1.0e-03"),
        ({"given": math.nan}, "its norm or std is off by 0.50; rounding explains at most 1.0e-03"),
        (
            {"rule": "siblings", "siblings": 5, "given": 0.0},
            "its norm or std is off by 0.50; rounding and 5 siblings explain at most 1.0e-03",
        ),
        (
            {"rule": "siblings", "siblings": 7, "limit": 0.0},
            "its norm or std is off by 0.50, though all it came from is bit-identical, and 7 siblings of it stayed so",
        ),
        (
            {"rule": "noise run", "measure": "values"},
            "its values are off by 0.50; what it came from (1.0e-04) and the noise run explain at most 1.0e-03",
        ),
        ({"rule": "tolerance", "measure": ""}, "it is off by 0.50; the tolerance is 1.0e-03"),
        (
            {"rule": "start", "limit": 0.0, "of": "its parameter `weight`"},
            "the norm or std of its parameter `weight` is off by 0.50; it came from nothing that was recorded and "
            "should be the same",
        ),
        (
            {"rule": "start"},
            "its norm or std is off by 0.50; it came from nothing that was recorded, and rounding explains at most "
            "1.0e-03",
        ),
        ({"rule": "bits", "limit": 0.0}, "its norm or std is off by 0.50; nothing may differ"),
        ({"rule": "seen before"}, "its norm or std is off by 0.50, as where it was seen first"),
        (
            {"measure": "slices", "furthest": "slice 3 of dimension 0"},
            "its slice 3 of dimension 0 is off by 0.50; what it came from (1.0e-04) explains at most 1.0e-03",
        ),
        (
            {"measure": "slices", "furthest": "slice 3 of dimension 1", "of": "its parameter `weight`"},
            "slice 3 of dimension 1 of its parameter `weight` is off by 0.50; what it came from (1.0e-04) explains at "
            "most 1.0e-03",
        ),
        (
            {"measure": "worst", "by": "sample"},
            "its worst element is off by 0.50 (by sample); what it came from (1.0e-04) explains at most 1.0e-03",
        ),
    ],
)
def test_what_explains_how_much(numbers, text):
    assert said(**numbers) == text


def test_how_sure_a_surprise_is():
    assert [sureness(value) for value in (math.inf, math.nan, 10.0, 9.9, 2.0, 1.01)] == [
        "certain", "certain", "certain", "very likely", "very likely", "likely",
    ]  # fmt: skip
    assert {sureness(value) for value in (math.inf, 3.0, 1.5, 1.0)} < set(SURENESS)
    assert times(1e9) == "more than 1,000"


def divergence(runs, right, wrong, keep="stats,fingerprint", **asked):
    sides = []
    for array in (right, wrong):
        builder = runs.Builder(keep=keep)
        seq = builder.call("layer")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", array)
        sides.append(builder.run)
    return compare(*sides, **asked).first


@pytest.mark.parametrize(
    ("wrong", "sure"),
    [
        (ONES * np.float32(1.5), "certain"),
        (ONES * np.float32(1 + 2.0**-17), "likely"),
        (ONES[:32], "certain"),
        (np.where(np.arange(64) < 3, np.float32(np.nan), ONES), "certain"),
        (ONES.astype(np.int64), "certain"),
    ],
)
def test_how_sure_a_divergence_is(runs, wrong, sure):
    first = divergence(runs, ONES, wrong)
    assert (first.sureness, first.judged) == (sure, first.place)


def test_fingerprints_do_not_tell_rounding_from_faults(runs):
    assert divergence(runs, ONES, ONES * 2, keep="fingerprint").sureness == "not known"


def test_what_is_beyond_a_tolerance_is_so_for_certain(runs):
    wrong = ONES * np.float32(1.0011)
    first = divergence(runs, ONES, wrong, tolerances={"layer": 1e-3})
    assert (first.rule, first.sureness) == ("tolerance", "certain")
    assert first.explained == "it is off by 1.1e-03; the tolerance is 1.0e-03"


def test_bits_that_should_be_the_same_are_beyond_doubt(runs):
    first = divergence(runs, ONES, ONES * np.float32(1 + 2.0**-23), exact=True)
    assert (first.rule, first.sureness) == ("bits", "certain")
    assert first.explained.endswith("; nothing may differ")
