"""Dumps of hooktools in the page: its users choose an epoch and a metric there, and see what is beyond a threshold."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from astray.compat.hooktools import Tracer

pytestmark = pytest.mark.browser


def trace(log_dir: Path, off: float, broken: float) -> Path:
    """Two epochs of three steps. From the second step of the second epoch on `one` is off, and its last is broken."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    tracer = Tracer({"log_dir": str(log_dir), "tracer_name": "demo", "trace_mode": 1}, model)
    for epoch in range(2):
        for step in range(3):
            if (epoch, step) == (1, 1):
                model[0].weight.data.mul_(1 + off)
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * epoch + step))
            x[0, 0] = broken if (epoch, step) == (1, 2) else 1.0
            tracer.trace(epoch, step)
            model(x)
            tracer.untrace()
    return tracer.folder


@pytest.fixture(scope="module")
def shown(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("dumps")
    with serving(trace(home / "good", 0.0, 1.0), trace(home / "bad", 0.01, math.nan)) as served:
        served.workspace.open("0", "1", {}).wait()
        yield served


@pytest.fixture
def tab(window: Any, shown: Any) -> Any:
    window.tab.goto(shown.address)
    window.tab.wait_for_selector("[data-test=count]")
    return window.tab


def shows(window: Any, count: int, total: int) -> None:
    """Wait until the table has so many rows."""
    window.tab.wait_for_function(
        "text => document.querySelector('[data-test=count]').textContent === text", arg=f"{count} of {total}"
    )


def test_an_epoch_is_chosen_by_its_own_number(tab: Any, window: Any, shown: Any) -> None:
    pairs = shown.workspace.shown.view.comparison.pairs
    tab.get_by_label("epoch").select_option("1")
    shows(window, int(np.sum(pairs.numbers("step") >= 3)), len(pairs))
    cells = tab.eval_on_selector_all(".grid [data-row] > :nth-child(2)", "all => all.map(x => x.textContent)")
    assert {cell.split("/")[0] for cell in cells} == {"1"}
    assert "epoch=1" in window.hash()


@pytest.mark.parametrize(
    ("metric", "column", "least"),
    [
        ("mean |Δ|", "mean_abs", 2e-3),
        pytest.param("max |Δ|", "max_abs", 5e-3, marks=pytest.mark.slow),
        pytest.param("RMSE", "rmse", 2e-3, marks=pytest.mark.slow),
        ("MAPE", "mape", 9e-3),
    ],
)
def test_rows_beyond_a_threshold_of_the_chosen_metric(
    tab: Any, window: Any, shown: Any, metric: str, column: str, least: float
) -> None:
    pairs = shown.workspace.shown.view.comparison.pairs
    broken = np.array(pairs["verdict"].tolist()) == "non-finite"
    beyond = (pairs.numbers(column) >= least) | broken
    assert 0 < np.sum(beyond & ~broken) < len(pairs) // 2
    tab.get_by_label("Metric").select_option(label=metric)
    tab.get_by_label("Least error").fill(str(least))
    shows(window, int(beyond.sum()), len(pairs))
    assert metric in tab.inner_text(".grid .head")
    with tab.expect_download() as download:  # the file has the same rows
        tab.click("a:has-text('CSV')")
    assert len(list(csv.DictReader(download.value.path().read_text(encoding="utf-8").splitlines()))) == beyond.sum()


def test_a_cosine_is_a_similarity_and_nan_passes_every_threshold(tab: Any, window: Any, shown: Any) -> None:
    pairs = shown.workspace.shown.view.comparison.pairs
    broken = np.array(pairs["verdict"].tolist()) == "non-finite"
    assert broken.any()
    tab.get_by_label("Metric").select_option(label="cosine")
    tab.get_by_label("Least error").fill("-1")
    shows(window, int(broken.sum()), len(pairs))
    tab.get_by_label("Least error").fill("2")
    shows(window, int(np.sum((pairs.numbers("cosine") <= 2) | broken)), len(pairs))
