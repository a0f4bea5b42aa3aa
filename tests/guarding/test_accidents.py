"""The guard names the same origin while the program runs as the recording does afterwards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import astray
from astray.nonfinite.step_rows import function_of
from guarding.training import guard_program, tripped
from nonfinite import accidents
from nonfinite.accidents import ACCIDENTS, PEACEFUL, Program, origin_line
from nonfinite.recording import LEVELS, layers, record

EVERY = [("function",), ("module", "function"), ("op",)]


@pytest.mark.parametrize("levels", EVERY, ids="+".join)
@pytest.mark.parametrize("program", [*ACCIDENTS, accidents.unfilled_memory], ids=lambda program: program.__name__)
def test_the_origin_is_the_one_of_a_recording(program: Program, levels: tuple[str, ...], tmp_path: Path) -> None:
    offline = record(tmp_path / "run", program, *levels).alarms()
    watch = guard_program(tmp_path / "guard", program, *levels)
    assert [trip.alarm.key for trip in watch.trips if trip.alarm] == [alarm.key for alarm in offline]
    assert [trip.alarm.kind for trip in watch.trips if trip.alarm] == [alarm.kind for alarm in offline]
    alarm = watch.trips[0].alarm
    assert alarm is not None
    if program in ACCIDENTS and levels != ("op",):
        found = (function_of(alarm.origin.type), alarm.origin.phase, alarm.kind.word)
        assert found == ACCIDENTS[program]
        assert alarm.origin.frame is not None
        assert alarm.origin.frame.line == origin_line(program)
    assert watch.trips[0].path is not None
    assert [one.key for one in astray.open(watch.trips[0].path).alarms()] == [one.key for one in offline]


@pytest.mark.parametrize("levels", EVERY, ids="+".join)
@pytest.mark.parametrize("program", PEACEFUL, ids=lambda program: program.__name__)
def test_what_is_intended_makes_no_alarm(program: Program, levels: tuple[str, ...], tmp_path: Path) -> None:
    watch = guard_program(tmp_path / "guard", program, *levels, steps=2)
    assert watch.trips == []
    assert not (tmp_path / "guard").exists()


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
def test_infinity_in_the_data_is_a_bad_input(levels: tuple[str, ...], tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    x[1, 2] = math.inf
    (trip,) = guard_program(tmp_path / "guard", layers(), *levels, steps=3, x=x, keep="tensors").trips
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.kind.word, trip.alarm.offenders[0].first) == (
        0,
        "bad input",
        astray.nonfinite.alarm.Element((1, 2), math.inf),
    )


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
def test_a_weight_that_was_loaded_so_is_one_alarm(levels: tuple[str, ...], tmp_path: Path) -> None:
    model = layers()
    model[2].weight.data[0, 3] = math.nan
    watch = guard_program(tmp_path / "guard", model, *levels, steps=3)
    (trip,) = watch.trips
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.kind.word, trip.alarm.origin.site.partition("/")[0]) == (0, "bad weight", "2")
    assert watch.summary.startswith("1 alarm in 3 steps, ")


def test_a_weight_that_turns_bad_between_steps_is_found_in_the_next(tmp_path: Path) -> None:
    model = layers()
    with astray.guard(model, path=tmp_path / "guard", on="warn") as watch:
        for step in range(4):
            if step == 2:
                model[2].weight.data[0, 0] = math.inf
            model(torch.ones(4, 4))
            watch.step()
    (trip,) = watch.trips
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.kind.word) == (2, "bad weight")


def test_an_update_that_spoils_a_weight_is_the_origin(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38)
    with (
        tripped() as caught,
        astray.guard(model, path=tmp_path / "guard", optimizer=["gradient", "weight"]),
    ):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 4), 100.0)).sum().backward()
            optimizer.step()
    alarm = caught.value.trip.alarm
    assert alarm is not None
    assert (alarm.step, alarm.origin.kind, alarm.origin.phase, alarm.origin.site) == (
        0, "optimizer", "update", "weight",
    )  # fmt: skip


def test_a_spoilt_weight_is_not_an_alarm_of_its_own(tmp_path: Path) -> None:
    """The update of the step that went wrong spoils the weights, and each step behind finds them so."""

    def once(lin: nn.Module, x: Tensor) -> Tensor:
        once.calls += 1  # type: ignore[attr-defined]
        h: Tensor = lin(x)
        return h.log() * 0 if once.calls == 2 else h  # type: ignore[attr-defined]

    once.calls = 0  # type: ignore[attr-defined]
    watch = guard_program(tmp_path / "guard", once, "module", "function", steps=5)
    (trip,) = watch.trips
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.origin.site) == (1, "<root>/log")
