"""What a row may be off by because of what it came from, where statistics show less of that than there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.comparison.comparison import compare
from astray.comparison.judge import thresholds as t
from astray.comparison.judge.provenance import Provenance
from block_models import Blocks, train
from judging import Judged
from record_builders import Builder

LAYERS = 7
LUCKY = 4
"""The layer whose first call gives numbers with the same statistics in both runs, though no element is the same."""


SIZE = 1 << 16
ROUNDING = 4 * 2.0**-8 / SIZE**0.5
"""What rounding makes of a sum over so many bfloat16 numbers."""


def bfloat16(values: np.ndarray) -> np.ndarray:
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def layers(is_candidate: bool, fault: float = 1.0) -> Any:
    """Layers of two calls each: what `norm` gives is what `fc` is given. All are off by a few roundings of a sum."""
    builder = Builder()
    for number in range(LAYERS):
        random = np.random.default_rng(number)
        entered, normed, made = (random.normal(size=SIZE) for _ in range(3))
        if is_candidate:
            entered, made = entered * (1 + 6 * ROUNDING), made * (1 + 60 * ROUNDING)
            normed = normed[::-1] if number == LUCKY else normed * (1 + 60 * ROUNDING)
            made = made * fault if number == LUCKY else made
        norm = builder.call(f"h.{number}.norm", "LayerNorm")
        builder.tensor(norm, "input", "0", bfloat16(entered), "bfloat16")
        builder.tensor(norm, "output", "out", bfloat16(normed), "bfloat16")
        fc = builder.call(f"h.{number}.fc")
        builder.tensor(fc, "input", "0", bfloat16(normed), "bfloat16")
        builder.tensor(fc, "output", "out", bfloat16(made), "bfloat16")
    return builder.run


def test_statistics_that_agree_by_chance_are_no_proof() -> None:
    """A result is off by no less than what it was made of, whatever its statistics say."""
    found = compare(layers(is_candidate=False), layers(is_candidate=True))
    assert found.first is None
    assert found.counts["diverged"] == 0


def test_a_fault_beside_them_is_named() -> None:
    found = compare(layers(is_candidate=False), layers(is_candidate=True, fault=1.05))
    assert found.first is not None
    assert found.first.site == f"h.{LUCKY}.fc"


def test_limits_are_narrow_as_long_as_weights_are_the_same(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 2}
    judged = Judged(*map(astray.open, (train(tmp_path / "a", **how), train(tmp_path / "b", noise=1e-7, **how))))
    drifted, step, made = (
        judged.bases.weights_drifted,
        judged.sources.step,
        judged.sources.has_provenance(Provenance.CALL, Provenance.CODE),
    )
    assert not drifted["values"][step == 0].any()
    assert drifted["values"][step == 1].all()
    assert drifted["norm"].tolist() == ((step == 1) & made).tolist()  # weights and their gradients are made without


def test_where_no_weight_was_recorded_they_may_have_drifted(tmp_path: Path) -> None:
    how: dict[str, Any] = {"roles": ["input", "output"]}
    judged = Judged(*map(astray.open, (train(tmp_path / "a", **how), train(tmp_path / "b", noise=1e-7, **how))))
    assert judged.bases.weights_drifted["norm"][judged.sources.has_provenance(Provenance.CALL, Provenance.CODE)].all()


def test_what_weights_are_off_by_is_in_sums_of_their_results(tmp_path: Path) -> None:
    """Weights are off alike at all positions, so sums over a result average over few errors."""

    def drift(net: Any) -> None:
        weight = net.h[0].up.weight.data
        weight.mul_(1 + 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))

    sides = train(tmp_path / "a", steps=2), train(tmp_path / "b", steps=2, before_update=drift)
    judged = Judged(*map(astray.open, sides))
    rows, errors = judged.rows(), judged.errors
    weight = rows[1, "forward", "h.0.up", 0, "parameter", "weight"]
    result = rows[1, "forward", "h.0.up", 0, "output", "out"]
    assert errors.element[weight] > 1e-5
    assert (
        judged.bases.own_rounding["norm"][result]
        >= t.SUM_SIGMAS * errors.element[weight] / errors.count[weight] ** 0.25
    )


@pytest.mark.parametrize("keep", ["stats", ["stats", "fingerprint", "tensors"]], ids=["statistics", "values"])
def test_a_training_that_has_drifted_for_long_is_quiet(tmp_path: Path, keep: Any) -> None:
    how: dict[str, Any] = {"steps": 12, "keep": keep, "lr": 1e-2, "stepping": torch.optim.Adam, "dtype": torch.bfloat16}
    model = lambda: Blocks(depth=6).bfloat16()  # noqa: E731
    sides = (train(tmp_path / name, model=model, noise=noise, **how) for name, noise in (("a", 0.0), ("b", 4e-3)))
    found = astray.compare(*sides)
    assert found.first is None
