"""Sentences about two runs: that they were asked for different things; short ones, whatever a damaged file has."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import astray
from astray.comparison.problems import different_settings, little_shared, span
from record_builders import Builder, linear_program


def run(path: str, site: str = "fc", **settings: Any) -> Any:
    rows = Builder(path)
    for number in range(4):
        call = rows.call(site if number else "fc", call=number)
        rows.tensor(call, "output", "out", np.arange(6, dtype=np.float32) + number)
    found = rows.run
    found.info.settings = settings
    return found


def test_what_was_asked_for_differently_is_named() -> None:
    left = run("a", level=["module"], keep=["stats"], phases=["forward"], match=[], steps="")
    right = run("b", level=["function"], keep=["stats"], phases=["backward", "forward"], match=["h.0"], steps="0:3")
    assert different_settings(left, right) == [
        "The two were recorded with different settings: level is module in the reference and function in the "
        "candidate; steps is not given in the reference and 0:3 in the candidate; match is not given in the "
        "reference and h.0 in the candidate; phases is forward in the reference and backward, forward in the "
        "candidate. What only one was asked for is only in that run: record both with the same settings."
    ]


def test_what_was_kept_is_not_a_reason_for_tensors_to_be_missing() -> None:
    left, right = run("a", keep=["stats"], samples=4), run("b", keep=["tensors"], samples=8)
    assert different_settings(left, right) == [
        "The two were recorded with different settings: keep is stats in the reference and tensors in the candidate. "
        "They are compared by what both have kept; to compare by more, record both with the same."
    ]


@pytest.mark.parametrize("settings", [{}, {"level": ["module"], "queue_bytes": 7}, {"perturb": 3}])
def test_the_same_and_what_says_nothing_of_rows_are_not_told(settings: dict[str, Any]) -> None:
    assert different_settings(run("a", level=["module"], queue_bytes=8, perturb=None), run("b", **settings)) == []


def test_it_stands_in_front_and_no_map_is_suggested() -> None:
    diff = astray.compare(run("a", "fc", level=["module"]), run("b", "other", level=["function"]))
    text = " ".join(str(diff).split())
    assert text.index("recorded with different settings") < text.index("divergence")
    assert text.count("recorded with different settings") == 1
    assert "astray map" not in text
    assert any("different settings" in problem for problem in diff.problems)


def test_with_no_tensor_in_common_it_is_the_advice() -> None:
    left, right = run("a", steps="0:1"), Builder("b")
    right.tensor(right.call("else"), "output", "out", np.zeros(3, np.float32))
    other = right.run
    other.info.settings = {"steps": "0:1", "phases": ["forward"]}
    left.info.settings = {"steps": "0:1", "phases": ["backward"]}
    with pytest.raises(
        astray.errors.CompareError, match="phases is backward in the reference and forward in the candidate"
    ):
        astray.compare(left, other)


def test_maps_are_suggested_where_both_were_asked_for_the_same() -> None:
    assert "astray map" in little_shared(10, 9, 2, "key")[0]
    assert "astray map" not in little_shared(10, 9, 2, "key", alike=False)[0]


def test_numbers_that_are_far_apart_are_not_counted_through() -> None:
    started = time.monotonic()
    assert span([0, 10**15]) == "0, 1000000000000000"
    assert span([10**15, 10**15 + 1]) == f"{10**15}–{10**15 + 1}"
    assert time.monotonic() - started < 1


def test_a_step_of_a_damaged_row_makes_no_long_list() -> None:
    good = linear_program(Builder("runs/good"))
    bad = Builder("runs/bad")
    linear_program(bad)
    seq = bad.call("mlp.fc", step=10**15)
    bad.tensor(seq, "output", "out", [1.0])
    diff = astray.compare(good, bad.run)
    assert any("Compare the shared part with --steps 0:3" in problem for problem in diff.problems)
