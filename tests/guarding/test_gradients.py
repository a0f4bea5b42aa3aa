"""A guard of modules reads the gradients of parameters alone while nothing is wrong, then those of all calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import astray
from astray.capture.pytorch import adapter
from astray.guarding.guard import CALL_GRADIENTS
from astray.guarding.step_monitor import READS_ALL_GRADIENTS, SUSPICIOUS
from capture.simulated_device import SimulatedDeviceReader
from guarding.training import Halved, Net, batch, guard_program, guarded, hooks_of, train_scaled, tripped
from nonfinite import accidents
from nonfinite.accidents import ACCIDENTS, PEACEFUL, Program


class Root(nn.Module):
    """The root of zeros, whose derivative is infinite, when it is told to."""

    bad = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0) if self.bad else x


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.tanh, self.b, self.root = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Root()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.root(self.b(self.tanh(self.a(x))))
        return result


class Deep(nn.Module):
    """Layers around a root, inside and outside of a module."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inner, self.after, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        h = checkpoint(self.inner, h, use_reentrant=False) if self.checkpoints else self.inner(h)
        result: Tensor = self.last(self.after(h))
        return result


def train(model: Deep, bad: tuple[int, ...], steps: int = 8, micros: int = 1) -> list[Tensor]:
    """Trains, leaving out the updates of steps whose gradients are bad, as a careful program does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            model.inner.root.bad = step in bad and micro == micros - 1
            model(batch(step)).square().mean().backward()
        if step in bad:
            optimizer.zero_grad()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def backward_sites(path: Path | None, step: int) -> set[str]:
    """The calls of which a run has gradients, in a step."""
    assert path is not None
    calls = astray.open(path).ranks[0].calls
    rows = zip(calls["step"], calls["phase"], calls["kind"], calls["site"], strict=True)
    return {site for at, phase, kind, site in rows if (at, phase, kind) == (step, "backward", "module")}


BOUNDS = ["after", "inner.root", "inner.b", "inner", "<root>"]


def test_what_is_born_in_the_backward_is_bounded_first_and_named_when_it_happens_again(tmp_path: Path) -> None:
    model = Deep()
    with astray.guard(model, path=tmp_path / "guard", on="warn") as guard:
        train(model, bad=(2, 5))
    first, second = (trip.alarm for trip in guard.trips)
    assert first is not None
    assert second is not None
    assert (first.step, first.origin.site, first.origin.phase) == (2, "inner.b.bias", "backward")
    assert [one.site for one in first.candidates] == BOUNDS
    assert "that of after.weight, which came before it, is finite" in first.kind.text
    assert guard.trips[0].headline == "NaN from step 2, backward, on the way to the gradient of inner.b.bias"
    assert READS_ALL_GRADIENTS in guard.trips[0].text
    assert (second.step, second.origin.site, second.origin.phase) == (5, "inner.root", "backward")
    assert second.candidates == ()
    assert backward_sites(guard.trips[0].path, 2) == set()
    assert "inner.root" in backward_sites(guard.trips[1].path, 3)


def test_a_dump_tells_the_same_and_what_was_not_read(tmp_path: Path) -> None:
    model = Deep()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard"):
        train(model, bad=(2,))
    trip = caught.value.trip
    assert trip.path is not None
    assert READS_ALL_GRADIENTS not in trip.text
    run = astray.open(trip.path)
    (alarm,) = run.alarms()
    assert trip.alarm is not None
    assert (alarm.key, alarm.candidates, alarm.kind) == (trip.alarm.key, trip.alarm.candidates, trip.alarm.kind)
    end = run.ranks[0].end
    assert end is not None
    assert [one.what for one in end.missed] == [CALL_GRADIENTS]


def test_with_all_gradients_the_call_is_named_at_once(tmp_path: Path) -> None:
    model = Deep()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", gradients="all"):
        train(model, bad=(2,))
    alarm, path = caught.value.trip.alarm, caught.value.trip.path
    assert alarm is not None
    assert (alarm.step, alarm.origin.site, alarm.candidates) == (2, "inner.root", ())
    assert path is not None
    end = astray.open(path).ranks[0].end
    assert end is not None
    assert end.missed == []


@pytest.mark.parametrize(
    "settings", [{"level": "function"}, {"level": ["module", "function"]}, {"exact": True}], ids=str
)
def test_who_asks_for_more_has_all_gradients_read(settings: dict[str, Any], tmp_path: Path) -> None:
    model = Deep()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", **settings):
        train(model, bad=(2,))
    alarm = caught.value.trip.alarm
    assert alarm is not None
    assert (alarm.origin.site.partition("/")[0], alarm.candidates) == ("inner.root", ())


def test_a_condition_is_given_the_gradients_of_calls(tmp_path: Path) -> None:
    phases = set()

    def look(rows: Any) -> None:
        phases.update(zip(rows.calls["kind"], rows.calls["phase"], strict=True))

    guarded(Net(), tmp_path / "guard", when=look)
    assert ("module", "backward") in phases
    phases.clear()
    guarded(Net(), tmp_path / "less", when=look, gradients="parameters")
    assert ("module", "backward") not in phases
    assert ("parameter", "backward") in phases


@pytest.mark.parametrize("program", [*ACCIDENTS, accidents.unfilled_memory], ids=lambda program: program.__name__)
def test_the_origin_is_the_same_or_one_of_the_candidates(program: Program, tmp_path: Path) -> None:
    less = guard_program(tmp_path / "less", program, "module").trips
    whole = guard_program(tmp_path / "all", program, "module", gradients="all").trips
    assert [trip.step for trip in less] == [trip.step for trip in whole]
    for one, other in zip(less, whole, strict=True):
        assert one.alarm is not None
        assert other.alarm is not None
        if one.alarm.candidates:
            assert other.alarm.origin.phase == "backward"
            assert other.alarm.origin.site in {call.site for call in one.alarm.candidates}
        else:
            assert one.alarm.key == other.alarm.key


@pytest.mark.parametrize("program", PEACEFUL, ids=lambda program: program.__name__)
def test_what_is_intended_makes_no_alarm(program: Program, tmp_path: Path) -> None:
    assert guard_program(tmp_path / "guard", program, "module", steps=2).trips == []


def test_a_bad_weight_is_named_though_only_gradients_before_it_are_bad(tmp_path: Path) -> None:
    """The gradient of the weight itself is finite; what its module sends on is not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight.data[0, 3] = math.nan
    (trip,) = guard_program(tmp_path / "guard", model, "module").trips
    assert trip.alarm is not None
    assert (trip.alarm.kind.word, trip.alarm.origin.site, trip.alarm.offenders[0].path) == ("bad weight", "2", "weight")


