"""Differences of settings in words."""

from __future__ import annotations

from typing import Any

from astray.comparison.setup.wording import subject_text


def test_values_as_sentences_have_them() -> None:
    assert [subject_text(value) for value in ([0.9, [1, 2]], True, "torch.bfloat16")] == [
        "(0.9, (1, 2))",
        "True",
        "bfloat16",
    ]


def test_lists_without_end_are_cut() -> None:
    """As a damaged file may have them."""
    endless: list[Any] = []
    for _ in range(100_000):
        endless = [endless]
    assert subject_text(endless) == "(" * 8 + "(…)" + ")" * 8
