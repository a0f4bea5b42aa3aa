"""Single calls executed again for a comparison: results by their rows, and the exact values behind them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.comparison.judge.replays import NotReplayedError
from astray.replay import verifying
from astray.replay.verifying import ReplayedRank
from astray.store import RankRun


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> RankRun:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5))
    path = tmp_path_factory.mktemp("runs") / "a"
    with astray.record(path, model, level=["module", "function"], keep="stats,tensors") as recorder:
        model(torch.randn(4, 16)).sum().backward()
        recorder.step()
    return astray.open(path).ranks[0]


def call_of(rank: RankRun, site: str) -> int:
    return next(row for row in range(len(rank.calls)) if rank.calls["site"][row] == site)


def test_results_and_gradients_are_named_by_their_rows(rank):
    replayed = ReplayedRank(rank)(call_of(rank, "0/linear"))
    places = {
        (rank.calls["phase"][int(rank.call_rows[row])], rank.tensors["path"][row]): result
        for row, result in replayed.results.items()
    }
    assert {("forward", "out"), ("backward", "1"), ("backward", "2")} <= places.keys()
    assert all(result.surprise < 1 and not result.stands_out for result in places.values())
    assert not replayed.draws
    assert replayed.dtypes == {"torch.float32"}


def test_exact_values_are_those_of_float64(rank):
    replayed = ReplayedRank(rank)(call_of(rank, "0/linear"))
    row = min(replayed.results)
    recorded, exact = replayed.values(row)
    call = int(rank.call_rows[row])
    given, weight, bias = (
        np.asarray(rank.values(each), np.float64)
        for each in range(len(rank.tensors))
        if rank.call_rows[each] == call and rank.tensors["role"][each] == "input"
    )
    assert np.array_equal(recorded, np.asarray(rank.values(row), np.float64))
    np.testing.assert_allclose(exact, given @ weight.T + bias, rtol=1e-12)
    assert np.abs(recorded - exact).max() > 0


def test_a_call_that_draws_says_so(rank):
    assert ReplayedRank(rank)(call_of(rank, "1/dropout")).draws


def test_what_cannot_be_executed_or_is_large_has_a_reason(rank, monkeypatch):
    with pytest.raises(NotReplayedError, match="not a leaf"):
        ReplayedRank(rank)(call_of(rank, "<root>"))
    monkeypatch.setattr(verifying, "MOST_ELEMENTS", 10)
    with pytest.raises(NotReplayedError, match="more than 10 elements"):
        ReplayedRank(rank)(call_of(rank, "0/linear"))
