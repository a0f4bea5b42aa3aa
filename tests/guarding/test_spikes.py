"""Numbers out of all proportion, conditions of the user's, and losses that the guard is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from astray.guarding.step_monitor import LEAST, SpikeDetector
from guarding.training import Net, batch, guarded, loss_of, steps_in, train, tripped


def large_at(*steps: int) -> Any:
    return lambda step: batch(step) * (1000 if step in steps else 1)


class WithLoss(nn.Module):
    """Returns its loss, and beside it something that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": out.square().mean(), "out": out}


def test_a_number_stands_out_when_it_is_so_many_times_the_median() -> None:
    spikes = SpikeDetector(10)
    assert [spikes.usual_if_spike(value) for value in [1.0] * (LEAST - 1)] == [None] * (LEAST - 1)
    assert spikes.usual_if_spike(1e9) is None  # too few before it
    assert spikes.usual_if_spike(10.0) is None  # as many times, not more
    assert spikes.usual_if_spike(10.1) == 1.0
    assert spikes.usual_if_spike(-10.1) == 1.0
    assert [spikes.usual_if_spike(1e3) for _ in range(100)] == [1.0] * 100  # and is never taken for normal
    assert spikes.usual_if_spike(math.nan) is spikes.usual_if_spike(math.inf) is None
    zeros = SpikeDetector(10)
    assert [zeros.usual_if_spike(0.0) for _ in range(20)] == [None] * 20
    assert zeros.usual_if_spike(1.0) is None  # nothing is many times zero


def test_one_batch_out_of_twenty_is_a_spike_of_the_gradients(tmp_path: Path) -> None:
    model = Net()
    with tripped() as caught:
        guarded(model, tmp_path / "guard", 30, spike=50, x=large_at(20))
    trip = caught.value.trip
    assert (trip.step, trip.what, trip.alarm) == (20, "spike", None)
    assert trip.path == tmp_path / "guard" / "step20-spike"
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients))
    assert trip.text.startswith(f"✗ The gradients of step 20 have a norm of {norm:.4g}, ")
    assert steps_in(astray.open(trip.path)) == [16, 17, 18, 19, 20]


def test_calm_trainings_have_none(tmp_path: Path) -> None:
    assert guarded(Net(), tmp_path / "guard", 40, spike=50).summary == "no alarm in 40 steps"


def test_without_being_asked_for_a_spike_is_nothing(tmp_path: Path) -> None:
    assert guarded(Net(), tmp_path / "guard", 21, x=large_at(20)).trips == []


def test_the_loss_that_a_module_returns_is_followed(tmp_path: Path) -> None:
    model = WithLoss()
    with (
        torch.no_grad(),
        tripped() as caught,
        astray.guard(model, path=tmp_path / "guard", spike=50) as guard,
    ):
        for step in range(30):
            loss = model(large_at(20)(step))["loss"]
            guard.step()
    trip = caught.value.trip
    assert (trip.step, trip.what) == (20, "spike")
    assert trip.text.startswith(f"✗ The output of <root> (out.loss) of step 20 is {loss:.4g}, ")


def test_a_loss_that_is_told_is_followed(tmp_path: Path) -> None:
    told: list[Tensor] = []

    def tell(step: int, guard: astray.Guard) -> None:
        told.append(torch.tensor(3.0 if step != 20 else -400.0))
        guard.loss(told[-1])

    with tripped() as caught:
        guarded(Net(), tmp_path / "guard", 30, spike=50, between=tell)
    trip = caught.value.trip
    assert (trip.step, trip.what) == (20, "spike")
    assert trip.text.startswith("✗ The loss of step 20 is -400, 133 times the usual 3. ")


def test_a_loss_that_is_not_finite_trips_when_nothing_recorded_shows_why(tmp_path: Path) -> None:
    model = Net()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard") as guard:
        for step in range(6):
            with torch.no_grad():
                loss = loss_of(model, batch(step))
            guard.loss(loss.item() if step < 2 else math.nan)
            guard.step()
    trip = caught.value.trip
    assert (trip.step, trip.what, trip.alarm) == (2, "non-finite", None)
    assert trip.text == "✗ The loss of step 2 is nan, and nothing that was recorded shows why."


def test_a_loss_that_is_not_finite_is_not_a_second_trip(tmp_path: Path) -> None:
    model = Net(bad=[2])
    with astray.guard(model, path=tmp_path / "guard", on="warn", level="function") as guard:
        train(model, guard=guard, between=lambda step, _: guard.loss(math.nan if step == 2 else 1.0))
    (trip,) = guard.trips
    assert trip.alarm is not None
    assert trip.alarm.origin.site == "<root>/log"


def test_a_loss_told_after_the_last_step_is_still_heard(tmp_path: Path) -> None:
    with tripped("The loss of step 1 is inf"), astray.guard(Net(), path=tmp_path / "guard") as guard:
        guard.step()
        guard.loss(math.inf)


def test_a_condition_is_given_the_rows_of_each_step(tmp_path: Path) -> None:
    def absurd(rows: Any) -> str | None:
        largest = rows.tensors.numbers("absmax").max()
        return f"something reaches {largest:.0f}" if largest > 100 else None

    with tripped() as caught:
        guarded(Net(), tmp_path / "guard", when=absurd, x=large_at(3))
    trip = caught.value.trip
    assert (trip.step, trip.what) == (3, "condition")
    assert trip.text == f"✗ Step 3: something reaches {trip.text.split()[-1]}"


def test_a_condition_that_fails_does_not_end_the_program_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(rows: Any) -> str | None:
        if rows.summary.steps[0] in (1, 2):
            raise ZeroDivisionError("mine")
        return None

    guard = guarded(Net(), tmp_path / "guard", when=broken)
    assert guard.summary == "no alarm in 6 steps, 2 looks at a step failed"
    assert caplog.messages == [
        "The condition of the guard failed in step 1 (ZeroDivisionError: mine). The program goes on; the guard's "
        "summary counts how often it happens."
    ]


def test_a_condition_that_fails_hides_nothing(tmp_path: Path) -> None:
    with tripped() as caught:
        guarded(Net(bad=[1]), tmp_path / "guard", when=lambda rows: 1 / 0)
    assert caught.value.trip.what == "non-finite"
