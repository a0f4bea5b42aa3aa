"""The guard of a recording: `guard=` of `astray.record`. What it finds is in the recording itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.guarding import Trip
from astray.guarding.recording_guard import RecordingGuard
from astray.store import FlightRecorder
from guarding.training import Net, batch, hooks_of, loss_of, steps_in, train, tripped
from integration.distributed.launching import torchrun

HERE = Path(__file__).parent


def recorded(
    path: Path, model: nn.Module, guard: Any, rounds: int = 6, x: Callable[[int], torch.Tensor] = batch, **asked: Any
) -> astray.Recorder:
    """The recorder of a training that was not stopped."""
    with astray.record(path, model, guard=guard, **asked) as rec:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(rounds):
            optimizer.zero_grad()
            loss_of(model, x(step)).backward()
            optimizer.step()
            rec.step()
    return rec


def end_of(path: Path, rank: int = 0) -> dict[str, Any]:
    end: dict[str, Any] = json.loads((path / f"rank{rank}" / "end.json").read_text())
    return end


@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_the_step_that_goes_wrong_raises_and_is_in_the_recording(level: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = Net(bad=[4])
    with tripped() as caught:
        recorded(path, model, "raise", level=level)
    trip = caught.value.trip
    assert (trip.step, trip.rank, trip.what, trip.path) == (4, 0, "non-finite", path)
    assert str(trip).endswith(f"All of it is in {path}: astray show {path} --alarms")
    assert end_of(path)["ended"] == f"a guard's alarm: {trip.headline}"
    run = astray.open(path)
    assert (run.complete, steps_in(run), run.info.flight) == (True, [0, 1, 2, 3, 4], None)
    (alarm,) = run.alarms()
    assert trip.alarm is not None
    assert (alarm.key, alarm.step) == (trip.alarm.key, 4)
    assert hooks_of(model) == 0


def test_everything_up_to_the_trip_can_be_read_when_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen: list[tuple[list[int], int, str | None]] = []

    def look(trip: Trip) -> None:
        assert trip.path is not None
        run = astray.open(trip.path)
        seen.append((run.steps, run.alarms()[0].step, run.alarms()[0].origin.site))

    rec = recorded(path, Net(bad=[2]), look, level="function")
    assert seen == [([0, 1, 2], 2, "<root>/log")]
    assert rec.guard is not None
    assert rec.guard.summary.startswith("1 alarm in 6 steps, ")
    assert steps_in(astray.open(path)) == list(range(6))
    assert end_of(path)["ended"] == "normally"


def test_a_warning_is_given_once_and_the_run_is_the_one_without_a_guard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rec = recorded(tmp_path / "run", Net(bad=[2, 3]), "warn", level=["module", "function"], keep="tensors")
    assert rec.guard is not None
    assert caplog.messages == [str(trip) for trip in rec.guard.trips]
    assert [trip.step for trip in rec.guard.trips] == [2]
    bare = recorded(tmp_path / "bare", Net(bad=[2, 3]), None, level=["module", "function"], keep="tensors")
    assert bare.guard is None
    assert astray.compare(tmp_path / "bare", tmp_path / "run", exact=True).same
    counts = ["steps", "calls", "tensors", "stacks", "values", "value_bytes", "missed"]
    assert [end_of(tmp_path / "run")[name] for name in counts] == [end_of(tmp_path / "bare")[name] for name in counts]


def test_values_that_are_on_their_way_to_the_disk_name_the_element(tmp_path: Path) -> None:
    with tripped("element \\[0, 0\\] of output is -inf"):
        recorded(tmp_path / "run", Net(bad=[1]), "raise", level="function", keep=["stats", "tensors"])


def test_nothing_wrong_is_a_recording_like_any_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rec = recorded(tmp_path / "run", Net(), {"on": "raise", "spike": 10})
    assert rec.guard is not None
    assert (rec.guard.summary, rec.guard.trips, caplog.messages) == ("no alarm in 6 steps", [], [])


def test_spikes_and_conditions(tmp_path: Path) -> None:
    def wild(step: int) -> torch.Tensor:
        return batch(step) * (1000 if step == 10 else 1)

    rec = recorded(tmp_path / "spike", Net(), {"on": "warn", "spike": 10}, 11, wild)
    assert rec.guard is not None
    (trip,) = rec.guard.trips
    assert (trip.step, trip.what, trip.look) == (10, "spike", f"astray show {tmp_path / 'spike'} --risk")

    def too_large(rows: Any) -> str | None:
        return "too large" if np.nanmax(rows.tensors.numbers("absmax")) > 100 else None

    with tripped("Step 10: too large"):
        recorded(tmp_path / "when", Net(), {"when": too_large}, 11, wild)


def test_a_loss_can_be_told(tmp_path: Path) -> None:
    with tripped("The loss of step 1 is nan") as caught, astray.record(tmp_path / "run", Net(), guard="raise") as rec:
        assert rec.guard is not None
        for loss in (1.0, float("nan")):
            rec.guard.loss(loss)
            rec.step()
    assert caught.value.trip.step == 1


def test_steps_that_are_not_recorded_are_not_looked_at(tmp_path: Path) -> None:
    rec = recorded(tmp_path / "before", Net(bad=[4]), "raise", steps="0:3")
    assert rec.guard is not None
    assert rec.guard.summary == "no alarm in 3 steps"
    with tripped("bad weight") as caught:
        recorded(tmp_path / "behind", Net(bad=[1]), "raise", steps="3:")
    assert caught.value.trip.step == 3


def test_a_pause_is_not_looked_at(tmp_path: Path) -> None:
    model = Net(bad=[1])
    with astray.record(tmp_path / "run", model, guard="raise") as rec, torch.no_grad():
        model(batch(0))
        rec.step()
        with rec.pause():
            model(batch(1))
        rec.step()
        model(batch(2))
        rec.step()
    assert rec.guard is not None
    assert rec.guard.summary == "no alarm in 2 steps"


def test_without_steps_it_is_looked_at_when_the_recording_ends(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = Net(bad=[1])
    with tripped() as caught, astray.record(path, model, guard="raise", level="function"):
        for step in range(3):
            model(batch(step))
    assert (caught.value.trip.step, caught.value.trip.path) == (0, path)
    assert end_of(path)["ended"] == "normally"
    assert hooks_of(model) == 0


def lose(_: torch.Tensor) -> None:
    raise LookupError("lost")


def test_a_program_that_goes_down_is_told_and_ends_by_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(bad=[0])
    rec = astray.record(tmp_path / "run", model, guard="raise", level="function")
    with pytest.raises(LookupError), rec:
        lose(model(batch(0)))
    assert rec.guard is not None
    assert caplog.messages == [str(rec.guard.trips[0])]
    assert end_of(tmp_path / "run")["ended"] == "LookupError: lost"


def test_a_program_that_catches_the_error_is_warned_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with astray.record(tmp_path / "run", Net(), guard={"when": lambda rows: "so it is"}) as rec:
        model = Net()
        with tripped():
            rec.save("x", model(batch(0)))
            rec.step()
        rec.save("x", model(batch(1)))
        rec.step()
    assert caplog.messages == [f"✗ Step 1: so it is\n\nAll of it is in {rec.path}: astray show {rec.path} --risk"]
    assert end_of(rec.path)["ended"] == "normally"


def test_updates_that_a_scaler_skips_are_counted(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with astray.record(tmp_path / "run", model, guard="raise") as rec:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(step)).square().sum() * 100).backward()
            scaler.step(optimizer)
            scaler.update()
            rec.step()
    assert rec.guard is not None
    assert "skipped by a GradScaler" in rec.guard.summary
    assert rec.guard.summary.startswith("no alarm in 4 steps, ")
    assert steps_in(astray.open(tmp_path / "run")) == [
        0,
        1,
        2,
        3,
    ]  # as many as were said, and not one by each optimizer


def test_a_step_too_large_to_be_held_is_looked_at_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astray.store.writing.run_writer.LISTENER_BYTES", 1 << 19)
    model = Net(bad=[2000])
    with tripped() as caught, astray.record(tmp_path / "run", model, guard="raise"), torch.no_grad():
        for step in range(4000):
            model(batch(step))
    assert caught.value.trip.alarm is not None
    assert caught.value.trip.alarm.micro == 2000
    assert len(astray.open(tmp_path / "run").ranks[0].calls) == 4000 * 3


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("x", {}, "on='x' is not something a guard can do. It is 'raise', 'warn', or a function."),
    (True, {}, "on=True is not something a guard can do. It is 'raise', 'warn', or a function."),
    ({"on": "x"}, {}, "on='x' is not something a guard can do. It is 'raise', 'warn', or a function."),
    ({"spike": 1}, {}, "spike=1 is not a factor. It is a number above 1: 10 trips at ten times the usual."),
    ({"when": 3}, {}, "when=3 cannot be called. It is a function of the rows of a step."),
    (
        {"exact": True},
        {},
        "exact=True is for astray.guard, which records into memory. The guard of a recording takes on, spike, when.",
    ),
    ({"spikes": 3}, {}, "spikes=3 is not an option of the guard of a recording. Did you mean 'spike'?"),
    (
        "raise",
        {"keep": "fingerprint"},
        "keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'.",
    ),
]


@pytest.mark.parametrize(("guard", "settings", "sentence"), REFUSED, ids=[str(one[:2]) for one in REFUSED])
def test_what_it_cannot_do_is_said_before_anything_is_touched(
    guard: Any, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    model = Net()
    with pytest.raises(astray.errors.RecordError) as refused:
        astray.record(tmp_path / "run", model, guard=guard, **settings)
    assert str(refused.value) == sentence
    assert (hooks_of(model), list(tmp_path.iterdir())) == (0, [])


def test_a_file_cannot_take_the_statistics_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tmp_path / "astray.yaml"
    config.write_text("keep: stats\n")
    model = Net(bad=[2])
    with tripped(), astray.record(tmp_path / "run", model, guard="raise", config=config) as rec:
        for step in range(4):
            model(batch(step))
            config.write_text("keep: fingerprint\n")
            rec.step()
    assert caplog.messages == ["keep='fingerprint' counts no NaN and no infinities. A guard needs keep='stats'."]


def test_a_recording_without_a_guard_has_no_watch_on_it(tmp_path: Path) -> None:
    model = Net(bad=[1])
    with astray.record(tmp_path / "run", model) as rec:
        train(model, 3)
    assert rec.guard is None
    assert [alarm.micro for alarm in astray.open(tmp_path / "run").alarms()][:1] == [1]


@pytest.mark.slow
def test_each_rank_tells_its_own(tmp_path: Path) -> None:
    output = torchrun(HERE / "recorded_ranks.py", tmp_path / "run")
    assert f"rank 1 tripped in step 3: non-finite in {tmp_path / 'run'}" in output
    assert "rank 0 no alarm in 5 steps" in output
    run = astray.open(tmp_path / "run")
    assert [steps_in(run, rank) for rank in (0, 1)] == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
    (alarm,) = run.alarms()
    assert (alarm.rank, alarm.step, alarm.origin.site) == (1, 3, "<root>/log")
    assert end_of(tmp_path / "run", 1)["ended"].startswith("a guard's alarm: Infinity from step 3")
    assert end_of(tmp_path / "run", 0)["ended"] == "normally"


def test_a_recorder_takes_the_same_words_as_record(tmp_path: Path) -> None:
    recorder = astray.Recorder(tmp_path / "run", Net(), guard={"on": "warn", "spike": 10})
    assert isinstance(recorder.guard, RecordingGuard)
    with pytest.raises(astray.errors.RecordError, match="A guard needs keep='stats'"):
        astray.Recorder(tmp_path / "run", Net(), guard="raise", keep="fingerprint")
    with pytest.raises(astray.errors.RecordError, match="Leave out one"):
        astray.Recorder(tmp_path / "run", Net(), guard="raise", writer=FlightRecorder)
