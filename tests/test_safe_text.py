"""JSON that nests too deep, or has huge numbers, is rejected where it is read."""

from __future__ import annotations

import pytest

from astray.safe_text import DEEPEST, MOST_DIGITS, parse_json


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}")])
def test_levels(opens: str, closes: str) -> None:
    def nested(depth: int) -> str:
        return opens * depth + "1" + closes * depth

    parse_json(nested(DEEPEST))
    for depth in (DEEPEST + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested more than 100 levels"):
            parse_json(nested(depth))


def test_brackets_side_by_side_and_in_texts_are_no_levels() -> None:
    assert len(parse_json(f"[{', '.join(['[]'] * 1000)}]")) == 1000
    texts = ["[" * 500, '\\"[{', "\\\\"]
    assert parse_json(f"[{', '.join(f'{chr(34)}{text}{chr(34)}' for text in texts)}]") == ["[" * 500, '"[{', "\\"]


def test_whole_numbers_are_floats_too() -> None:
    assert float(parse_json("9" * MOST_DIGITS)) == 1e300
    for digits in (MOST_DIGITS + 1, 4000, 5000):
        with pytest.raises(ValueError, match="digits"):
            parse_json(f"[{'9' * digits}]")
    assert parse_json("[-1, 0.5, 1e999, NaN]")[:3] == [-1, 0.5, float("inf")]


@pytest.mark.parametrize("text", ["", "[", "{]", '"', "nul", "[1, 2", "\ufeff[]"])
def test_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
