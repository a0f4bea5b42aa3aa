"""What is no fault although it is beyond the plain limit, and what stays one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from astray.compare.comparison import compare

ONES = np.ones(64, np.float32)
BF16 = np.full(64, 0x3F80, np.uint16)  # ones too


def bf16(off_by: int) -> np.ndarray:
    """Ones, the first of them so many representable numbers larger."""
    values = BF16.copy()
    values[0] += off_by
    return values


def verdicts(reference: Any, candidate: Any) -> list[str]:
    return [str(verdict) for verdict in compare(reference.run, candidate.run).pairs["verdict"]]


# ---- the precision of what came before -------------------------------------------------------------------------------


def half(builder: Any, bits: int, after: float, weight: float = 1.0, later: float = 1.0) -> None:
    """A bfloat16 result, and then a float32 one that was computed from it."""
    first = builder.call("narrow")
    builder.tensor(first, "output", "out", bf16(bits), "bfloat16")
    second = builder.call("wide")
    builder.tensor(second, "parameter", "weight", ONES * np.float32(weight))
    builder.tensor(second, "output", "out", ONES * np.float32(after))
    third = builder.call("wide", step=1)
    builder.tensor(third, "parameter", "weight", ONES * np.float32(later))


def test_float32_behind_bfloat16_that_differs_is_judged_as_bfloat16(runs):
    one, other = runs.Builder(), runs.Builder()
    half(one, 0, 1.0)
    half(other, 1, 1.002, later=1.002)
    found = compare(one.run, other.run)
    assert [str(verdict) for verdict in found.pairs["verdict"]] == ["rounding", "identical", "rounding", "rounding"]
    assert "judged by the precision of what it was computed from" in found.pairs["reason"][2]


def test_where_the_bfloat16_is_identical_float32_is_float32(runs):
    one, other = runs.Builder(), runs.Builder()
    half(one, 0, 1.0)
    half(other, 0, 1.002)
    assert verdicts(one, other)[2] == "diverged"


def test_a_weight_of_the_first_step_is_judged_by_its_own_precision(runs):
    one, other = runs.Builder(), runs.Builder()
    half(one, 0, 1.0)
    half(other, 1, 1.0, weight=1.001)
    assert verdicts(one, other) == ["rounding", "diverged", "identical", "identical"]


@pytest.mark.parametrize(("others", "verdict"), [(3, "rounding"), (30, "diverged")])
def test_another_dtype_in_a_few_calls_only_is_no_excuse(runs, others, verdict):
    one, other = runs.Builder(), runs.Builder()
    for builder, narrow in ((one, False), (other, True)):
        for number in range(others):
            builder.tensor(builder.call(f"same{number}"), "output", "out", ONES)
        seq = builder.call("cast")
        builder.tensor(seq, "output", "out", *((bf16(0), "bfloat16") if narrow else (ONES,)))
        builder.tensor(builder.call("after"), "output", "out", ONES * np.float32(1 + 0.002 * narrow))
    assert verdicts(one, other)[-1] == verdict


# ---- weights that an optimizer moved ---------------------------------------------------------------------------------

WIDE = np.ones(1 << 16, np.float32)


def one_off(by: float) -> np.ndarray:
    values = WIDE.copy()
    values[7] += np.float32(by)
    return values


def trained(builder: Any, weight: float, output: float = 0.0, first: float = 0.0, between: float = 0.0) -> None:
    for step, (off, made) in enumerate(((first, 0.0), (weight, output))):
        seq = builder.call("fc", step=step)
        builder.tensor(seq, "parameter", "weight", one_off(off))
        builder.tensor(seq, "output", "out", one_off(made))
        if not step:
            builder.tensor(builder.call("between"), "output", "out", one_off(between))


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ({"weight": 2e-4}, ["identical", "identical", "identical", "rounding", "identical"]),
        ({"weight": 2e-4, "output": 2e-4}, ["identical", "identical", "identical", "rounding", "drifting"]),
        ({"weight": 2e-4, "output": 4e-4}, ["identical", "identical", "identical", "rounding", "diverged"]),
        ({"weight": 2e-3}, ["identical", "identical", "identical", "diverged", "identical"]),
        ({"first": 2e-4, "weight": 2e-4}, ["diverged", "identical", "identical", "diverged", "identical"]),
        ({"between": 1e-2, "weight": 2e-4}, ["identical", "identical", "diverged", "diverged", "identical"]),
    ],
    ids=str,
)
def test_a_few_elements_of_a_weight_that_was_updated(runs, off, expected):
    one, other = (runs.Builder(keep="stats,fingerprint,tensors") for _ in range(2))
    trained(one, 0.0)
    trained(other, **off)
    assert verdicts(one, other) == expected


@pytest.mark.parametrize(("start", "verdict"), [(0.0, "rounding"), (1.0, "diverged")])
@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,fingerprint,tensors"])
def test_a_weight_that_began_at_zero_is_made_of_moves_alone(runs, keep, start, verdict):
    one, other = runs.Builder(keep=keep), runs.Builder(keep=keep)
    for builder, off in ((one, 1.0), (other, 1.0001)):
        for step, value in ((0, start), (1, (start + 0.01) * off)):
            builder.tensor(builder.call("fc", step=step), "parameter", "bias", ONES * np.float32(value))
    assert verdicts(one, other) == ["identical", verdict]


@pytest.mark.parametrize(("start", "verdict"), [(0.0, "rounding"), (1.0, "diverged")])
def test_the_moves_of_a_weight_that_began_at_zero_may_have_other_signs(runs, start, verdict):
    one, other = runs.Builder(), runs.Builder()
    signs = np.tile(np.array([1, -1], np.float32), 32)
    for builder, sign in ((one, 1), (other, -1)):
        builder.tensor(builder.call("fc"), "parameter", "bias", ONES * np.float32(start))
        moved = np.float32(start) + np.float32(0.01) * sign * signs
        builder.tensor(builder.call("fc", step=1), "parameter", "bias", moved)
    assert verdicts(one, other) == ["identical", verdict]


# ---- another way to the same result ----------------------------------------------------------------------------------


def inner(builder: Any, shape: tuple[int, ...], result: float = 1.0, inside: float = 1.0) -> None:
    outer = builder.call("q")
    builder.tensor(outer, "input", "0", ONES)
    seq = builder.call("q/linear", "linear", kind="function", parent=outer)
    builder.tensor(seq, "output", "out", np.full(shape, inside, np.float32))
    builder.tensor(outer, "output", "out", ONES * np.float32(result))


@pytest.mark.parametrize(
    ("phase", "shape", "factor", "verdict"),
    [
        ("backward", (8, 8), 1.0, "drifting"),
        ("backward", (8, 8), 1.000001, "drifting"),
        ("backward", (8, 8), 1.01, "shape"),
        ("backward", (8, 4), 1.0, "shape"),
        ("forward", (8, 8), 1.0, "shape"),
    ],
)
def test_a_gradient_may_come_by_another_view(runs, phase, shape, factor, verdict):
    one, other = runs.Builder(), runs.Builder()
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    for builder, made in ((one, values), (other, (np.float32(factor) * values)[: np.prod(shape)].reshape(shape))):
        builder.tensor(builder.call("a/view", "view", kind="function", phase=phase), "output", "0", made)
    assert verdicts(one, other) == [verdict]


def test_what_is_computed_otherwise_inside_is_no_divergence_if_the_result_agrees(runs):
    one, other = runs.Builder(), runs.Builder()
    inner(one, (8, 8))
    inner(other, (4, 8))
    found = compare(one.run, other.run)
    assert found.first is None
    assert (found.same, found.exit_code) == (False, 1)
    assert "1 tensor differs inside calls whose results agree" in str(found)


def test_if_the_result_does_not_agree_the_first_wrong_row_inside_is_blamed(runs):
    one, other = runs.Builder(), runs.Builder()
    inner(one, (8, 8))
    inner(other, (4, 8), result=1.5)
    assert compare(one.run, other.run).first.site == "q/linear"


# ---- where the bits begin to differ ----------------------------------------------------------------------------------


def chain(builder: Any, *factors: float) -> None:
    before = 1.0
    for number, factor in enumerate(factors):
        seq = builder.call(f"site{number}")
        builder.tensor(seq, "input", "0", ONES * np.float32(before))
        builder.tensor(seq, "output", "out", ONES * np.float32(factor))
        before = factor


@pytest.mark.parametrize(
    ("identical", "wrong", "site"), [(6, 1 + 2.0**-16, "site6"), (6, 1.5, "site7"), (2, 1 + 2.0**-16, "site3")]
)
def test_a_slight_divergence_in_a_program_that_was_steady_begins_where_the_bits_do(runs, identical, wrong, site):
    one, other = runs.Builder(), runs.Builder()
    chain(one, *[1.0] * identical, 1.0, 1.0)
    chain(other, *[1.0] * identical, 1 + 2.0**-21, wrong)
    first = compare(one.run, other.run).first
    assert first.site == site
    said = f"step 0, forward, site{identical + 1} (Linear), output is not rounding any more"
    assert (said in " ".join(first.evidence)) == (site == "site6")


# ---- what only one run has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_that_only_one_run_has_is_the_cause(runs, turned):
    sides = []
    for bias in (True, False):
        builder = runs.Builder()
        seq = builder.call("fc")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "parameter", "weight", ONES)
        if bias:
            builder.tensor(seq, "parameter", "bias", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(1 + bias))
        sides.append(builder.run)
    first = compare(*(sides[::-1] if turned else sides)).first
    assert (first.cause, first.site, first.parameter.path) == ("parameter", "fc", "bias")
    side = "candidate" if turned else "reference"
    assert first.evidence[0].startswith(
        f"Its parameter `bias` is there only in the {side}: the other run computed without it."
    )
    assert "bias" in str(compare(*sides))


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_that_tells_no_buffers_at_all_did_not_compute_without_them(runs, turned):
    """Dumps of hooktools have none, those of msprobe no buffers."""
    sides = []
    for told in (True, False):
        builder = runs.Builder()
        seq = builder.call("bn")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "parameter", "weight", ONES)
        if told:
            builder.tensor(seq, "state", "running_mean", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(1 + told))
        sides.append(builder.run)
    first = compare(*(sides[::-1] if turned else sides)).first
    assert (first.cause, first.parameter) == ("computation", None)
    assert first.evidence[0] == "Its input and its parameter agree (identical), but its output does not."


def test_statistics_beside_fingerprints_do_not_tell_where_bits_begin_to_differ(runs):
    """They may have been summed in another order by another tool."""
    one, other = runs.Builder(keep="stats"), runs.Builder(keep="stats,fingerprint")
    chain(one, *[1.0] * 6, 1.0, 1.0)
    chain(other, *[1.0] * 6, 1 + 2.0**-21, 1 + 2.0**-16)
    first = compare(one.run, other.run).first
    assert (first.site, first.onset) == ("site7", None)
    one = runs.Builder()
    chain(one, *[1.0] * 6, 1.0, 1.0)
    checked = one.run
    checked.ranks[0].fingerprints = "another tool's"
    first = compare(checked, other.run).first
    assert (first.site, first.onset) == ("site7", None)


def test_runs_of_two_programs_are_not_the_same_until_then(runs):
    """What only one run has elsewhere says that another program was run, of which nobody expects the same bits."""
    one, other = runs.Builder(), runs.Builder()
    one.tensor(one.call("mask"), "output", "out", ONES)
    chain(one, *[1.0] * 6, 1.0, 1.0)
    chain(other, *[1.0] * 6, 1 + 2.0**-21, 1 + 2.0**-16)
    assert compare(one.run, other.run).first.site == "site7"
