"""What a guard does when something is wrong, and where it says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.guarding import Trip
from astray.guarding.trip import SnapshotFolder
from guarding.training import Net, batch, guarded, hooks_of, loss_of, steps_in, train, tripped

LEVELS = {
    "module": ("<root>", "unknown"),
    "function": ("<root>/log", "log of zero"),
    "op": ("<root>/aten.log", "log of zero"),
    ("module", "function"): ("<root>/log", "log of zero"),
    ("module", "function", "op"): ("<root>/aten.log", "log of zero"),
}


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_the_step_that_goes_wrong_is_the_one_that_raises(level: Any, tmp_path: Path) -> None:
    model = Net(bad=[4])
    begun: list[int] = []
    with tripped() as caught, astray.guard(model, level=level, path=tmp_path / "guard", remember=3):
        train(model, between=lambda step, _: begun.append(step))
    assert begun == [0, 1, 2, 3, 4]
    trip = caught.value.trip
    assert (trip.step, trip.rank, trip.what, trip.path) == (4, 0, "non-finite", tmp_path / "guard" / "step4-non-finite")
    assert trip.alarm is not None
    assert (trip.alarm.origin.site, trip.alarm.kind.word) == LEVELS[level]
    assert str(caught.value) == str(trip)
    assert str(trip).endswith(f"astray show {trip.path} --alarms")

    run = astray.open(trip.path)
    assert steps_in(run) == [2, 3, 4]
    (alarm,) = run.alarms()
    assert (alarm.key, alarm.step) == (trip.alarm.key, 4)
    assert run.info.flight is not None
    assert run.info.flight.why == trip.text.partition("\n")[0].lstrip("✗ ")
    assert hooks_of(model) == 0


def test_the_error_comes_out_of_the_optimizers_step(tmp_path: Path) -> None:
    model = Net(bad=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with astray.guard(model, path=tmp_path / "guard"):
        loss_of(model, batch(0)).backward()
        with tripped():
            optimizer.step()
    assert hooks_of(model) == 0


def test_a_program_that_catches_the_error_is_told_of_the_next_by_the_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with astray.guard(model, level="function", path=tmp_path / "guard") as guard:
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step), at=step).sum().backward()
            if step == 0:
                with tripped():
                    optimizer.step()
                for parameter in model.parameters():
                    parameter.data.fill_(1.0)
            else:
                optimizer.step()
    assert [trip.alarm.origin.site for trip in guard.trips if trip.alarm] == ["<root>/log", "<root>/reciprocal"]
    assert [record.getMessage() for record in caplog.records] == [str(guard.trips[1])]


class Twice(nn.Module):
    """Two accidents, one in each step or both in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, at: int | None = None) -> torch.Tensor:
        h = self.first(x)
        zero = h * 0
        if at in (None, 0):
            h = h + torch.log(zero)
        return h + torch.reciprocal(zero) if at in (None, 1) else h


def test_a_warning_is_given_once_for_each_origin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net(bad=[2, 3, 4])
    guard = guarded(model, tmp_path / "guard", on="warn", level="function")
    (trip,) = guard.trips
    assert [(record.levelno, record.name) for record in caplog.records] == [(logging.WARNING, "astray")]
    assert caplog.messages == [str(trip)]
    assert (trip.step, [path.name for path in (tmp_path / "guard").iterdir()]) == (2, ["step2-non-finite"])
    # Steps 3 and 4 log zeros again, and find the weights of both layers spoilt, as step 5 does.
    assert guard.summary.startswith("1 alarm in 6 steps, ")
    assert guard.summary.endswith(" repetitions of an alarm")


def test_two_origins_in_one_step_share_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Twice()
    guard = guarded(model, tmp_path / "guard", 1, on="warn", level="function")
    assert [trip.alarm.origin.site for trip in guard.trips] == ["<root>/log", "<root>/reciprocal"]
    assert {trip.path for trip in guard.trips} == {tmp_path / "guard" / "step0-non-finite"}
    assert caplog.messages == [str(trip) for trip in guard.trips]


def test_a_function_is_given_each_trip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Trip] = []
    guard = guarded(Net(bad=[1]), tmp_path / "guard", on=told.append)
    assert told == guard.trips
    assert [(trip.step, trip.path) for trip in told] == [(1, tmp_path / "guard" / "step1-non-finite")]
    assert astray.open(told[0].path).alarms()[0].step == 1
    assert caplog.messages == []


def test_what_the_function_raises_ends_the_program(tmp_path: Path) -> None:
    def refuse(trip: Trip) -> None:
        raise LookupError(f"step {trip.step}")

    with pytest.raises(LookupError, match="step 1"):
        guarded(Net(bad=[1]), tmp_path / "guard", on=refuse)


def test_no_more_than_a_few_runs_are_written(tmp_path: Path) -> None:
    guard = guarded(Net(), tmp_path / "guard", 8, on="warn", when=lambda rows: f"it is step {rows.summary.steps[0]}")
    assert [trip.step for trip in guard.trips] == list(range(8))
    written = [f"step{step}-condition" for step in range(5)]
    assert sorted(path.name for path in (tmp_path / "guard").iterdir()) == written
    assert [trip.path and trip.path.name for trip in guard.trips] == [*written, None, None, None]


def test_a_folder_that_cannot_be_written_is_said_and_the_error_comes_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "guard"
    with tripped() as caught:
        guarded(Net(bad=[1]), path, between=lambda step, _: path.write_text("taken") if step == 0 else None)
    assert caught.value.trip.path is None
    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0]


def test_nothing_wrong_leaves_nothing(tmp_path: Path) -> None:
    model = Net()
    guard = guarded(model, tmp_path / "guard")
    assert guard.summary == "no alarm in 6 steps"
    assert guard.trips == []
    assert list(tmp_path.iterdir()) == []
    assert hooks_of(model) == 0


def test_stopping_twice_does_no_harm(tmp_path: Path) -> None:
    model = Net(bad=[0])
    guard = astray.guard(model, path=tmp_path / "guard")
    model(batch(0))
    with tripped():
        guard.stop()
    guard.stop()
    assert len(guard.trips) == 1


def test_a_rank_joins_a_run_once_the_rank_that_tripped_has_begun_it(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "guard", rank=0, world_size=2)
    run = tmp_path / "guard" / "step1-non-finite"
    run.mkdir(parents=True)
    assert folder.runs_of_others() == []  # else both would write run.json, and the reason of the last one would stay
    (run / "run.json").write_text("{}")
    assert folder.runs_of_others() == [run]
    assert folder.runs_of_others() == []
