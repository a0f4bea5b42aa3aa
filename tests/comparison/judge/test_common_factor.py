"""A factor that all gradients of a step have in common is one finding; what agrees after dividing by it agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from block_models import scaled, train
from judging import Judged

ONES = np.linspace(1, 2, 32, dtype=np.float32)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("scaling") / "right")


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_another_scale_of_the_loss_is_said_once_and_where_gradients_come_in(
    right: Path, tmp_path: Path, factor: float, noise: float
) -> None:
    found = astray.compare(right, train(tmp_path / "scaled", scale=factor, noise=noise))
    assert str(found.first.place) == "step 0, backward, <root> (Blocks), input"
    assert (found.first.cause, found.others) == ("input", ())
    assert found.first.deviation == pytest.approx(abs(factor - 1), rel=1e-3)
    assert "look at the loss, its scaling" in " ".join(found.first.evidence)
    wrong = [row for row, verdict in enumerate(found.pairs["verdict"]) if verdict == "diverged"]
    values = {found.reference.ranks[0].tensors["fingerprint"][found.pairs["row_reference"][row]] for row in wrong}
    assert len(values) == 1  # the gradient of the loss, which is the head's too
    reasons = {reason for reason in found.pairs["reason"] if reason}
    assert any("after dividing by the factor that all gradients have in common" in reason for reason in reasons)


def test_a_fault_beside_another_scale_is_found_too(right: Path, tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        net.h[3].down.weight.register_hook(lambda gradient: gradient / 2)

    found = astray.compare(right, train(tmp_path / "bad", plant, scale=0.5))
    assert [one.site for one in (found.first, *found.others)] == ["<root>", "h.3.down.weight"]


def test_a_halved_gradient_of_one_layer_is_not_a_common_factor(right: Path, tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        net.h[3].down.weight.register_hook(lambda gradient: gradient / 2)

    found = astray.compare(right, train(tmp_path / "bad", plant))
    assert (found.first.site, found.first.phase, found.first.role) == ("h.3.down.weight", "backward", "gradient")
    assert found.counts["diverged"] == 1
    assert not any("in common" in (reason or "") for reason in found.pairs["reason"])


def test_what_the_forward_is_off_by_is_not_a_common_factor(right: Path, tmp_path: Path) -> None:
    found = astray.compare(right, train(tmp_path / "bad", lambda net: scaled(net.h[0].down, 1.3)))
    assert (found.first.site, found.first.phase) == ("h.0.down", "forward")
    assert not any("in common" in (reason or "") for reason in found.pairs["reason"])


def backward(runs: Any, *factors: float) -> Any:
    """A gradient that arrives, and those of layers, each by its factor."""
    builder = runs.Builder()
    outer = builder.call("net", "Net")
    layers = [builder.call(f"net.{number}", parent=outer) for number in range(len(factors) - 1)]
    given = builder.call("net", "Net", phase="backward", parent=outer)
    builder.tensor(given, "input", "out", ONES * np.float32(factors[0]))
    for number, (layer, factor) in enumerate(zip(layers, factors[1:], strict=True)):
        seq = builder.call(f"net.{number}", phase="backward", parent=layer)
        builder.tensor(seq, "output", "0", (ONES + number) * np.float32(factor))
    return builder.run


@pytest.mark.parametrize(
    ("factors", "common"),
    [
        ([0.5] * 20, 0.5),
        ([0.5, *[0.5] * 17, 1.0, 1.0], 0.5),  # a few may hold nothing but rounding
        ([0.5, *[0.5] * 10, *[1.0] * 9], None),  # and not half of them
        ([1.0, *[0.5] * 19], None),  # it must come from outside
        ([0.5, *[1.0] * 19], None),
        ([1.005] * 20, None),  # rounding of the loss
        ([1.0] * 20, None),
    ],
)
def test_what_is_common(runs: Any, factors: list[float], common: float | None) -> None:
    found = Judged(backward(runs, *[1.0] * len(factors)), backward(runs, *factors)).scaling
    assert found.found == (common is not None)
    assert found.factor.tolist() == pytest.approx([common or 1.0] * len(factors))
    assert found.entries.sum() == (common is not None)


def test_each_step_has_its_own(runs: Any) -> None:
    sides = []
    for factor in (1.0, 3.0):
        builder = runs.Builder()
        for step in range(2):
            outer = builder.call("net", "Net", step=step)
            seq = builder.call("net", "Net", phase="backward", parent=outer, step=step)
            for role, path in (("input", "out"), ("output", "0")):
                builder.tensor(seq, role, path, ONES * np.float32(factor if step else 1))
        sides.append(builder.run)
    found = Judged(*sides).scaling
    assert found.factor.tolist() == [1, 1, pytest.approx(3), pytest.approx(3)]
