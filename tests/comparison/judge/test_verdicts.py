"""What decides about a row: what came from nowhere, integers, another order, siblings that stayed the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray import compare
from block_models import train

VALUES = np.random.default_rng(0).normal(size=256).astype(np.float32)
ONES = np.ones(64, np.float32)
BOTH = ["stats,fingerprint", "stats,fingerprint,tensors"]


def bfloat16(values: np.ndarray, nearest: bool = True) -> np.ndarray:
    """The bits, rounded to the nearest or cut off."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + (0x8000 if nearest else 0)) >> 16).astype(np.uint16)


def pairs(runs: Any, keep: str, *sides: list[tuple[Any, ...]]) -> Any:
    """A call with these tensors in either run: role, path, array and dtype."""
    made = []
    for tensors in sides:
        builder = runs.Builder(keep=keep)
        seq = builder.call("site")
        for tensor in tensors:
            builder.tensor(seq, *tensor)
        made.append(builder.run)
    return compare(*made).pairs


# ---- what came from nowhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", BOTH)
@pytest.mark.parametrize(
    ("role", "off", "verdict"),
    [
        ("parameter", 2.0**-23, "diverged"),  # a weight of the first step is the same or not
        ("input", 2.0**-23, "rounding"),  # what a program is given may have been made by another kernel
        ("input", 1e-3, "diverged"),
        ("state", 2.0**-23, "rounding"),
        ("state", 1e-3, "diverged"),
    ],
)
def test_the_start(runs: Any, keep: str, role: str, off: float, verdict: str) -> None:
    other = VALUES * np.float32(1 + off)
    row = pairs(runs, keep, [(role, "x", VALUES)], [(role, "x", other)]).row(0)
    assert (row["verdict"], row["rule"], row["given"]) == (verdict, "start", 0)
    assert row["origin"] == (verdict == "diverged")
    assert (row["limit"] == 0) == (role == "parameter")


@pytest.mark.parametrize("keep", BOTH)
def test_one_other_element_of_a_weight_is_enough(runs: Any, keep: str) -> None:
    other = VALUES.copy()
    other[7] = np.nextafter(other[7], np.float32(9))
    row = pairs(runs, keep, [("parameter", "weight", VALUES)], [("parameter", "weight", other)]).row(0)
    assert (row["verdict"], row["surprise"]) == ("diverged", np.inf)


@pytest.mark.parametrize("keep", BOTH)
@pytest.mark.parametrize("values", [VALUES, ONES * np.float32(0.3)], ids=["normal", "constant"])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "rounding"), (1.01, "diverged")])
def test_a_weight_may_be_a_cast_and_nothing_else(
    runs: Any, keep: str, values: np.ndarray, factor: float, verdict: str
) -> None:
    """Other roundings average out in its sums, so that one percent is seen in 256 bfloat16 numbers."""
    sides = (values,), (bfloat16(values * np.float32(factor)), "bfloat16")
    row = pairs(runs, keep, *([("parameter", "weight", *side)] for side in sides)).row(0)
    assert (row["verdict"], row["rule"]) == (verdict, "start")


def test_a_weight_of_a_later_step_has_a_history(tmp_path: Path) -> None:
    """Where the first step that was recorded is not the first, it is unknown what moved the weights."""
    options = {"steps": 3, "recorded": "2:", "stepping": torch.optim.Adam}
    found = astray.compare(train(tmp_path / "a", **options), train(tmp_path / "b", noise=1e-7, **options))
    rows = zip(*(found.pairs[name] for name in ("role", "rule", "verdict")), strict=True)
    rules = {rule for role, rule, verdict in rows if role == "parameter" and verdict != "identical"}
    assert rules
    assert "start" not in rules
    assert found.first is None


# ---- integers, and another order -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "verdict"), [(0.0, "diverged"), (1e-7, "rounding")])
def test_a_choice_among_numbers_that_are_off_may_fall_another_way(runs: Any, given: float, verdict: str) -> None:
    """An argmax or a top-k is as right as the numbers it has chosen from; of the same numbers it is the same."""
    sides = []
    for off, chosen in ((0.0, [3, 1]), (given, [1, 3])):
        builder = runs.Builder()
        seq = builder.call("router", "Router")
        builder.tensor(seq, "input", "0", VALUES * np.float32(1 + off))
        builder.tensor(seq, "output", "out", np.array(chosen))
        sides.append(builder.run)
    row = compare(*sides).pairs.row(1)
    assert row["verdict"] == verdict
    assert ("may fall another way" in (row["reason"] or "")) == (verdict != "diverged")


