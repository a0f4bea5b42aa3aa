"""Metrics that are asked for: KL against plain numpy, the user's own from everywhere, and those that fail."""

from __future__ import annotations

import math
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from astray.comparison.comparison import COLUMNS, compare
from astray.comparison.measure import custom_metrics as own_metrics
from astray.comparison.measure.custom_metrics import find_metrics, kl
from astray.errors import CompareError


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_kl_is_the_mean_over_rows():
    random = np.random.default_rng(0)
    one, other = softmax(random.normal(size=(3, 5, 7))), softmax(random.normal(size=(3, 5, 7)))
    plain = np.mean([sum(r * math.log(r / c) for r, c in zip(*rows, strict=True)) for rows in
                     zip(one.reshape(-1, 7), other.reshape(-1, 7), strict=True)])  # fmt: skip
    assert kl(one, other) == pytest.approx(plain, rel=1e-12)
    assert kl(one, one) == 0
    assert kl(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == pytest.approx(math.log(2))
    assert kl(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == math.inf


@pytest.mark.parametrize("bad", [[0.5, 0.6], [1.5, -0.5], [math.nan, 1.0], [1.0, 1.0]])
def test_kl_means_nothing_but_for_distributions(bad):
    good = np.array([0.5, 0.5])
    assert math.isnan(kl(np.array(bad), good))
    assert math.isnan(kl(good, np.array(bad)))
    assert math.isnan(kl(np.empty(0), np.empty(0)))
    assert math.isnan(kl(np.float64(1.0), np.float64(1.0)))


@pytest.fixture
def pair(runs):
    one, other = runs.Builder(keep="stats,tensors"), runs.Builder(keep="stats,tensors")
    for builder, scale in ((one, 1.0), (other, 2.0)):
        builder.tensor(builder.call("a"), "output", "out", np.array([0.25, 0.75]) * scale)
        builder.tensor(builder.call("b"), "output", "out", np.ones(3))
        builder.tensor(
            builder.call("c"), "output", "out", np.array([0x3F80, 0x4000], np.uint16) + int(scale), "bfloat16"
        )
    return one.run, other.run


def largest(reference, candidate):
    reference[:] = 7  # what it does to its arrays is its own business
    return candidate.max()


def test_one_of_your_own_becomes_a_column(pair):
    found = compare(*pair, metrics=[largest, "kl"])
    assert found.pairs["largest"].tolist() == pytest.approx([1.5, 1.0, 2.03125])
    assert np.isnan(found.pairs["kl"]).tolist() == [True, True, True]
    assert found.pairs["max_abs"][0] == 0.75


def test_a_failing_one_is_told_and_the_rest_is_there(pair):
    def picky(reference, candidate):
        if len(reference) == 2:
            raise ValueError("two is too few")
        return 1.0

    found = compare(*pair, metrics=[picky])
    assert np.isnan(found.pairs["picky"]).tolist() == [True, False, True]
    assert "The metric picky failed for 2 pairs: ValueError: two is too few" in found.problems
    assert found.pairs["verdict"][0] == "diverged"


def test_from_a_file_a_package_and_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "mine.py"
    file.write_text("def psnr(reference, candidate):\n    return 42.0\n")
    points = [EntryPoint("brought", "numpy.linalg:norm", own_metrics.GROUP)]
    monkeypatch.setattr(own_metrics, "entry_points", lambda group: points)
    found = find_metrics([f"{file}:psnr", "math:hypot", "brought"], COLUMNS)
    assert found.names == ("psnr", "hypot", "brought")
    assert found(np.array([1.0]), np.array([2.0]), ("float64", "float64"))[0] == 42.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kll", "There is no metric 'kll'; there are kl, mean_abs. Did you mean 'kl'?"),
        ("nowhere.py:f", "There is no file nowhere.py"),
        ("no_such_package:f", "no_such_package cannot be loaded: ModuleNotFoundError"),
        ("math:nothing", "math has no function 'nothing'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_what_cannot_be_found_is_told(name, said):
    with pytest.raises(CompareError) as caught:
        find_metrics([name], COLUMNS)
    assert said in str(caught.value)


def test_names_that_are_taken_or_no_names():
    with pytest.raises(CompareError, match="There is a column 'cosine' already"):
        find_metrics(["astray.comparison.measure.metrics:cosine"], COLUMNS)
    with pytest.raises(CompareError, match="'<lambda>' cannot be a column"):
        find_metrics([lambda reference, candidate: 0.0], COLUMNS)
