"""The forecast of disk use: reported once, when all values are kept."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import astray
from astray.capture.selection import RecordedBytes, forecast

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(64, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how much is free."""

    def leave(free: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free, 0, free))

    leave(10_000_000_000)
    return leave


def said(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The level of each line about the disk."""
    return [one.levelno for one in caplog.records if "on the disk" in one.message]


@pytest.mark.parametrize(
    ("free", "max_bytes", "ranks", "sentence"),
    [
        (2e9, None, 1, "a step takes 1.0 MB on the disk; 2,000 more fit into the 2.0 GB that are free at runs/a."),
        (2e9, None, 4, "a step takes 1.0 MB on the disk on each of 4 ranks; 500 more fit into the 2.0 GB that"),
        (1.5e6, None, 1, "1 more fits into the 1.5 MB that are free at runs/a. Record fewer steps"),
        (9e5, None, 1, "no more fits into the 900.0 kB that are free"),
        (2e9, 5_000_000, 1, "4 more fit into max_bytes=5,000,000. Record fewer steps"),
        (3e6, 500_000_000, 1, "3 more fit into the 3.0 MB that are free"),
    ],
)
def test_what_is_said(disk: Any, free: float, max_bytes: int | None, ranks: int, sentence: str) -> None:
    disk(int(free))
    assert sentence in forecast(RecordedBytes(1_000_000, 0), Path("runs/a"), max_bytes, ranks).sentence


def record(path: Path, **settings: Any) -> None:
    model = nn.Linear(8, 8)
    with astray.record(path, model, **settings) as rec:
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            rec.step()


def test_the_logger_says_it_once(tmp_path: Path, disk: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "astray"):
        record(tmp_path / "run", keep="tensors")
    assert said(caplog) == [logging.INFO]


def test_a_disk_that_is_nearly_full_is_a_warning(tmp_path: Path, disk: Any, caplog: pytest.LogCaptureFixture) -> None:
    disk(20_000)
    record(tmp_path / "run", keep="tensors")
    assert said(caplog) == [logging.WARNING]


@pytest.mark.parametrize("keep", ["stats", "sample", "fingerprint"])
def test_nothing_is_said_where_little_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: str) -> None:
    with caplog.at_level(logging.INFO, "astray"):
        record(tmp_path / "run", keep=keep)
    assert said(caplog) == []


def test_steps_that_are_not_recorded_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, home = nn.Linear(8, 8), tmp_path / "run"
    with caplog.at_level(logging.INFO, "astray"), astray.record(home, model, keep="tensors", steps="1:") as rec:
        for recorded in range(3):
            model(torch.randn(2, 8))
            rec.step()
            assert len(said(caplog)) == min(recorded, 1)


def test_a_disk_that_does_not_tell_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr("shutil.disk_usage", fail)
    record(tmp_path / "run", keep="tensors")
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    assert end.missed == []


def test_astray_run_says_what_a_step_takes_indeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "astray", "run", "-o", "run", "--keep", "tensors", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = re.findall(r"astray: a step takes ([\d.]+) MB on the disk; [\d,]+ more fit", done.stderr)
    there = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert len(lines) == 1
    assert 3 * float(lines[0]) * 1e6 == pytest.approx(there, rel=0.1)
