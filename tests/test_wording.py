"""Numbers in names."""

from __future__ import annotations

import pytest

from astray.errors import UsageError
from astray.part import Part
from astray.steps import StepSelection
from astray.wording import numeral


def test_digits_make_a_number() -> None:
    assert [numeral(text) for text in ("0", "12", "007", "9" * 18)] == [0, 12, 7, 10**18 - 1]


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1.0", "1_0", "²", "٣", "9" * 19, "9" * 5000])
def test_whatever_else_makes_none(text: str) -> None:
    assert numeral(text) is None


def test_no_more_digits_than_requested() -> None:
    assert (numeral("999999999", 9), numeral("1000000000", 9)) == (999_999_999, None)


@pytest.mark.parametrize("text", ["9" * 5000, f"0:{'9' * 5000}", f"::{'9' * 5000}", f"{'9' * 5000}:"])
def test_numbers_without_end_select_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="is not a selection of steps"):
        StepSelection.parse(text)
    with pytest.raises(UsageError, match="is not a part of a tensor"):
        Part.parse(text)
