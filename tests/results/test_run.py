"""A run as users hold it: a view of what `store` has read, with what is found by looking at it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import astray
from astray.results.run import CheckpointRun, Run
from astray.store import CheckpointData, RunData, open_run
from record_builders import Builder


def recorded(path: Path, value: float = 1.0) -> Path:
    run = Builder(str(path))
    run.tensor(run.call("net"), "output", "", np.array([value, 2.0]))
    astray.convert(run.run, path, to="astray")
    return path


def test_open_gives_a_run_that_is_one_for_the_rooms_below_too(tmp_path: Path) -> None:
    run = astray.open(recorded(tmp_path / "a"))
    assert type(run) is astray.Run
    assert isinstance(run, RunData)
    assert repr(run).startswith(f"<Run {tmp_path / 'a'}: ")


def test_it_shares_what_was_read(tmp_path: Path) -> None:
    data = open_run(recorded(tmp_path / "a"))
    table = data.ranks[0].tensors
    run = Run.of(data)
    assert run.ranks[0].tensors is table
    assert (run.path, run.info, run.problems, run.steps) == (data.path, data.info, data.problems, data.steps)
    assert Run.of(run) is run


def test_it_is_looked_at(tmp_path: Path) -> None:
    run = astray.open(recorded(tmp_path / "a", float("nan")))
    assert [alarm.origin.site for alarm in run.alarms()] == ["net"]
    assert "1 non-finite" in repr(run.risk())
    assert len(run.with_ranks(dict(run.ranks)).alarms()) == 1


def test_a_checkpoint_is_both_a_run_and_a_checkpoint(tmp_path: Path) -> None:
    save_file({"t": torch.ones(2)}, tmp_path / "x.safetensors")
    run = astray.open(tmp_path / "x.safetensors")
    assert type(run) is CheckpointRun
    assert isinstance(run, astray.Run)
    assert isinstance(run, CheckpointData)
    assert repr(run) == f"<CheckpointRun {tmp_path / 'x.safetensors'}: safetensors, 1 tensor, 8 bytes>"
    assert run.checkpoint["t"].shape == (2,)
    assert "calm" in repr(run.risk(what_if="float16"))