def test_an_output_that_overflows_is_named_at_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).half()
    nn.init.constant_(model[1].weight, 6e4)
    (trip,) = guard_program(tmp_path / "guard", model, "module", x=torch.full((4, 4), 100.0).half()).trips
    assert trip.alarm is not None
    assert (trip.alarm.origin.site, trip.alarm.origin.phase, trip.alarm.kind.word) == ("1", "forward", "overflow")


def test_a_loss_outside_of_modules_is_said_to_be_possible(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with tripped("the loss may have brought it") as caught, astray.guard(model, path=tmp_path / "guard") as guard:
        (model(torch.ones(2, 4)) * 0).sqrt().sum().backward()
        guard.step()
    assert caught.value.trip.alarm is not None
    assert [one.site for one in caught.value.trip.alarm.candidates] == ["<root>"]


@pytest.mark.parametrize("make", [Deep, lambda: Deep(checkpoints=True)], ids=["", "checkpointed"])
@pytest.mark.parametrize("micros", [1, 3])
def test_the_micro_step_and_checkpointing_change_nothing(make: Callable[[], Deep], micros: int, tmp_path: Path) -> None:
    alarms = []
    for gradients in ("parameters", "all"):
        model = make()
        with (
            tripped() as caught,
            astray.guard(model, path=tmp_path / gradients, gradients=gradients),  # type: ignore[arg-type]
        ):
            train(model, bad=(1,), micros=micros)
        alarms.append(caught.value.trip.alarm)
    less, whole = alarms
    assert less is not None
    assert whole is not None
    assert (less.step, less.micro) == (whole.step, whole.micro) == (1, micros - 1)
    assert [one.site for one in less.candidates] == BOUNDS
    assert whole.origin.site == "inner.root"


def test_on_a_device_the_next_but_one_step_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "TorchReader", SimulatedDeviceReader)
    model = Deep()
    with astray.guard(model, path=tmp_path / "guard", on="warn") as guard:
        train(model, bad=(2, 5))
    sites = [(trip.step, trip.alarm.origin.site) for trip in guard.trips if trip.alarm]
    assert sites == [(2, "inner.b.bias"), (5, "inner.root")]


@pytest.mark.parametrize("gradients", ["parameters", "all"])
def test_no_bit_is_changed_and_no_hook_stays(gradients: Any, tmp_path: Path) -> None:
    model = Deep()
    with astray.guard(model, path=tmp_path / "guard", on="warn", gradients=gradients):
        watched = train(model, bad=(2, 5))
    assert hooks_of(model) == 0
    for one, other in zip(watched, train(Deep(), bad=(2, 5)), strict=True):
        assert torch.equal(one, other)


def test_updates_that_a_scaler_skips_are_looked_into_before_they_are_an_alarm(tmp_path: Path) -> None:
    class Always(Halved):
        def __init__(self) -> None:
            super().__init__()
            self.root = Root()
            self.root.bad = True

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.root(self.lin(x))
            return result

    model = Always()
    with tripped("20 updates in a row") as caught, astray.guard(model, path=tmp_path / "guard", remember=20):
        train_scaled(model, 2.0**10, steps=30)
    alarm, path = caught.value.trip.alarm, caught.value.trip.path
    assert alarm is not None
    assert (alarm.step, alarm.origin.site, alarm.candidates) == (19, "root", ())
    assert backward_sites(path, SUSPICIOUS - 1) == set()
    assert "root" in backward_sites(path, SUSPICIOUS)


def test_a_single_update_that_a_scaler_skips_makes_nothing_more_to_read(tmp_path: Path) -> None:
    model, kinds = Halved(), set()

    def look(rows: Any) -> None:
        kinds.update(zip(rows.calls["kind"], rows.calls["phase"], strict=True))

    with astray.guard(model, path=tmp_path / "guard", gradients="parameters", when=look) as guard:
        train_scaled(model, 2.0**17)
    assert guard.summary == "no alarm in 5 steps, 2 updates skipped by a GradScaler"
    assert ("module", "backward") not in kinds


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(astray.errors.RecordError, match="It is 'parameters' or 'all'"):
        astray.guard(Net(), gradients="some")  # type: ignore[arg-type]
    with pytest.raises(astray.errors.RecordError, match="exact=True looks at every tensor"):
        astray.guard(Net(), gradients="parameters", exact=True)
