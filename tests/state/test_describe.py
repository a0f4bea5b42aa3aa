"""Tables: what is in them, how they are laid out, and what a bad column is answered with."""

from __future__ import annotations

import math
import random

import pandas as pd
import pytest
import torch

from astray.errors import StateError
from astray.state import StateDict, StatisticsTable
from astray.state.describe import layout
from astray.state.naming import grouped


def state() -> StateDict:
    values = {
        "wte": torch.tensor([[3.0, -4.0]]),
        "h.0.w": torch.tensor([1.0, 2.0, 6.0]),
        "h.0.b": torch.tensor([True, False]),
        "h.1.w": torch.tensor([0.5], dtype=torch.bfloat16),
        "h.10.w": torch.empty(0, 2),
        "ln": torch.tensor(2),
    }
    return StateDict(values, name="net")


def test_a_row_for_each_parameter() -> None:
    keys = ["no", "name", "shape", "dtype", "numel", "std", "kurtosis", "norm2", "norm3"]
    table = state().describe(lw=True, include_keys=keys, display=False)
    assert str(table).splitlines() == [
        "[================================= Stats net ==================================]",
        "   no name    shape   dtype      numel  std       kurtosis  norm2     norm3   ",
        "0  0   wte     (1, 2)  float32   2      4.949747 -2.0       5.000000  4.497941",
        "1  1   h.0.w     (3,)  float32   3      2.645751 -1.5       6.403124  6.082202",
        "2  2   h.0.b     (2,)  bool      2      0.707107 -2.0       1.000000  1.000000",
        "3  3   h.1.w     (1,)  bfloat16  1           NaN  NaN       0.500000  0.500000",
        "4  4   h.10.w  (0, 2)  float32   0           NaN  NaN       0.000000  0.000000",
        "5  5   ln          ()  int64     1           NaN  NaN       2.000000  2.000000",
    ]
    assert repr(table) == str(table)
    assert table["name"] == ["wte", "h.0.w", "h.0.b", "h.1.w", "h.10.w", "ln"]
    assert table["dtype"] == ["float32", "float32", "bool", "bfloat16", "float32", "int64"]
    assert table["numel"] == [2, 3, 2, 1, 0, 1]
    assert table["norm2"] == pytest.approx([5.0, math.sqrt(41), 1.0, 0.5, 0.0, 2.0])
    assert table.rows[1]["norm3"] == pytest.approx((1 + 8 + 216) ** (1 / 3))
    assert [math.isnan(value) for value in table["std"]] == [False, False, False, True, True, True]
    assert len(table) == 6
    assert next(iter(table)) == table.rows[0]
    with pytest.raises(KeyError, match=r"no column 'mean'\. It has no, name, shape"):
        table["mean"]


def test_one_column_may_be_given_by_its_name() -> None:
    assert list(state().describe(include_keys="norm2", display=False).columns) == ["norm2"]
    assert "norm2" not in state().describe(exclude_keys="norm2", display=False).columns


def test_one_row_for_all_and_for_what_matches() -> None:
    table = state().describe(pattern="h", display=False)
    assert table.rows[0] | {"norm2": 0} == {
        "no": 4, "name": "net", "shape": (6,), "numel": 6, "norm1": 10.5, "norm1_mean": 1.75, "norm2": 0,
    }  # fmt: skip


def test_a_row_for_each_group() -> None:
    table = state().describe(group=r"h\.(\d+)\.", include_keys=["no", "name", "numel", "sum"], display=False)
    assert table.rows == [
        {"no": 2, "name": "(other)", "numel": 3, "sum": 1.0},
        {"no": 2, "name": "0", "numel": 5, "sum": 10.0},
        {"no": 1, "name": "1", "numel": 1, "sum": 0.5},
        {"no": 1, "name": "10", "numel": 0, "sum": 0.0},
    ]
    assert state().describe(group="layer", display=False)["name"] == ["(other)", "h.0", "h.1", "h.10"]
    assert state().describe(group="h|wte", display=False)["name"] == ["wte", "h", "(other)"]
    assert state().describe(group=r"(h)\.(\d)", pattern="h", display=False)["name"] == ["h.0", "h.1"]


