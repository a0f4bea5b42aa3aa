"""A setting that explains a divergence is named as its cause; one that changes nothing is not a divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.comparison.blame.setup_causes import changes_results
from astray.comparison.setup.setup_difference import SetupDifference
from block_models import Blocks, scaled, train


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("settings") / "right", steps=2)


def named(first: Any) -> list[tuple[str, str, Any, Any]]:
    return [(one.kind, one.name, one.reference, one.candidate) for one in first.settings]


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("rate", [1.1e-2, 1.0001e-2])
def test_a_learning_rate_is_the_cause_of_what_it_moved(right: Path, tmp_path: Path, rate: float, noise: float) -> None:
    """However little: a ten-thousandth of a step is less than rounding, and a learning rate is none."""
    found = astray.compare(right, train(tmp_path / "other", steps=2, lr=rate, noise=noise))
    assert named(found.first) == [("optimizer", "lr", 1e-2, rate)]
    assert (found.first.step, found.first.cause) == (1, "parameter")
    assert "lr" in found.first.evidence[0]
    assert found.first.sureness == "certain"


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("eps", [1e-2, 2e-5])
def test_the_eps_of_one_norm_is_the_cause_where_it_takes_effect(
    right: Path, tmp_path: Path, eps: float, noise: float
) -> None:
    def plant(net: Any) -> None:
        net.h[3].norm.eps = eps

    found = astray.compare(right, train(tmp_path / "other", plant, steps=2, noise=noise))
    assert (found.first.step, found.first.site, found.first.cause) == (0, "h.3.norm", "computation")
    assert named(found.first) == [("module", "eps", 1e-5, eps)]
    assert found.first.evidence[0].startswith("h.3.norm (LayerNorm) has eps 1e-05 in the reference")


def test_a_setting_without_an_effect_is_not_a_divergence(tmp_path: Path) -> None:
    """One that models compute with, and this one does not: nothing differs, not even the bits."""
    sides = []
    for rate in (0.1, 0.2):

        def plant(net: Any, rate: float = rate) -> None:
            net.h[2].dropout = rate

        sides.append(train(tmp_path / str(rate), plant))
    found = astray.compare(*sides)
    assert [(one.site, one.name, one.expected_effect) for one in found.setup] == [("h.2", "dropout", "changes results")]
    assert found.first is None
    assert found.same


def test_a_fault_beside_a_setting_is_found(right: Path, tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        net.h[1].norm.eps = 1e-2
        scaled(net.h[4].up, 1.2)

    found = astray.compare(right, train(tmp_path / "other", plant, steps=2))
    assert [one.site for one in (found.first, *found.others)] == ["h.1.norm", "h.4.up"]
    assert [bool(one.settings) for one in (found.first, *found.others)] == [True, False]


def test_a_fault_before_a_setting_comes_first(right: Path, tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        scaled(net.h[1].up, 1.2)

    found = astray.compare(right, train(tmp_path / "other", plant, steps=2, lr=2e-2))
    assert (found.first.site, found.first.settings) == ("h.1.up", ())
    assert ("optimizer", "lr", 1e-2, 2e-2) in [one for other in found.others for one in named(other)]


def test_another_class_of_a_module_is_the_cause(tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        net.h[2].act = nn.SiLU()

    found = astray.compare(train(tmp_path / "a"), train(tmp_path / "b", plant))
    assert (found.first.site, found.first.cause) == ("h.2.act", "computation")
    assert [(one.kind, one.name) for one in found.first.settings] == [("module", "class")]


def test_another_optimizer_is_the_cause(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 2, "model": lambda: Blocks(depth=3), "lr": 1e-3}
    found = astray.compare(
        train(tmp_path / "a", stepping=torch.optim.SGD, **how), train(tmp_path / "b", stepping=torch.optim.Adam, **how)
    )
    assert (found.first.step, found.first.cause) == (1, "parameter")
    assert "class" in [one.name for one in found.first.settings]


@pytest.mark.parametrize(
    ("reference", "candidate", "effect", "counts"),
    [
        (1e-5, 1e-6, "changes results", True),
        (1e-5, 1e-6, "changes rounding", False),
        (None, 1e-6, "changes results", False),  # which one run does not tell
        (1e-5, None, "changes results", False),
        ("<tensor>", "<tensor 2>", "changes results", False),  # which the comparison of tensors is for
    ],
)
def test_what_counts(reference: Any, candidate: Any, effect: Any, counts: bool) -> None:
    one = SetupDifference(
        rank=0,
        step=None,
        subject="module norm",
        site="norm",
        name="eps",
        reference=reference,
        candidate=candidate,
        kind="module",
        expected_effect=effect,
        sentence="",
        epsilon=None,
    )
    assert changes_results(one) == counts


def test_a_weight_that_one_run_does_not_optimize_is_named(right: Path, tmp_path: Path) -> None:
    """Statistics alone were kept; what it lacks is a step, and that may be less than rounding."""

    def but_one(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for number, one in enumerate(parameters) if number != 8], lr=lr)

    found = astray.compare(right, train(tmp_path / "b", steps=2, noise=1e-7, stepping=but_one))
    assert (found.first.site, found.first.step, found.first.cause) == ("h.1.up", 1, "parameter")
    assert named(found.first) == [("optimizer", "parameters", "SGD, group 0", None)]
    assert found.first.sureness == "certain"
    assert "is optimized by SGD, group 0 in the reference and not optimized" in " ".join(str(found).split())
