"""Every verdict, from every source it can come from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.comparison.comparison import compare
from astray.stats.kernels import sample_positions

EPS32 = 2.0**-23
ONES = np.ones(64, np.float32)


def judged(runs, reference, candidate, *, keep="stats,fingerprint", dtypes=(None, None), role="output", rows=()):
    """The row of one pair of tensors, after identical ones that make it a comparison."""
    sides = []
    for array, dtype in zip((reference, candidate), dtypes, strict=True):
        builder = runs.Builder(keep=keep)
        builder.tensor(builder.call("before"), "output", "out", ONES, keep={"fingerprint"})
        seq = builder.call("site")
        for name, path, value in rows:
            builder.tensor(seq, name, path, value)
        builder.tensor(seq, role, "out", array, dtype)
        sides.append(builder.run)
    pairs = compare(*sides).pairs
    return pairs.row(len(pairs) - 1)


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(
    ("keep", "source"),
    [
        ("stats,fingerprint", "fingerprint"),
        ("fingerprint", "fingerprint"),
        ("stats", "statistics"),
        ("tensors", "values"),
        ("stats,sample", "sample"),
    ],
)
def test_identical(runs, keep, source):
    row = judged(runs, ONES, ONES, keep=keep)
    assert (row["verdict"], row["source"], row["error"]) == ("identical", source, 0)


KEEPS = ["stats,fingerprint", "stats", "tensors", "stats,fingerprint,tensors", "sample,stats"]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("off", "verdict"), [(20, "rounding"), (40, "diverged")])
def test_of_the_same_inputs_a_call_may_be_off_by_its_own_rounding(runs, keep, off, verdict):
    """That is 64 u, and for sums of 64 elements 68 u, of which an epsilon has two."""
    row = judged(runs, ONES, ONES * np.float32(1 + off * EPS32), keep=keep, rows=[("input", "0", ONES)])
    assert (row["verdict"], row["origin"], row["rule"]) == (verdict, verdict == "diverged", "model")
    assert row["error"] == pytest.approx(off * EPS32, rel=1e-6)
    assert 30 * EPS32 < row["limit"] < 130 * EPS32
    assert row["given"] == 0


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(("made", "verdict"), [(4, "rounding"), (80, "drifting"), (400, "diverged")])
def test_of_other_inputs_a_call_may_be_off_by_what_they_explain(runs, keep, made, verdict):
    """What comes from outside may be off by rounding. Without siblings to ask, it explains sixteen times as much."""
    sides = []
    for factor in (0, 1):
        builder = runs.Builder(keep=keep)
        seq = builder.call("site")
        builder.tensor(seq, "input", "0", ONES * np.float32(1 + factor * 4 * EPS32))
        builder.tensor(seq, "output", "out", ONES * np.float32(1 + factor * made * EPS32))
        sides.append(builder.run)
    given, row = compare(*sides).pairs.row(0), compare(*sides).pairs.row(1)
    assert (given["verdict"], given["rule"]) == ("rounding", "start")
    assert (row["verdict"], row["origin"]) == (verdict, verdict == "diverged")
    assert row["given"] == pytest.approx(4 * EPS32, rel=1e-3)


def test_fingerprints_alone_say_only_that_bits_differ(runs):
    row = judged(runs, ONES, ONES * 2, keep="fingerprint")
    assert (row["verdict"], row["source"]) == ("diverged", "fingerprint")
    assert math.isnan(row["error"])
    assert "record with keep='stats'" in row["reason"]


@pytest.mark.parametrize("keep", ["stats,fingerprint", "tensors", "stats"])
def test_non_finite(runs, keep):
    bad = ONES.copy()
    bad[3] = np.nan
    row = judged(runs, ONES, bad, keep=keep)
    assert row["verdict"] == "non-finite"
    assert "NaN or Inf where the other side has a number" in row["reason"]


def test_non_finite_at_another_place_is_seen_in_values(runs):
    one, other = ONES.copy(), ONES.copy()
    one[3] = other[4] = np.nan
    assert judged(runs, one, other, keep="tensors")["verdict"] == "non-finite"
    assert judged(runs, one, other, keep="stats,fingerprint")["verdict"] == "rounding"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "tensors"])
def test_non_finite_on_both_sides_is_judged_by_the_rest(runs, keep):
    one = ONES.copy()
    one[3] = np.inf
    for factor, verdict in ((1 + EPS32, "rounding"), (1.5, "diverged")):
        row = judged(runs, one, one * np.float32(factor), keep=keep)
        assert row["verdict"] == verdict
        assert "NaN or Inf on both sides" in row["reason"]


@pytest.mark.parametrize("keep", ["stats", "tensors", "stats,fingerprint"])
@pytest.mark.parametrize("array", [np.full(4, np.nan, np.float32), np.empty((0, 3), np.float32)], ids=["NaN", "empty"])
def test_nothing_finite_is_not_a_difference(runs, keep, array):
    row = judged(runs, array, array, keep=keep)
    assert (row["verdict"], row["error"]) == ("identical", 0)


@pytest.mark.parametrize("shape", [(8, 8), (32,)])
def test_shape(runs, shape):
    row = judged(runs, ONES, np.ones(shape, np.float32))
    assert row["verdict"] == "shape"
    assert (row["shape_reference"], row["shape_candidate"]) == ((64,), shape)
    assert ("the values are the same" in row["reason"]) == (shape == (8, 8))


@pytest.mark.parametrize("other", [np.ones(64, np.int64), np.ones(64, np.bool_), np.ones(64, np.complex64)])
def test_dtype_of_another_kind(runs, other):
    assert judged(runs, ONES, other)["verdict"] == "dtype"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "tensors"])
def test_mixed_precision_is_judged_by_the_coarser_dtype(runs, keep):
    values = np.linspace(1, 2, 64, dtype=np.float32)
    for factor, verdict in ((1.0, "rounding"), (1.2, "diverged")):
        row = judged(runs, values, bfloat16(values * np.float32(factor)), keep=keep, dtypes=("float32", "bfloat16"))
        assert row["verdict"] == verdict
        assert "judged by the coarser one" in row["reason"]
        assert (row["dtype_reference"], row["dtype_candidate"]) == ("float32", "bfloat16")


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats", "tensors", "fingerprint"])
def test_integers_do_not_round(runs, keep):
    one = np.arange(64)
    other = one.copy()
    other[60] += 1
    assert judged(runs, one, other, keep=keep)["verdict"] == "diverged"
    assert judged(runs, one, one, keep=keep)["verdict"] == "identical"


def test_integers_in_another_order_diverge_though_no_statistic_does(runs):
    row = judged(runs, np.arange(64), np.arange(64)[::-1])
    assert row["verdict"] == "diverged"
    assert math.isnan(row["error"])
    assert "no statistic does" in row["reason"]


def test_integers_of_another_width_may_agree(runs):
    row = judged(runs, np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int64))
    assert (row["verdict"], row["error"]) == ("rounding", 0)


def test_bools_do_not_round(runs):
    other = np.zeros(64, np.bool_)
    other[5] = True
    assert judged(runs, np.zeros(64, np.bool_), other)["verdict"] == "diverged"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,sample"])
@pytest.mark.parametrize("seed", range(20))  # the order of summing changes the last bits of some statistics
def test_floats_in_another_order_diverge(runs, keep, seed):
    values = np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)
    row = judged(runs, values, values.T, keep=keep)
    assert row["verdict"] == "diverged"
    assert "the same values in another order" in row["reason"]
    assert math.isnan(row["error"]) == (keep == "stats,fingerprint")  # the sampled values differ by a known amount


def test_another_order_outside_the_sample_diverges(runs):
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    swapped = values.copy()
    swapped[[1, 2]] = values[[2, 1]]  # not among the sampled positions
    row = judged(runs, values, swapped, keep="stats,fingerprint,sample")
    assert row["verdict"] == "diverged"
    assert math.isnan(row["error"])
    assert "the same values in another order" in row["reason"]


@pytest.mark.parametrize("special", [0.0, np.nan], ids=["zero", "NaN"])
def test_other_bits_that_may_be_minus_zero_or_another_nan_are_pointed_out(runs, special):
    values = np.arange(1, 65, dtype=np.float32)
    values[5] = special
    row = judged(runs, values, values[::-1])
    assert (row["verdict"], row["error"]) == ("rounding", 0)
    assert "a tiny change, or the same values in another order" in row["reason"]
    assert judged(runs, values, values[::-1], keep="tensors")["verdict"] in ("diverged", "non-finite")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("element", [0, 1000, 65535])
def test_one_rounded_element_is_not_another_order(runs, dtype, element):
    values = np.random.default_rng(1).normal(size=1 << 16).astype(dtype)
    other = values.copy()
    other[element] = np.nextafter(other[element], dtype(np.inf))
    assert judged(runs, values, other)["verdict"] == "rounding"


def test_minus_zero_is_rounding(runs):
    zero = np.zeros(4, np.float32)
    row = judged(runs, zero, -zero, keep="stats,fingerprint,tensors")
    assert (row["verdict"], row["error"]) == ("rounding", 0)


def test_float64_is_not_judged_closer_than_its_statistics_are(runs):
    values = np.linspace(1, 2, 64)

    def verdict(off: float, keep: str) -> str:
        other = values.copy()
        other[1:-1] *= 1 + off  # extremes are elements, and exact
        return judged(runs, values, other, keep=keep, rows=[("input", "0", values)])["verdict"]

    assert verdict(1e-13, "stats") == "rounding"
    assert verdict(1e-13, "tensors") == "diverged"
    assert verdict(1e-11, "stats") == "diverged"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
def test_zeros_against_little_depends_on_what_they_came_from(runs, keep):
    zero, little = np.zeros(64, np.float32), np.full(64, 1e-9, np.float32)
    alone = judged(runs, zero, little, keep=keep)
    assert (alone["verdict"], alone["error"]) == ("diverged", math.inf)
    assert "the reference is all zeros" in alone["reason"]
    beside_ones = judged(runs, zero, little, keep=keep, rows=[("input", "0", ONES)])
    assert beside_ones["verdict"] == "rounding"
    assert "below the rounding of the numbers they came from" in beside_ones["reason"]
    beside_little = judged(runs, zero, little, keep=keep, rows=[("input", "0", little)])
    assert beside_little["verdict"] == "diverged"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
@pytest.mark.parametrize(("moved", "expected"), [(1e-8, "rounding"), (1e-4, "diverged")])
def test_weights_that_only_one_run_moves_by_a_rounding(runs, keep, moved, expected):
    """As that of a bias before a batch norm, whose gradient is nothing but rounding."""
    sides = []
    for update in (0.0, moved):
        builder = runs.Builder(keep=keep)
        step = builder.call("conv.bias", "SGD", kind="optimizer", phase="update")
        builder.tensor(step, "input", "grad", np.full(8, 1e-9, np.float32))
        builder.tensor(step, "parameter", "weight", np.full(8, 0.1, np.float32))
        builder.tensor(step, "output", "update", np.array([update] + 7 * [0.0], np.float32))
        sides.append(builder.run)
    pairs = compare(*sides).pairs
    assert pairs["verdict"][2] == expected
    assert ("below the rounding" in (pairs["reason"][2] or "")) == (expected == "rounding")


def test_a_huge_mask_does_not_make_everything_negligible(runs):
    mask = np.full(64, -1e38, np.float32)
    rows = [("input", "0", ONES), ("input", "kwargs.mask", mask)]
    assert judged(runs, ONES, ONES * 2, rows=rows)["verdict"] == "diverged"


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
@pytest.mark.parametrize(("size", "verdict"), [(1e-9, "rounding"), (1e-3, "diverged")])
def test_a_gradient_that_is_nothing_but_the_rounding_of_its_terms(runs, keep, size, verdict):
    """The gradient of a bias before a softmax is zero in exact arithmetic: both runs hold only noise."""
    sides = []
    for noise in (size, -3 * size):
        builder = runs.Builder(keep=keep)
        forward = builder.call("key")
        builder.tensor(forward, "input", "0", ONES)
        backward = builder.call("key", phase="backward", parent=forward)
        builder.tensor(backward, "input", "out", ONES)
        bias = builder.call("key.bias", "Parameter", kind="parameter", phase="backward")
        builder.tensor(bias, "gradient", "grad", np.full(8, noise, np.float32))
        sides.append(builder.run)
    row = compare(*sides).pairs.row(2)
    assert row["verdict"] == verdict
    assert ("below the rounding of the numbers they came from" in (row["reason"] or "")) == (verdict == "rounding")


def test_a_sample_is_judged_together_with_the_statistics(runs):
    off = ONES.copy()
    off[1] = 3  # not among the sampled positions
    row = judged(runs, ONES, off, keep="stats,sample")
    assert (row["verdict"], row["source"]) == ("diverged", "sample")
    assert "every sampled value is the same" in row["reason"]
    alone = judged(runs, ONES, off, keep="sample")
    assert (alone["verdict"], alone["error"]) == ("rounding", 0)


def test_values_on_one_side_only_fall_back_on_statistics(runs):
    one, other = runs.Builder(keep="stats,tensors"), runs.Builder(keep="stats")
    for builder, factor in ((one, 1), (other, 2)):
        builder.tensor(builder.call("site"), "output", "out", ONES * np.float32(factor))
    row = compare(one.run, other.run).pairs.row(0)
    assert (row["verdict"], row["source"], row["error"]) == ("diverged", "statistics", 1)


def test_values_that_cannot_be_read_fall_back_and_say_so(runs):
    one, other = runs.Builder(keep="stats,tensors"), runs.Builder(keep="stats,tensors")
    for builder, factor in ((one, 1), (other, 2)):
        builder.tensor(builder.call("site"), "output", "out", ONES * np.float32(factor))
    other.rank().unreadable.add(0)
    row = compare(one.run, other.run).pairs.row(0)
    assert (row["verdict"], row["source"]) == ("diverged", "statistics")
    assert "the kept values could not be read" in row["reason"]


def test_what_was_not_kept_on_both_sides_is_unknown(runs):
    one, other = runs.Builder(keep="stats"), runs.Builder(keep="fingerprint")
    for builder in (one, other):
        builder.tensor(builder.call("site"), "output", "out", ONES)
        builder.tensor(builder.call("other"), "output", "out", ONES, keep={"stats"})
    diff = compare(one.run, other.run)
    assert (diff.pairs.row(0)["verdict"], diff.pairs.row(0)["source"]) == ("unknown", "none")
    assert diff.same


def test_metrics_are_there_when_values_were(runs):
    row = judged(runs, ONES, ONES * 2, keep="tensors")
    assert (row["cosine"], row["max_abs"], row["rel_l2"], row["different"]) == (1, 1, 1, 64)
    assert math.isnan(row["bound_l2"])
    by_statistics = judged(runs, ONES, ONES * 2)
    assert by_statistics["bound_l2"] == 1
    assert math.isnan(by_statistics["cosine"])


@pytest.mark.parametrize("seen", [False, True])
def test_a_sample_is_compared_with_the_same_elements_of_a_whole_tensor(runs, seen):
    right = np.arange(1, 41, dtype=np.float32)
    wrong = right.copy()
    sampled = sample_positions(40, 4)
    wrong[sampled if seen else np.setdiff1d(np.arange(40), sampled)] += 100
    made = []
    for keep, array in (("sample,stats", right), ("tensors,stats", wrong)):
        builder = runs.Builder(keep=keep)
        builder.tensor(builder.call("layer"), "output", "out", array)
        made.append(builder.run)
    diff = compare(*made)
    assert diff.pairs["source"][0] == "sample"
    assert diff.pairs["max_abs"][0] == (100 if seen else 0)
    assert diff.pairs["verdict"][0] == "diverged"  # by the statistics of the whole, where the sample does not see it