def test_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    table = state().describe(exclude_keys=["shape", "norm1"])
    printed = capsys.readouterr().out
    assert printed == f"{table}\n"
    assert printed.splitlines() == [
        "[============== Stats net ==============]",
        "   no name  numel  norm1_mean  norm2   ",
        "0  6   net  9      2.166667    8.440972",
    ]
    assert repr(table) == "<1 row × 5 columns>"  # which is what a prompt shows below it


def test_statistics_of_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    norms = state().filter("h.0").norm2(lw=True)
    norms.describe(lw=True)
    assert capsys.readouterr().out.splitlines() == [
        "[=== Stats net_stat ===]",
        "   no name    value   ",
        "0  0   h.0.w  6.403124",
        "1  1   h.0.b  1.000000",
    ]
    assert repr(norms).splitlines() == [
        "net_stat",
        "(",
        "    00: h.0.w = 6.4031242374328485",
        "    01: h.0.b = 1.0",
        ")",
    ]


def test_a_wrong_column_is_answered_with_the_right_ones() -> None:
    with pytest.raises(StateError, match=r"no column 'kurtosi'. Did you mean 'kurtosis'\? There are no, name"):
        state().describe(include_keys=["name", "kurtosi"])
    with pytest.raises(StateError, match="no column 'nrom1'"):
        state().describe(exclude_keys=["nrom1"])
    with pytest.raises(StateError, match="'value' is for numbers"):
        state().describe(include_keys=["value"])


def test_nothing_is_described_in_words() -> None:
    assert str(StateDict(name="nothing").describe(lw=True, display=False)).splitlines()[1].split() == [
        "no", "name", "shape", "numel", "norm1", "norm1_mean", "norm2",
    ]  # fmt: skip


def test_the_layout_is_that_of_a_frame_with_headers_to_the_left() -> None:
    choice = random.Random(0)

    def number() -> float:
        return choice.choice(
            [
                math.nan, math.inf, 0.0, float(choice.randint(-3_000_000, 3_000_000)), round(choice.gauss(0, 1), 3),
                choice.gauss(0, 1) * 10.0 ** choice.uniform(-8, 8), choice.gauss(0, 1), choice.gauss(0, 1),
            ]
        )  # fmt: skip

    for _ in range(400):
        rows = choice.randint(1, 12)
        columns = {
            "no": [choice.randint(-9, 10 ** choice.randint(1, 7)) for _ in range(rows)],
            "name": ["same"] * rows,  # pandas puts text to the right, names read better from the left
            "x": [number() for _ in range(rows)],
        }
        if all(map(math.isnan, columns["x"])):
            continue  # a column of NaN only has no blank in front there
        assert layout(columns) == pd.DataFrame(columns).to_string(justify="left").split("\n")


def test_a_table_goes_to_pandas() -> None:
    frame = state().describe(lw=True, display=False).to_pandas()
    assert list(frame.columns) == ["no", "name", "shape", "numel", "norm1", "norm1_mean", "norm2"]
    assert frame["numel"].sum() == 9
    assert isinstance(state().describe(display=False), StatisticsTable)


def test_a_layer_is_a_part_of_the_name_that_is_a_number() -> None:
    """The `weight_ih_l0` of a GRU ends in a digit and is not a layer."""
    assert grouped(["gru.weight_ih_l0", "gru.weight_hh_l1", "h.12.w", "0.bias", "conv2d.w"], "layer") == {
        "(other)": ["gru.weight_ih_l0", "gru.weight_hh_l1", "conv2d.w"],
        "h.12": ["h.12.w"],
        "0": ["0.bias"],
    }
