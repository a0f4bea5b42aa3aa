"""What each tensor came from, and that a row is judged alike whatever else was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import astray
from astray.comparison.judge.provenance import Provenance
from block_models import Blocks, scaled, train
from judging import Judged

FORWARD, BACKWARD = "forward", "backward"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Two steps of two blocks, the second run a little off."""
    folder = tmp_path_factory.mktemp("sources")
    how: dict[str, Any] = {"model": lambda: Blocks(depth=2), "steps": 2}
    sides = train(folder / "a", **how), train(folder / "b", noise=1e-7, **how)
    return Judged(*map(astray.open, sides))


def explains(judged: Judged, key: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """Which rows a row came from: those whose error would be seen in it."""
    rows = judged.rows()
    found = set()
    for other, number in rows.items():
        column = np.zeros(len(rows))
        column[number] = 1.0
        if judged.sources.largest(column)[rows[key]] > 0:
            found.add(other)
    return found


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ((0, FORWARD, "<root>", 0, "input", "0"), Provenance.START),
        ((0, FORWARD, "h.0", 0, "input", "0"), Provenance.SEEN_BEFORE),
        ((0, FORWARD, "h.0.up", 0, "parameter", "weight"), Provenance.START),
        ((0, FORWARD, "h.0.up", 0, "input", "0"), Provenance.SEEN_BEFORE),
        ((0, FORWARD, "h.0.up", 0, "output", "out"), Provenance.CALL),
        ((0, FORWARD, "<root>", 0, "output", "out"), Provenance.SEEN_BEFORE),
        ((0, BACKWARD, "<root>", 0, "input", "out"), Provenance.CODE),
        ((0, BACKWARD, "h.0.up", 0, "output", "0"), Provenance.CALL),
        ((0, BACKWARD, "h.0.up.weight", 0, "gradient", "grad"), Provenance.GRADIENT),
        ((1, FORWARD, "<root>", 0, "input", "0"), Provenance.START),
        ((1, FORWARD, "h.0.up", 0, "parameter", "weight"), Provenance.WEIGHT),
    ],
    ids=str,
)
def test_how_rows_came_about(recorded: Judged, key: tuple[Any, ...], unit: Provenance) -> None:
    assert Provenance(recorded.sources.provenance[recorded.rows()[key]]) == unit


def test_a_result_came_from_what_its_call_was_given(recorded: Judged) -> None:
    own = (0, FORWARD, "h.0.up", 0)
    assert explains(recorded, (*own, "output", "out")) == {
        (*own, "input", "0"),
        (*own, "parameter", "weight"),
        (*own, "parameter", "bias"),
    }


def test_a_result_of_a_module_came_from_the_results_inside_it_too(recorded: Judged) -> None:
    inside = {(0, FORWARD, f"h.0.{name}", 0, "output", "out") for name in ("norm", "up", "act", "down")}
    assert explains(recorded, (0, FORWARD, "h.0", 0, "output", "out")) == inside | {
        (0, FORWARD, "h.0", 0, "input", "0")
    }


def test_a_gradient_came_from_what_arrived_and_from_what_the_forward_saw(recorded: Judged) -> None:
    forward, backward = (0, FORWARD, "h.1.up", 0), (0, BACKWARD, "h.1.up", 0)
    expected = {(*backward, "input", "out"), (*forward, "input", "0"), (*forward, "output", "out")}
    expected |= {(*forward, "parameter", name) for name in ("weight", "bias")}
    assert explains(recorded, (*backward, "output", "0")) == expected
    of_parameter = explains(recorded, (0, BACKWARD, "h.1.up.weight", 0, "gradient", "grad"))
    assert {(*backward, "input", "out"), (*forward, "input", "0")} <= of_parameter
    assert not any(site.startswith("h.0") for _, _, site, *_ in of_parameter)


def test_the_gradient_of_the_loss_came_from_what_the_model_gave(recorded: Judged) -> None:
    found = explains(recorded, (0, BACKWARD, "<root>", 0, "input", "out"))
    assert (0, FORWARD, "<root>", 0, "output", "out") in found
    assert not any(step for step, *_ in found)


def test_a_weight_came_from_itself_and_its_gradient(recorded: Judged) -> None:
    rows, sources = recorded.rows(), recorded.sources
    now, before = (rows[step, FORWARD, "h.0.up", 0, "parameter", "weight"] for step in (1, 0))
    assert sources.last_seen[now] == before
    assert sources.applied_gradient[now] == rows[0, BACKWARD, "h.0.up.weight", 0, "gradient", "grad"]
    assert explains(recorded, (1, FORWARD, "h.0.up", 0, "parameter", "weight")) == {
        (0, FORWARD, "h.0.up", 0, "parameter", "weight")
    }