@pytest.mark.parametrize(("given", "wrong"), [(VALUES, True), (VALUES[::-1], False)])
def test_another_order_is_wrong_where_nothing_it_came_from_differs(runs: Any, given: np.ndarray, wrong: bool) -> None:
    sides = (
        [("input", "0", VALUES), ("output", "out", VALUES * 2)],
        [
            ("input", "0", given),
            ("output", "out", VALUES[::-1] * 2),
        ],
    )
    row = pairs(runs, "stats,fingerprint", *sides).row(1)
    assert row["origin"] == wrong
    assert "the same values in another order" in row["reason"]
    assert np.isnan(row["error"])


# ---- siblings that stayed the same -----------------------------------------------------------------------------------


def layers(runs: Any, *factors: float) -> Any:
    """Equal layers that are given the same, and give twice that, times their factors."""
    builder = runs.Builder()
    for number, factor in enumerate(factors):
        seq = builder.call(f"h.{number}")
        builder.tensor(seq, "input", "0", VALUES + np.float32(number))
        builder.tensor(seq, "output", "out", (VALUES + np.float32(number)) * np.float32(2 * factor))
    return builder.run


@pytest.mark.parametrize(
    ("same", "others", "off", "wrong"),
    [
        (6, 1, 2.0**-21, True),  # in one program on one machine nothing rounds differently
        (6, 1, 2.0**-25, False),  # identical after all
        (3, 1, 2.0**-23, False),  # too few to know
        (3, 1, 2.0**-21, True),  # but not if it is off by more than eight roundings
        (3, 2, 2.0**-21, False),
        (6, 2, 2.0**-21, False),  # it happens now and then
    ],
)
def test_other_bits_out_of_the_same_bits(runs: Any, same: int, others: int, off: float, wrong: bool) -> None:
    reference, candidate = layers(runs, *[1.0] * (same + others)), layers(runs, *[1.0] * same, *[1 + off] * others)
    found = compare(reference, candidate)
    assert (found.first is not None) == wrong
    if wrong:
        first = found.first
        assert (first.site, first.rule, first.siblings, first.limit) == (f"h.{same}", "siblings", same, 0)
        assert f"{same} siblings of it stayed so" in first.explained


# ---- other shapes and dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "shape", "factor", "verdict"),
    [
        ("backward", (8, 8), 1.0, "rounding"),
        ("backward", (8, 8), 1.000001, "rounding"),
        ("backward", (8, 8), 1.01, "shape"),
        ("backward", (8, 4), 1.0, "shape"),
        ("forward", (8, 8), 1.0, "shape"),
    ],
)
def test_a_gradient_may_come_by_another_view(
    runs: Any, phase: str, shape: tuple[int, ...], factor: float, verdict: str
) -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    sides = []
    for made in (values, (np.float32(factor) * values)[: np.prod(shape)].reshape(shape)):
        builder = runs.Builder()
        builder.tensor(builder.call("a/view", "view", kind="function", phase=phase), "output", "0", made)
        sides.append(builder.run)
    found = compare(*sides).pairs
    assert found["verdict"].tolist() == [verdict]
    assert ("it came by another view" in found["reason"][0]) == (verdict == "rounding")


@pytest.mark.parametrize(
    ("narrow", "wide", "verdicts"),
    [
        (0, 1.0, ["identical", "identical"]),
        (1, 1.004, ["rounding", "rounding"]),  # float32 that was made of bfloat16 has its noise
        (1, 1.5, ["rounding", "diverged"]),
        (0, 1.1, ["identical", "diverged"]),
    ],
)
def test_float32_is_as_coarse_as_what_it_came_from(runs: Any, narrow: int, wide: float, verdicts: list[str]) -> None:
    sides = []
    for steps, factor in ((0, 1.0), (narrow, wide)):
        builder = runs.Builder()
        first, second = builder.call("narrow"), builder.call("wide")
        bits = bfloat16(VALUES)
        bits[0] += steps
        builder.tensor(first, "output", "out", bits, "bfloat16")
        builder.tensor(second, "input", "0", bits, "bfloat16")
        builder.tensor(second, "output", "out", VALUES * np.float32(factor))
        sides.append(builder.run)
    found = compare(*sides).pairs["verdict"].tolist()
    assert [found[0], found[2]] == verdicts


