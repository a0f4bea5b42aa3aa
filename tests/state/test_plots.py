"""Pictures: what is drawn, and what is said where matplotlib is missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from astray.errors import StateError
from astray.state import StateDict
from astray.state.plots import distribution, image, numbers


def state() -> StateDict:
    generator = torch.Generator().manual_seed(0)
    values = {
        "a": torch.randn(30, 40, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor([0.0, math.nan, math.inf, 2.0]),
    }
    return StateDict(values, name="net")


def test_elements_are_counted_as_numpy_does() -> None:
    found = distribution(state(), ["a", "b"], 20, log=False)
    values = np.concatenate([state()[name].double().numpy().ravel() for name in ("a", "b")])
    counts, edges = np.histogram(values, 20)
    assert found.counts.tolist() == counts.tolist()
    assert found.edges == pytest.approx(edges, rel=1e-12)
    assert found.left_out == 0
    assert found.cumulative[[0, -1]].tolist() == [0.0, 1.0]
    assert distribution(state(), ["c"], 4, log=False).left_out == 2
    assert distribution(state(), ["c"], 4, log=True).left_out == 3  # 0 has no logarithm
    assert distribution(StateDict({"x": torch.full((3,), math.nan)}), ["x"], 4, log=False).left_out == 3
    assert distribution(StateDict({"x": torch.full((3,), 2.0)}), ["x"], 4, log=True).counts.sum() == 3


def test_a_picture_has_the_means_of_its_cells() -> None:
    values = torch.arange(24.0).reshape(4, 6)
    found = image(numbers(StateDict({"x": values}), ["x"]), 4, 6, 3)
    assert found.shape == (3, 3)
    assert found[2].tolist() == [18.5, 20.5, 22.5]
    assert found[0].tolist() == [3.5, 5.5, 7.5]  # rows 0 and 1


def test_figures(tmp_path: Path) -> None:
    net = state()
    figure = net.hist(path=tmp_path / "hist.png", bins=10)
    assert (tmp_path / "hist.png").stat().st_size > 1000
    assert figure.axes[0].get_title() == "net, 2 left out"
    layered = net.ecdf(lw=True, logx=True)
    assert [axes.get_title() for axes in layered.axes if axes.get_visible()] == ["a", "b", "c, 3 left out"]
    assert layered.axes[0].get_xscale() == "log"
    maps = net.heatmap(lw=True, pattern="[ab]", vmin=-1, vmax=1)
    assert [axes.get_title() for axes in maps.axes if axes.get_title()] == ["a, 30 × 40", "b, 1 × 7"]
    assert net.heatmap(pattern="[ab]").axes[0].get_title() == "net, 36 × 34"
    lines = net.lines(["std", "norm2"], pattern="[ab]", logy=True).axes[0]
    assert [line.get_label() for line in lines.lines] == ["std", "norm2"]
    assert list(lines.lines[1].get_ydata()) == list(net.norm2(lw=True, pattern="[ab]").values())
    assert [label.get_text() for label in lines.get_xticklabels()] == ["a", "b"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'astray\[plot\]'"):
        state().hist()


def test_complex_numbers_are_not_drawn() -> None:
    with pytest.raises(StateError, match=r"'z' is complex.*abs\(\)"):
        StateDict({"z": torch.ones(2, dtype=torch.complex64)}).heatmap()
