"""Selections of steps."""

from __future__ import annotations

from typing import Any

import pytest

from astray.errors import UsageError
from astray.steps import StepSelection


@pytest.mark.parametrize(
    ("given", "chosen", "text"),
    [
        (None, list(range(12)), "all"),
        ("", list(range(12)), "all"),
        ("all", list(range(12)), "all"),
        ([], list(range(12)), "all"),
        ("0:10:3", [0, 3, 6, 9], "0:10:3"),
        ("9:", [9, 10, 11], "9:"),
        (":2", [0, 1], "0:2"),
        ("7", [7], "7"),
        (7, [7], "7"),
        ("1,3, 8:10", [1, 3, 8, 9], "1,3,8:10"),
        ([1, 4], [1, 4], "1,4"),
        (range(2, 6, 2), [2, 4], "2:6:2"),
        (StepSelection.parse("5"), [5], "5"),
    ],
)
def test_what_is_chosen(given: Any, chosen: list[int], text: str) -> None:
    steps = StepSelection.parse(given)
    assert [step for step in range(12) if step in steps] == chosen
    assert str(steps) == text
    assert bool(steps) == (text != "all")


@pytest.mark.parametrize(
    "given", ["a:b", "1-3", "5:2", "0:5:0", "-1", [-1], range(0), range(5, 0, -1), "1;2", 3.5, ["0"], [True]]
)
def test_an_invalid_selection_is_answered_with_the_form(given: Any) -> None:
    with pytest.raises(UsageError, match="begin:end"):
        StepSelection.parse(given)


def test_ranks_are_chosen_in_the_same_way() -> None:
    with pytest.raises(UsageError, match=r"^'5:2' selects no rank\."):
        StepSelection.parse("5:2", "rank")
    with pytest.raises(UsageError, match=r"^'x' is not a selection of ranks\."):
        StepSelection.parse("x", "rank")
