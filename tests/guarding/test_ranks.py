"""When one rank of a program trips, all write their last steps into one run, and end."""

from __future__ import annotations

from pathlib import Path

import pytest

import astray
from guarding.training import steps_in
from integration.distributed.launching import torchrun

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def one_run(folder: Path) -> astray.Run:
    """The only run there is, of both ranks."""
    (path,) = folder.iterdir()
    run = astray.open(path)
    assert (path.name, sorted(run.ranks)) == ("step3-non-finite", [0, 1])
    assert all(rank.end is not None and rank.end.complete for rank in run.ranks.values())
    assert astray.compare(run, run).same
    return run


def test_a_rank_hears_of_the_other_at_the_end_of_its_step(tmp_path: Path) -> None:
    output = torchrun(HERE / "ranks.py", tmp_path / "guard", "alone")
    assert "rank 1 tripped in step 3: non-finite" in output
    assert "rank 0 tripped in step 4: rank" in output
    run = one_run(tmp_path / "guard")
    assert steps_in(run, 1) == [0, 1, 2, 3]
    assert steps_in(run, 0) == [0, 1, 2, 3, 4]
    (alarm,) = run.alarms()
    assert (alarm.rank, alarm.ranks, alarm.step, alarm.origin.site) == (1, (1,), 3, "<root>/log")


def test_nan_that_gradients_carry_over_trips_both_in_one_step(tmp_path: Path) -> None:
    output = torchrun(HERE / "ranks.py", tmp_path / "guard", "ddp")
    assert "rank 1 tripped in step 3: non-finite" in output
    assert "rank 0 tripped in step 3: " in output
    run = one_run(tmp_path / "guard")
    assert steps_in(run, 0) == steps_in(run, 1)
    (alarm,) = run.alarms()
    assert (alarm.rank, alarm.ranks, alarm.step, alarm.origin.site) == (1, (0, 1), 3, "<root>/log")


def test_what_is_born_in_the_backward_of_one_rank_is_bounded_there(tmp_path: Path) -> None:
    output = torchrun(HERE / "ranks.py", tmp_path / "guard", "backward")
    assert "rank 1 tripped in step 3: non-finite" in output
    alarm = astray.open(tmp_path / "guard" / "step3-non-finite").alarms()[0]
    assert (alarm.rank, alarm.step, alarm.origin.site) == (1, 3, "first.bias")
    assert [one.site for one in alarm.candidates] == ["second", "first", "<root>"]


def test_a_rank_that_waits_for_one_that_is_gone_joins_its_run(tmp_path: Path) -> None:
    output = torchrun(HERE / "ranks.py", tmp_path / "guard", "waiting")
    path = tmp_path / "guard" / "step3-non-finite"
    assert "rank 1 tripped in step 3: non-finite" in output
    assert f"exception {path}" in output or "rank 0 tripped in step 3: rank" in output
    one_run(tmp_path / "guard")


def test_those_who_go_on_are_warned(tmp_path: Path) -> None:
    output = torchrun(HERE / "ranks.py", tmp_path / "guard", "warn")
    assert "rank 0 over" in output
    assert "rank 1 over" in output
    assert "✗ Another rank has tripped" in output
    assert output.count("✗ Infinity from step 3") == 1
    run = one_run(tmp_path / "guard")
    assert run.alarms()[0].rank == 1
