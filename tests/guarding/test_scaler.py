"""A GradScaler throws infinite gradients away, which is its task and no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

import astray
from guarding.training import Halved, hooks_of, train_scaled, tripped

LEVELS = ("module", "function", "op", ["module", "function"])
TOO_LARGE = 2.0**17  # this and its half overflow float16, in two steps


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_what_it_skips_is_counted_and_no_alarm(level: Any, exact: bool, tmp_path: Path) -> None:
    model, bare = Halved(), Halved()
    with astray.guard(model, path=tmp_path / "guard", level=level, exact=exact) as guard:
        losses = train_scaled(model, TOO_LARGE)
    assert guard.trips == []
    assert guard.summary == "no alarm in 5 steps, 2 updates skipped by a GradScaler"
    assert not (tmp_path / "guard").exists()
    assert losses == train_scaled(bare, TOO_LARGE)
    assert torch.equal(model.lin.weight, bare.lin.weight)
    ours = str(Path(astray.__file__).parent)
    assert not GradScaler.step.__code__.co_filename.startswith(ours)
    assert not GradScaler.scale.__code__.co_filename.startswith(ours)


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_a_forward_that_goes_wrong_beside_it_trips(level: Any, exact: bool, tmp_path: Path) -> None:
    model = Halved(bad=1)
    with (
        tripped() as caught,
        astray.guard(model, path=tmp_path / "guard", level=level, exact=exact) as guard,
    ):
        train_scaled(model, TOO_LARGE)
    alarm = caught.value.trip.alarm
    assert alarm is not None
    assert (alarm.step, alarm.origin.phase, alarm.origin.site.split("/")[0]) == (1, "forward", "<root>")
    assert guard.summary.endswith("in 2 steps, 1 update skipped by a GradScaler")
    assert guard.trips[0] is caught.value.trip  # ops also show the scaled gradients that overflowed, behind it
    assert hooks_of(model) == 0


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("level", ["function", "op", ["module", "function"]], ids=str)
def test_a_derivative_that_is_none_trips_though_the_update_is_skipped(level: Any, exact: bool, tmp_path: Path) -> None:
    model = Halved(bad=3, how="backward")
    with (
        tripped() as caught,
        astray.guard(model, path=tmp_path / "guard", level=level, exact=exact),
    ):
        train_scaled(model, TOO_LARGE)
    alarm = caught.value.trip.alarm
    assert alarm is not None
    assert (alarm.step, alarm.origin.phase) == (3, "backward")
    assert alarm.kind.word in ("sqrt at zero", "division by zero")


def test_updates_that_are_skipped_without_end_trip_in_the_end(tmp_path: Path) -> None:
    """Modules alone do not show why gradients are bad; but a smaller scale should have helped by then."""

    class Always(Halved):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(self.lin(x) * 0)

    model = Always()
    with tripped("has skipped 20 updates in a row") as caught, astray.guard(model, path=tmp_path / "guard"):
        train_scaled(model, 2.0**10, steps=30)
    assert caught.value.trip.step == 19


def test_the_same_gradients_without_a_scaler_trip(tmp_path: Path) -> None:
    model = Halved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        (model(torch.ones(4, 4)).sum() * TOO_LARGE).backward()
        optimizer.step()
    assert caught.value.trip.alarm is not None
    assert caught.value.trip.alarm.origin.phase == "backward"


def test_a_scaler_that_is_off_hides_nothing(tmp_path: Path) -> None:
    model = Halved(bad=1, how="backward")
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        train_scaled(model, TOO_LARGE, enabled=False)
    assert caught.value.trip.step == 1
