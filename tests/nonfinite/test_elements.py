"""Which element is the first bad one: by rows alone, of complex numbers, of parts, and by the values of older runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astray.nonfinite import alarms, step_alarms
from astray.nonfinite.alarm import Element
from astray.nonfinite.details import recorded_element
from astray.store import Table
from nonfinite import accidents
from nonfinite.recording import record


def told(first: int | None, value: float | None, shape: tuple[int, ...], **cells: Any) -> Element | None:
    row = {"first_bad": first, "first_bad_value": value, "shape": shape, "dtype": "float32", "placement": None}
    return recorded_element(row | cells)


def test_a_flat_index_becomes_one_of_the_tensor() -> None:
    assert told(29, -math.inf, (2, 3, 5)) == Element((1, 2, 4), -math.inf)
    assert told(0, math.inf, ()) == Element((), math.inf)
    assert told(None, None, (2, 3)) is told(-1, math.nan, (2, 3)) is None


def test_complex_numbers_have_parts() -> None:
    assert told(10, math.inf, (2, 3), dtype="complex64") == Element((1, 2), math.inf, "real")
    assert told(7, math.inf, (2, 3), dtype="complex64") == Element((1, 0), math.inf, "imaginary")
    assert str(told(7, math.inf, (2, 3), dtype="complex64")) == "the imaginary part of element [1, 0]"


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        ({"shape": [10, 6], "offset": [5, 0]}, Element((6, 2), math.inf, whole=(10, 6))),
        ({"shape": [10, 6], "offset": None}, Element((12, 2), math.inf)),
        ({"shape": [8, 9], "offset": [0, 0], "runs": {"0": [[0, 2], [4, 2]]}}, Element((4, 2), math.inf, whole=(8, 9))),
        ({"shape": [8, 9], "offset": [0, 0], "runs": {"0": [[0, 2], [4, 1]]}}, Element((12, 2), math.inf)),
        ({"mesh": [2]}, Element((12, 2), math.inf)),
    ],
)  # fmt: skip
def test_a_part_counts_in_the_whole_where_it_is_known_which_part(placement: Any, found: Element) -> None:
    assert told(38, math.inf, (16, 3), placement=json.dumps(placement)) == found


def test_values_tell_it_where_a_run_of_before_has_no_such_column(tmp_path: Path) -> None:
    run = record(tmp_path / "run", accidents.fully_masked_row, "function", keep="tensors")
    rank, expected = run.ranks[0], alarms(run)[0].offenders[0].first
    older = {name: rank.tensors[name] for name in rank.tensors.names}
    count = len(rank.tensors)
    older |= {"first_bad": np.full(count, -1), "first_bad_value": np.full(count, np.nan)}
    masks = {name: rank.tensors.valid(name) for name in older} | {"first_bad": np.zeros(count, np.bool_)}
    (alarm,) = step_alarms(rank.calls, Table(older, masks), values=rank.values).alarms
    assert expected is not None
    assert alarm.offenders[0].first is not None
    assert (alarm.offenders[0].first.index, expected.index) == ((1, 0), (1, 0))
    (alarm,) = step_alarms(rank.calls, Table(older, masks)).alarms
    assert alarm.offenders[0].first is None


def test_infinity_beside_zeros_is_not_a_mask(tmp_path: Path) -> None:
    x = torch.zeros(4, 4)
    x[2, 1] = math.inf
    (alarm,) = alarms(record(tmp_path / "run", torch.nn.Sequential(torch.nn.Linear(4, 4)), "function", x=x))
    assert alarm.kind.word == "bad input"
    assert alarm.offenders[0].first == Element((2, 1), math.inf)
    assert "element [2, 1] of input `0` is inf" in str(alarm)