@pytest.mark.parametrize("keep", BOTH)
def test_a_single_wrong_element_is_found(runs: Any, keep: str) -> None:
    """By extremes if it is one; by values wherever it is."""
    values = np.random.default_rng(3).normal(size=1 << 16).astype(np.float32)
    for element, seen in ((int(np.argmax(values)), True), (5, keep == BOTH[1])):
        other = values.copy()
        other[element] *= np.float32(1.02)
        sides = [("input", "0", values), ("output", "out", values)], [("input", "0", values), ("output", "out", other)]
        assert (pairs(runs, keep, *sides)["verdict"][1] == "diverged") == seen


# ---- another way to the same result ----------------------------------------------------------------------------------


def inner(builder: Any, shape: tuple[int, ...], result: float = 1.0) -> None:
    outer = builder.call("q")
    builder.tensor(outer, "input", "0", ONES)
    seq = builder.call("q/linear", "linear", kind="function", parent=outer)
    builder.tensor(seq, "output", "out", np.ones(shape, np.float32))
    builder.tensor(outer, "output", "out", ONES * np.float32(result))


def test_what_is_computed_otherwise_inside_is_not_a_divergence_if_the_result_agrees(runs: Any) -> None:
    one, other = runs.Builder(), runs.Builder()
    inner(one, (8, 8))
    inner(other, (4, 8))
    found = compare(one.run, other.run)
    assert found.first is None
    assert (found.same, found.exit_code) == (False, 1)
    assert "1 tensor differs inside calls whose results agree" in str(found)


def test_if_the_result_does_not_agree_the_first_wrong_row_inside_is_blamed(runs: Any) -> None:
    one, other = runs.Builder(), runs.Builder()
    inner(one, (8, 8))
    inner(other, (4, 8), result=1.5)
    assert compare(one.run, other.run).first.site == "q/linear"


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type", "wrong"), [("CrossEntropyLoss", True), ("GPT2LMHeadModel", False)])
def test_labels_are_chosen_by_nobody(runs: Any, type: str, wrong: bool) -> None:
    """What a model is given next may have been chosen from what it gave; what a loss is given was not."""
    sides = []
    for off, shift in ((0.0, 0), (1e-6, 1)):
        builder = runs.Builder()
        seq = builder.call("model", type="GPT2LMHeadModel")
        builder.tensor(seq, "input", "0", VALUES)
        builder.tensor(seq, "output", "out", VALUES * np.float32(1 + off))
        seq = builder.call("next", type=type)
        builder.tensor(seq, "input", "0", np.roll(np.arange(64), shift))
        sides.append(builder.run)
    found = compare(*sides)
    assert found.pairs["verdict"].tolist()[1] in ("rounding", "drifting")
    assert (found.first is not None and found.first.site == "next") == wrong


# ---- weights that one run has left as they were ----------------------------------------------------------------------


def stepped(runs: Any, stays: tuple[int, ...], *, moving: int, layers: int = 7) -> Any:
    """Two steps of layers whose weights move in so many elements; those of some layers stay as they were."""
    builder = runs.Builder(keep="stats,fingerprint,tensors")
    for step in range(2):
        for number in range(layers):
            weight = np.random.default_rng(number).normal(size=(16, 16))
            if step and number not in stays:
                weight.reshape(-1)[:moving] += 1e-3
            seq = builder.call(f"h.{number}", step=step)
            builder.tensor(seq, "input", "0", np.ones(16, np.float32))
            builder.tensor(seq, "parameter", "weight", weight.astype(np.float32))
    return builder.run


