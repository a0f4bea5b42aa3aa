"""The terminal report, against the files in tests/golden.

`ASTRAY_UPDATE_GOLDEN=1 pytest tests/report` writes them anew; look at what changed before keeping it.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from astray import compare
from astray.report.text import render

ONES = np.ones(8, np.float32)


def two(runs, first, second, keep="stats,fingerprint"):
    """Compare two runs of one call each, with these outputs for the same input."""
    sides = []
    for path, array in (("runs/good", first), ("runs/bad", second)):
        builder = runs.Builder(path, keep=keep)
        seq = builder.call("layer")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", array)
        sides.append(builder.run)
    return compare(*sides)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("input", {"data": 1.01}),
        ("initialisation", {"init": 1.001, "at": 0}),
        ("computation", {"proj": 1.001}),
        ("parent", {"between": 1.01}),
        ("loss", {"loss": 2}),
        ("weight_gradient", {"weight_gradient": 1.01}),
        ("update", {"rate": 1.01}),
        ("same", {}),
    ],
)
def test_faults(runs, golden, name, fault):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), **fault))
    golden(f"{name}.txt", str(diff))


def test_by_values(runs, golden):
    keep = "stats,fingerprint,tensors"
    diff = compare(runs.program(runs.Builder(keep=keep)), runs.program(runs.Builder("runs/bad", keep=keep), proj=1.001))
    golden("values.txt", str(diff))


def sliced(runs, seen, unseen):
    """Compare two runs of one call each that kept the first column; the candidate is off there, and elsewhere."""
    right = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    wrong = right.copy()
    wrong[:, :1] += seen
    wrong[:, 1:] += unseen
    sides = []
    for path, array in (("runs/good", right), ("runs/bad", wrong)):
        builder = runs.Builder(path, keep="stats,fingerprint,tensors")
        seq = builder.call("layer")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", array, part="..., :1")
        sides.append(builder.run)
    return compare(*sides)


def test_by_a_slice(runs, golden):
    golden("slice.txt", str(sliced(runs, seen=2, unseen=0)))


def test_what_lies_outside_the_slice(runs, golden):
    golden("outside_slice.txt", str(sliced(runs, seen=0, unseen=2)))


def test_by_a_sample(runs):
    assert "its values are off by 1.0 (by sample); rounding explains" in str(
        two(runs, ONES, ONES * 2, keep="stats,sample")
    )


def test_by_fingerprints(runs, golden):
    keep = "fingerprint"
    diff = compare(runs.program(runs.Builder(keep=keep)), runs.program(runs.Builder("runs/bad", keep=keep), proj=1.001))
    golden("fingerprints.txt", str(diff))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("non_finite", ONES, np.append(ONES[:6], [np.nan, np.inf]).astype(np.float32)),
        ("shape", ONES, ONES.reshape(2, 4)),
        ("dtype", ONES, ONES.astype(np.int64)),
        ("zeros", ONES * 0, ONES),
    ],
)
def test_verdicts(runs, golden, name, first, second):
    golden(f"{name}.txt", str(two(runs, first, second)))


def test_rounding_only(runs, golden):
    golden("rounding.txt", str(two(runs, ONES, ONES * np.float32(1 + 2.0**-22))))


def test_unmatched_and_unknown(runs, golden):
    one, other = runs.Builder(), runs.Builder("runs/bad")
    for builder, sites in ((one, ("a", "b", "c")), (other, ("a", "x", "c"))):
        for step in range(2 if builder is one else 1):
            for site in sites:
                keep = {"stats"} if (site, builder) == ("c", one) else None
                rest = {} if keep is None else {"keep": keep}
                if (site, builder) == ("c", other):
                    rest = {"keep": {"fingerprint"}}
                builder.tensor(builder.call(site, step=step), "output", "out", ONES, **rest)
    golden("unmatched.txt", str(compare(one.run, other.run)))


def test_ranks(runs, golden):
    reference, candidate = runs.Builder(world_size=2), runs.Builder("runs/bad", world_size=2)
    for builder, faults in ((reference, ({}, {})), (candidate, ({"proj": 1.01, "at": 2}, {"loss": 2}))):
        for rank, fault in enumerate(faults):
            runs.program(builder, rank=rank, **fault)
    golden("ranks.txt", str(compare(reference.run, candidate.run)))


def test_seen_elsewhere(runs, golden):
    """The code of `net` made a wrong value, and no tensor of `net` itself shows it."""
    sides = []
    for path, factor in (("runs/good", 1), ("runs/bad", 2)):
        builder = runs.Builder(path)
        outer = builder.call("net", "Net")
        builder.tensor(outer, "input", "0", ONES)
        builder.tensor(builder.call("net.layer", parent=outer), "input", "0", ONES * np.float32(factor))
        builder.tensor(outer, "output", "out", ONES)
        sides.append(builder.run)
    golden("seen.txt", str(compare(*sides)))


def test_another_order(runs, golden):
    values = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    golden("order.txt", str(two(runs, values, values.T)))


def test_integers_in_another_order(runs):
    text = str(two(runs, np.arange(8), np.arange(8)[::-1]))
    assert "the values differ in a way the statistics do not show" in text
    assert "rounding" not in text


def test_integers_do_not_round(runs):
    assert "(by statistics); int64 does not round" in str(two(runs, np.arange(8), np.arange(8) * 2))


@pytest.mark.parametrize("later", [1.0, 2.0])
def test_only_errors_that_are_known_are_said_to_go_on(runs, later):
    sides = []
    for path, factors in (("runs/good", (1, 1)), ("runs/bad", (np.inf, later))):
        builder = runs.Builder(path)
        for step, factor in enumerate(factors):
            seq = builder.call("layer", step=step)
            builder.tensor(seq, "output", "out", ONES * np.float32(factor))
            builder.tensor(builder.call("next", step=step), "output", "out", ONES * np.float32(factor))
        sides.append(builder.run)
    assert ("the same tensor is off by" in str(compare(*sides))) == (later != 1)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("shape", [(8, 64, 64), (2, 3, 4, 5, 6, 7, 8, 9)])
def test_wide_tables_keep_to_the_width(runs, width, shape):
    values = (np.random.default_rng(0).normal(size=shape) / 12345).astype(np.float32)
    broken = values * np.float32(-1.0001)
    broken.reshape(-1)[:2] = np.nan, np.inf
    text = render(two(runs, values, broken), width=width)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_keep_to_the_width(runs, width):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), rate=1.01))
    assert max(map(len, render(diff, width=width).splitlines())) <= width


def test_colour_only_when_asked_and_never_in_the_text(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), proj=1.01))
    plain, coloured = render(diff), render(diff, colour=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({1}, "rank 1 alone is off; ranks 0, 2 agree"),
        ({0, 2}, "2 ranks are off; rank 1 agrees"),
        ({0, 1, 2}, None),
    ],
)
def test_which_ranks_agree(runs, wrong, said):
    one, other = runs.Builder(world_size=3), runs.Builder("runs/bad", world_size=3)
    for rank in range(3):
        runs.program(one, rank=rank)
        runs.program(other, rank=rank, **({"proj": 1.5} if rank in wrong else {}))
    text = str(compare(one.run, other.run))
    assert ("agree" in text.partition("ranks  ")[2].partition("\n")[0]) == (said is not None)
    assert said is None or said in text
