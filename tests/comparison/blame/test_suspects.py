"""The calls that are most surprising: in order, explained, and told whether or not anything diverged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.comparison.blame.suspects import MOST, find_suspects
from astray.comparison.comparison import compare
from block_models import scaled, train


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("suspects") / "right")


def test_there_are_suspects_when_nothing_diverged(right: Path, tmp_path: Path) -> None:
    found = astray.compare(right, train(tmp_path / "again", noise=1e-7))
    assert found.first is None
    assert len(found.suspects) == MOST
    scores = [one.score for one in found.suspects]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert {one.sureness for one in found.suspects} == {"no more than rounding"}
    assert scores[0] == pytest.approx(np.nanmax(found.pairs["surprise"]))


def test_identical_runs_have_none(right: Path, tmp_path: Path) -> None:
    assert astray.compare(right, train(tmp_path / "again")).suspects == ()


def test_a_site_is_told_once_for_each_phase(right: Path, tmp_path: Path) -> None:
    found = astray.compare(right, train(tmp_path / "again", noise=1e-7))
    places = [(one.site, one.phase) for one in found.suspects]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_the_culprit_is_the_first_suspect_and_its_victims_are_none(right: Path, tmp_path: Path, noise: float) -> None:
    found = astray.compare(right, train(tmp_path / "bad", lambda net: scaled(net.h[3].up, 1.1), noise=noise))
    first, rest = found.suspects[0], found.suspects[1:]
    assert (first.site, first.phase, first.step, first.place.role) == ("h.3.up", "forward", 0, "output")
    assert first.score > 10 * max((one.score for one in rest), default=0.0)
    assert first.sureness == "certain"
    assert all(one.score < 1 for one in rest)


def test_a_suspect_says_why(right: Path, tmp_path: Path) -> None:
    first = astray.compare(right, train(tmp_path / "bad", lambda net: scaled(net.h[3].up, 1.1), noise=1e-7)).suspects[0]
    assert first.error / first.limit == pytest.approx(first.score)
    assert (first.rule, first.siblings, first.measure) == ("siblings", 5, "norm")
    assert str(first).startswith("its norm or std is off by 0.1")
    assert "and 5 siblings explain at most" in str(first)


def test_a_small_fault_is_a_suspect_below_the_limit(right: Path, tmp_path: Path) -> None:
    """What is too little to be called wrong is still the first place to look."""
    found = astray.compare(right, train(tmp_path / "bad", lambda net: scaled(net.h[3].up, 1 + 6e-7), noise=1e-7))
    assert found.first is None
    assert found.suspects[0].site == "h.3.up"
    assert found.suspects[0].score > 1.5 * found.suspects[1].score


def run(runs: Any, *factors: float) -> Any:
    builder = runs.Builder()
    for number, factor in enumerate(factors):
        seq = builder.call(f"site{number}", f"Type{number}")
        values = np.linspace(1, 2, 32, dtype=np.float32) + np.float32(number)
        builder.tensor(seq, "input", "0", values)
        builder.tensor(seq, "output", "out", values * np.float32(2 * factor))
    return builder.run


def test_the_furthest_off_come_first_after_the_first_divergence(runs: Any) -> None:
    found = compare(run(runs, 1, 1, 1, 1), run(runs, 1, 1.01, 1.1, 1 + 1e-6))
    assert [one.site for one in found.suspects] == ["site1", "site2", "site3"]  # the first divergence, then by surprise
    assert [one.score > 1 for one in found.suspects] == [True, True, False]
    assert [one.site for one in find_suspects(found.pairs)] == ["site2", "site1", "site3"]


def test_what_nothing_may_differ_in_is_beyond_all(runs: Any) -> None:
    sides = []
    for factor in (1.0, 1 + 1e-6):
        builder = runs.Builder()
        seq = builder.call("fc")
        builder.tensor(seq, "parameter", "weight", np.linspace(1, 2, 32, dtype=np.float32) * np.float32(factor))
        sides.append(builder.run)
    first = compare(*sides).suspects[0]
    assert (first.score, first.rule, first.sureness) == (math.inf, "start", "certain")
    assert "should be the same" in str(first)