def test_what_was_seen_before_is_what_it_was_there(recorded: Judged) -> None:
    rows, sources = recorded.rows(), recorded.sources
    made = rows[0, FORWARD, "h.0.up", 0, "output", "out"]
    assert sources.first_seen[rows[0, FORWARD, "h.0.act", 0, "input", "0"]] == made
    assert sources.first_seen[made] == -1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.out = nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.bn(x)) * 2)


def test_buffers_came_from_what_was_averaged_and_code_between_calls_from_results_before(tmp_path: Path) -> None:
    sides = train(tmp_path / "a", model=Normed, steps=2), train(tmp_path / "b", model=Normed, steps=2, noise=1e-7)
    judged = Judged(*map(astray.open, sides))
    now = (1, FORWARD, "bn", 0, "state", "running_mean")
    assert Provenance(judged.sources.provenance[judged.rows()[now]]) == Provenance.BUFFER
    assert {(0, FORWARD, "bn", 0, "input", "0"), (0, FORWARD, "bn", 0, "state", "running_mean")} <= explains(
        judged, now
    )
    between = (0, FORWARD, "out", 0, "input", "0")
    assert Provenance(judged.sources.provenance[judged.rows()[between]]) == Provenance.CODE
    assert explains(judged, between) == {
        (0, FORWARD, "bn", 0, "output", "out"),
        (0, FORWARD, "<root>", 0, "input", "0"),
    }


class Twice(nn.Module):
    """One layer that is called twice: its weight is recorded once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.layer(x), self.layer(x.flip(0))], -1))


def test_a_wrong_weight_explains_all_calls_of_its_module(tmp_path: Path) -> None:
    def plant(net: Any) -> None:
        net.layer.weight.data *= 1.01

    found = astray.compare(train(tmp_path / "a", model=Twice), train(tmp_path / "b", plant, model=Twice))
    assert (found.first.cause, found.first.site, found.others) == ("parameter", "layer", ())


def test_siblings_stand_at_the_same_place_of_other_layers(recorded: Judged) -> None:
    rows, (near, kin) = recorded.rows(), recorded.sources.families
    up = [rows[0, FORWARD, f"h.{number}.up", 0, "output", "out"] for number in (0, 1)]
    down, head = (rows[0, FORWARD, site, 0, "output", "out"] for site in ("h.0.down", "head"))
    assert near[up[0]] == near[up[1]] != near[down]
    assert len({int(kin[row]) for row in (*up, down, head)}) == 1
    assert kin[up[0]] != kin[rows[0, FORWARD, "h.0.norm", 0, "output", "out"]]
    assert kin[up[0]] != kin[rows[1, FORWARD, "h.0.up", 0, "output", "out"]]


# ---- planes ----------------------------------------------------------------------------------------------------------


def halved(net: Any) -> None:
    net.h[2].up.weight.register_hook(lambda gradient: gradient / 2)


def heavier(net: Any) -> None:
    net.h[1].down.weight.data *= 1.001


@pytest.mark.parametrize("noise", [0.0, 1e-6])
@pytest.mark.parametrize(
    "plant",
    [None, lambda net: scaled(net.h[2].act, 1.02), heavier, halved],
    ids=["right", "result", "weight", "gradient"],
)
def test_the_verdict_of_a_module_is_the_same_with_and_without_functions(
    tmp_path: Path, plant: Any, noise: float
) -> None:
    """And that of a function is the same with and without modules."""
    found = {}
    for name, level in (("module", "module"), ("function", "function"), ("both", ["module", "function"])):
        how: dict[str, Any] = {"level": level, "steps": 2}
        sides = train(tmp_path / f"{name}-a", **how), train(tmp_path / f"{name}-b", plant, noise=noise, **how)
        found[name] = astray.compare(*sides)
    for kind in ("module", "function"):
        alone, together = (_verdicts(found[name], kind) for name in (kind, "both"))
        assert len(alone.keys() & together.keys()) > 100
        assert {
            key: (alone[key], together[key]) for key in alone.keys() & together.keys() if alone[key] != together[key]
        } == {}
    named = {name: one.first and one.first.site.partition("/")[0] for name, one in found.items()}
    assert named["module"] == named["both"]


def _verdicts(found: Any, kind: str) -> dict[tuple[Any, ...], str]:
    """Of what both runs have: a call that only one has may be taken for another where there are fewer to compare."""
    names = ("step", "phase", "site", "call", "role", "path", "verdict")
    rows = zip(found.pairs["kind"], *(found.pairs[name] for name in names), strict=True)
    return {row[1:-1]: row[-1] for row in rows if row[0] == kind and "only in" not in row[-1]}
