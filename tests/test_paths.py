"""A program that changes its folder, as Hydra does: relative paths stay relative to the first one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import astray
from astray.capture.settings import with_absolute_paths
from astray.compat.hooktools import Tracer
from astray.compat.msprobe import PrecisionDebugger
from astray.process import absolute, relative_to_cwd
from astray.store import open_run


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the program starts, and where it goes."""
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    return home, away


def train(model: torch.nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_a_path_is_absolute_and_is_shown_as_it_would_be_typed(folders: tuple[Path, Path]) -> None:
    home, away = folders
    path = absolute("runs/a")
    assert path == home / "runs" / "a"
    assert relative_to_cwd(path) == "runs/a"
    os.chdir(away)
    assert relative_to_cwd(path) == str(home / "runs" / "a")


def test_a_folder_that_is_gone_is_not_our_failure(folders: tuple[Path, Path]) -> None:
    home, _ = folders
    home.rmdir()
    assert absolute("runs/a") == Path("runs/a")
    assert relative_to_cwd(Path("/somewhere/else")) == "/somewhere/else"


@pytest.mark.parametrize("guard", [None, "warn"])
def test_a_recording_stays_where_it_began(folders: tuple[Path, Path], guard: str | None) -> None:
    home, away = folders
    model = torch.nn.Linear(3, 2)
    with astray.record("runs/a", model, keep="tensors", guard=guard) as recorder:
        model(torch.ones(2, 3)).sum().backward()
        recorder.step()
        os.chdir(away)
        model(torch.ones(2, 3)).sum().backward()
        recorder.step()
    assert not list(away.iterdir())
    assert recorder.path == home / "runs" / "a"
    run = open_run(recorder.path)
    assert run.complete
    assert len(run.steps) == 2


def test_a_guard_dumps_where_it_began(folders: tuple[Path, Path]) -> None:
    home, away = folders
    model = torch.nn.Linear(3, 2)
    with astray.guard(model, on="warn") as guard:
        os.chdir(away)
        model(torch.full((2, 3), float("nan")))
        guard.step()
    assert not list(away.iterdir())
    (trip,) = guard.trips
    assert trip.path is not None
    assert trip.path.is_relative_to(home / "astray-guard")
    assert open_run(trip.path).steps == [0]


def test_a_monitor_stays_where_it_began(folders: tuple[Path, Path]) -> None:
    home, away = folders
    model = torch.nn.Linear(3, 2)
    with astray.state.Monitor(model, every=1, path="runs/m") as monitor:
        os.chdir(away)
        train(model)
        assert len(monitor.series("update").steps) == 2
    assert not list(away.iterdir())
    assert open_run(home / "runs" / "m").complete


def test_a_debugger_dumps_where_it_began(folders: tuple[Path, Path]) -> None:
    home, away = folders
    (home / "config.json").write_text('{"task": "statistics", "dump_path": "dump", "level": "L0"}')
    model = torch.nn.Linear(3, 2)
    debugger = PrecisionDebugger("config.json", model=model)
    os.chdir(away)
    os.utime(home / "config.json", (1, 1))  # it is read again, from another folder
    for _ in range(2):
        debugger.start()
        model(torch.ones(2, 3)).sum().backward()
        debugger.stop()
        debugger.step()
    debugger.close()
    assert not list(away.iterdir())
    assert sorted(entry.name for entry in (home / "dump").iterdir()) == ["step0", "step1"]


def test_a_tracer_writes_where_it_began(folders: tuple[Path, Path]) -> None:
    home, away = folders
    model = torch.nn.Linear(3, 2)
    tracer = Tracer({"log_dir": "logs", "trace_mode": 3}, model)
    os.chdir(away)
    tracer.trace(0, 0)
    model(torch.ones(2, 3)).sum().backward()
    tracer.untrace()
    assert not list(away.iterdir())
    assert any(entry.is_file() for entry in (home / "logs").rglob("*"))


def test_files_of_settings_are_absolute_for_later(folders: tuple[Path, Path]) -> None:
    home, _ = folders
    found = with_absolute_paths({"config": "astray.yaml", "functions": "list.yaml", "keep": "stats"})
    assert found == {"config": home / "astray.yaml", "functions": home / "list.yaml", "keep": "stats"}
    assert with_absolute_paths({"functions": ["softmax"], "config": None}) == {"functions": ["softmax"], "config": None}


SCRIPT = """
import os
os.chdir({away!r})
import torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model({value} * torch.ones(2, 3)).sum().backward()
optimizer.step()
assert os.path.isabs(__file__), __file__
"""


@pytest.mark.parametrize("command", ["run", pytest.param("check", marks=pytest.mark.slow)])
def test_a_script_may_go_before_it_imports_torch(folders: tuple[Path, Path], command: str) -> None:
    home, away = folders
    (home / "train.py").write_text(SCRIPT.format(away=str(away), value="float('nan')"))
    (home / "astray.yaml").write_text("keep: stats\n")
    given = [sys.executable, "-m", "astray", command, "-o", "out", "--config", "astray.yaml", "train.py"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode == (command == "check"), done.stderr
    assert not list(away.iterdir())
    assert open_run(home / "out" if command == "run" else next((home / "out").iterdir())).steps == [0]
