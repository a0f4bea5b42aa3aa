"""kill -9, twenty times: what was acknowledged is in the files, and everything in them is right."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from astray.store import RunData, open_run

WAYS = ("as usual", "ahead", "watched")
SIZES = (3, 1000, 0, 70_000, 16, 400_000)


@pytest.mark.parametrize("attempt", [*range(6), *(pytest.param(at, marks=pytest.mark.slow) for at in range(6, 20))])
def test_nothing_acknowledged_is_lost(
    tmp_path: Path, program: Callable[..., subprocess.Popen[str]], attempt: int
) -> None:
    with program("endless.py", tmp_path, WAYS[attempt % 3]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(attempt).uniform(0, 0.3))
        process.kill()
        acknowledged = max((int(line.split()[1]) for line in process.stdout if line.endswith("\n")), default=6)
    run = open_run(tmp_path)
    check_rows(run, acknowledged)
    check_report(run)
    check_files(tmp_path / "rank0")


def check_rows(run: RunData, acknowledged: int) -> None:
    rank = run.ranks[0]
    count = len(rank.tensors)
    assert count > acknowledged
    assert rank.calls["seq"].tolist() == list(range(len(rank.calls)))
    assert rank.tensors["seq"].tolist() == list(range(count))
    assert rank.call_rows.tolist() == list(range(count))  # calls are written before tensors
    assert rank.tensors["fingerprint"].tolist() == list(range(count))
    for seq in range(count):
        expected = np.arange(seq, seq + SIZES[seq % len(SIZES)])
        assert np.array_equal(rank.values(seq), expected)
    for row in range(len(rank.calls)):
        number = int(rank.calls["stack"][row])
        assert [frame.line for frame in rank.stack(number)] == [number]


def check_report(run: RunData) -> None:
    assert not run.complete
    assert run.ranks[0].end is None
    assert any(text.endswith("the recording was stopped before it ended.") for text in run.problems)
    assert "incomplete" in repr(run)


def check_files(folder: Path) -> None:
    """The safetensors library opens every shard, and finds the same values."""
    for path in folder.glob("values-*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                if not name.startswith("__"):
                    found = file.get_tensor(name)
                    seq = int(name.split(".")[0])
                    assert np.array_equal(found, np.arange(seq, seq + len(found)))
