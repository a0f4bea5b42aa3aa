"""A comparison as users hold it: what `comparison` has found, and the reports made of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

import astray
from astray.comparison.comparison import ComparisonData, compare
from astray.report import text
from astray.report.html import comparison_as_html
from astray.results.comparison import Comparison
from record_builders import Builder


def run(value: float = 1.0) -> astray.Run:
    made = Builder("runs/a")
    made.tensor(made.call("net"), "output", "", np.array([value, 2.0]))
    return made.run


def test_compare_gives_what_is_printed_shown_and_written(tmp_path: Path) -> None:
    diff = astray.compare(run(), run(3.0))
    assert type(diff) is astray.Comparison
    assert isinstance(diff, ComparisonData)
    assert str(diff) == text.render(diff)
    assert diff._repr_html_() == comparison_as_html(diff)
    assert diff.to_json(tmp_path / "diff.json").is_file()
    assert repr(diff).startswith("<Comparison of 1 tensor")


def test_everything_found_is_kept() -> None:
    data = compare(run(), run(3.0))
    diff = Comparison.of(data)
    for field in dataclasses.fields(data):
        if field.name not in ("reference", "candidate"):
            assert getattr(diff, field.name) is getattr(data, field.name)
    assert diff.first is data.first
    assert diff.counts == data.counts


def test_its_runs_are_those_given_or_runs_as_users_hold_them(tmp_path: Path) -> None:
    reference = run()
    assert astray.compare(reference, run()).reference is reference
    for name in ("a", "b"):
        astray.convert(run(), tmp_path / name, to="astray")
    diff = astray.compare(tmp_path / "a", tmp_path / "b")
    assert not diff.reference.alarms()
    assert not diff.candidate.alarms()
