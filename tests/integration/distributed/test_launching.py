"""`astray run` under torchrun, and ranks that are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import astray
from astray.capture.graft_words import graft_notes
from astray.capture.settings import LEVELS
from integration.distributed.launching import HERE, start, torchrun

TRAIN = HERE / "train.py"


def outcome(folder: Path, kind: str) -> list[bytes]:
    return [(folder / f"{kind}{rank}.bits").read_bytes() for rank in (0, 1)]


def astray_run(folder: Path, kind: str, *options: str) -> astray.Run:
    """Runs the script as `torchrun -m astray run` would, in a folder of its own."""
    folder.mkdir()
    output = torchrun("astray", "run", "-o", folder / "run", *options, TRAIN, kind, folder, options=("-m",))
    assert len(re.findall(r"astray: \d steps.*\(on rank 0; 2 ranks\)", output)) == 1
    return astray.open(folder / "run")


def check(run: astray.Run) -> None:
    assert (run.complete, run.problems, sorted(run.ranks)) == (True, [], [0, 1])
    assert run.steps[:5] == [0, 1, 2, 3, 4]  # the script goes on to compute a little after its last step
    assert (run.path / "rank1" / "end.json").is_file()


@pytest.mark.slow
def test_a_script_under_torchrun_is_recorded_unchanged(tmp_path: Path) -> None:
    torchrun(TRAIN, "ddp", tmp_path)
    run = astray_run(tmp_path / "recorded", "ddp")
    check(run)
    assert outcome(tmp_path / "recorded", "ddp") == outcome(tmp_path, "ddp")
    sites = {run.ranks[1].calls.row(i)["site"] for i in range(len(run.ranks[1].calls))}
    assert {"<root>", "0", "1", "2", "3", "0.weight", "3.bias"} <= sites


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_script_under_torchrun_at_every_level(kind: str, tmp_path: Path) -> None:
    torchrun(TRAIN, kind, tmp_path)
    for level in LEVELS:
        folder = tmp_path / level
        check(astray_run(folder, kind, "--level", level))
        assert outcome(folder, kind) == outcome(tmp_path, kind)


@pytest.mark.slow
def test_the_command_itself_may_be_what_torchrun_starts(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "astray"
    torchrun(command, "run", "-o", tmp_path / "run", TRAIN, "fsdp", tmp_path, options=("--no-python",))
    run = astray.open(tmp_path / "run")
    check(run)
    names = {run.ranks[0].calls.row(i)["type"] for i in range(len(run.ranks[0].calls))}
    assert {"Sequential", "Linear", "LayerNorm", "GELU"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_loses_nothing_that_was_acknowledged(victim: int, tmp_path: Path) -> None:
    acknowledged = {0: -1, 1: -1}
    pids: dict[int, int] = {}
    killed = False
    with start(HERE / "endless.py", tmp_path / "run", stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        for line in process.stdout:  # until torchrun has ended the other one too, perhaps in the middle of a line
            if re.fullmatch(r"[01] \d+ \d+\n", line):
                rank, pid, step = map(int, line.split())
                acknowledged[rank], pids[rank] = step, pid
                if min(acknowledged.values()) >= 9 and not killed:
                    os.kill(pids[victim], signal.SIGKILL)
                    killed = True
    assert process.returncode != 0

    run = astray.open(tmp_path / "run")
    assert not run.complete
    assert sum("stopped before it ended" in problem for problem in run.problems) >= 1
    for rank, last in acknowledged.items():
        one = run.ranks[rank]
        steps = one.calls.numbers("step")[one.call_rows]
        rows = [np.count_nonzero(steps == step) for step in range(last + 1)]
        assert set(rows) == {rows[0]}
        assert rows[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_is_given_its_own_values(tmp_path: Path, kind: str) -> None:
    """`--single-step` of the same program: no bit of any rank changes, and every rank has found its tensors."""
    kept = ("--level", "module,function", "--keep", "tensors")
    astray_run(tmp_path / "a", kind, *kept)
    run = astray_run(tmp_path / "b", kind, *kept, "--single-step", str(tmp_path / "a" / "run"))
    assert outcome(tmp_path / "b", kind) == outcome(tmp_path / "a", kind)
    for rank in run.ranks.values():
        [note] = graft_notes(rank.setup)
        assert (note.where, note.unreached) == ("every call", 0)
        assert note.differed == 0 or kind == "fsdp"  # which gives its own functions memory that is not filled yet
        assert note.tensors > 100
