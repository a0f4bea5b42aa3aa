"""On a device measurements come late: the guard waits for none but those of the step before, unless it is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from astray.capture.pytorch import adapter
from astray.records import GENERATOR
from capture.simulated_device import SimulatedDeviceReader
from guarding.training import Net, batch, guarded, loss_of, steps_in, tripped


@pytest.fixture(autouse=True)
def _far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the CPU for a device."""
    monkeypatch.setattr(adapter, "TorchReader", SimulatedDeviceReader)


class Deep(nn.Module):
    """More tensors in a step than there are segments of tickets that are kept."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))
        self.bad, self.forwards = bad, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.forwards += 1
        return torch.log(x * 0) if self.forwards > self.bad else x


def test_the_program_is_ended_one_step_later_at_most_and_the_step_is_right(tmp_path: Path) -> None:
    begun: list[int] = []
    with tripped() as caught:
        guarded(Net(bad=[2]), tmp_path / "guard", level="function", between=lambda step, _: begun.append(step))
    trip = caught.value.trip
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.origin.site) == (2, "<root>/log")
    assert begun in ([0, 1, 2], [0, 1, 2, 3])
    assert trip.path is not None
    assert 2 in steps_in(astray.open(trip.path))


def test_what_the_last_step_shows_is_waited_for(tmp_path: Path) -> None:
    with tripped() as caught:
        guarded(Net(bad=[5]), tmp_path / "guard", 6)
    assert caught.value.trip.step == 5


def test_an_exact_guard_waits_for_every_tensor(tmp_path: Path) -> None:
    model = Net(bad=[2])
    with tripped() as caught:
        guarded(model, tmp_path / "guard", exact=True, level=["module", "function"])
    assert caught.value.trip.alarm is not None
    assert (model.forwards, caught.value.trip.alarm.origin.site) == (2, "<root>/log")


def test_an_exact_guard_loses_no_measurement(tmp_path: Path) -> None:
    model, asked = Deep(bad=1), {"exact": True, "level": "function", "path": tmp_path / "guard"}
    with tripped() as caught, astray.guard(model, **asked) as guard:  # type: ignore[arg-type]
        for step in range(3):
            loss_of(model, batch(step))
            guard.step()
    run = astray.open(caught.value.trip.path or "")
    tensors = run.ranks[0].tensors
    assert len(tensors) > 200
    assert tensors.valid("count").all()
    assert tensors.valid("fingerprint").all()
    assert {note for note in tensors["note"] if note} == set()


def test_the_rows_of_an_exact_guard_are_those_of_a_recording(tmp_path: Path) -> None:
    def rows(run: astray.Run) -> list[Any]:
        tensors = run.ranks[0].tensors
        rows = [row for row, path in enumerate(tensors["path"]) if path not in GENERATOR]  # kept with values alone
        return [
            [tensors[name][row] for row in rows]
            for name in ("role", "path", "min", "l2", "nan", "inf", "count", "fingerprint")
        ]

    model = Net(bad=[0])
    with tripped() as caught, astray.guard(model, exact=True, level="function", path=tmp_path / "guard"):
        model(batch(0))
    other = Net(bad=[0])
    with astray.record(tmp_path / "run", other, level="function"):
        other(batch(0))
    watched, recorded = rows(astray.open(caught.value.trip.path or "")), rows(astray.open(tmp_path / "run"))
    length = len(watched[0])
    assert length > 5
    for column, whole in zip(watched, recorded, strict=True):
        assert str(column) == str(whole[:length])  # as text: NaN is not equal to itself