@pytest.mark.parametrize(
    ("stays", "moving", "layers", "wrong"),
    [
        ((3,), 256, 7, True),
        ((3,), 8, 7, False),  # a few elements move by chance
        ((3,), 256, 4, False),  # with too few siblings
        ((1, 3), 256, 7, False),  # of which more stay
    ],
)
def test_a_weight_that_only_one_run_moves(
    runs: Any, stays: tuple[int, ...], moving: int, layers: int, wrong: bool
) -> None:
    sides = stepped(runs, (), moving=moving, layers=layers), stepped(runs, stays, moving=moving, layers=layers)
    for reference, candidate, side in ((*sides, "reference"), (*sides[::-1], "candidate")):
        table = compare(reference, candidate).pairs
        unmoved = [row for row, rule in enumerate(table["rule"]) if rule == "unmoved"]
        assert len(unmoved) == wrong
        for row in unmoved:
            assert (table["site"][row], table["step"][row], table["verdict"][row]) == ("h.3", 1, "diverged")
            assert table["reason"][row] == f"only the {side} has changed it since the step before"


def test_a_table_in_a_coarse_dtype_is_rounded_once_in_each_run(runs: Any) -> None:
    """As inputs, which calls may have made in it, it was allowed eight roundings."""
    values = np.random.default_rng(0).uniform(1, 2, 64)
    for off, verdict in ((0.004, "rounding"), (0.012, "diverged")):
        sides = [[("state", "inv_freq", bfloat16(values * factor), "bfloat16")] for factor in (1, 1 + off)]
        assert pairs(runs, "stats,fingerprint", *sides)["verdict"].tolist() == [verdict]


# ---- masks -----------------------------------------------------------------------------------------------------------

CAUSAL = np.tril(np.ones((16, 16), np.bool_))


@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min), -1e4])
@pytest.mark.parametrize("turned", [False, True])
def test_a_mask_of_booleans_is_one_of_numbers(runs: Any, hidden: float, turned: bool) -> None:
    added = np.where(CAUSAL, 0.0, hidden).astype(np.float32)
    sides = [[("input", "kwargs.attention_mask", mask)] for mask in (added, CAUSAL)]
    row = pairs(runs, "stats,fingerprint", *(sides[::-1] if turned else sides)).row(0)
    assert (row["verdict"], row["error"], row["origin"]) == ("rounding", 0.0, False)
    assert row["reason"].startswith("the same mask by its statistics")


@pytest.mark.parametrize(
    "numbers",
    [
        np.where(np.tril(CAUSAL, -1), 0.0, -1e9),  # off by one
        np.where(CAUSAL, 0.0, -0.5),  # a bias, which hides nothing
        np.where(CAUSAL, 0.0, -1e9) + np.eye(16)[::-1] * -1e7 * ~CAUSAL,  # more than one number
        np.where(CAUSAL, 1.0, -1e9),
        np.where(CAUSAL, 0.0, np.nan),
    ],
)
def test_other_numbers_are_no_mask(runs: Any, numbers: np.ndarray) -> None:
    sides = [("input", "kwargs.attention_mask", mask) for mask in (numbers.astype(np.float32), CAUSAL)]
    assert pairs(runs, "stats,fingerprint", *([one] for one in sides)).row(0)["verdict"] == "dtype"


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_computed_with_such_a_mask_is_held_to_its_other_inputs(runs: Any, wrong: bool) -> None:
    """By their statistics the masks are as far apart as numbers can be, which explained whatever came of them."""
    sides = []
    for mask, rounding in ((np.where(CAUSAL, 0.0, -1e9).astype(np.float32), 0.0), (CAUSAL, 2.0**-9)):
        random, builder = np.random.default_rng(0), runs.Builder()
        for layer in range(8):
            seq = builder.call(f"h.{layer}", "Attention")
            for role, slot in (("input", "args.0"), ("input", "kwargs.attention_mask"), ("output", "out")):
                if slot == "kwargs.attention_mask":
                    builder.tensor(seq, role, slot, mask)
                    continue
                values, noise = random.normal(size=(2, 64, 64))
                off = 1.5 if wrong and rounding and (role, layer) == ("output", 5) else 1.0
                builder.tensor(seq, role, slot, bfloat16(values * off * (1 + rounding * noise)), "bfloat16")
        sides.append(builder.run)
    first = compare(*sides).first
    assert (first.site if first else None) == ("h.5" if wrong else None)
