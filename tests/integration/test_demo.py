"""The main job, end to end: two trainings through `astray run`, one planted fault, and the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import astray

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"


def record(folder: Path, *arguments: str, keep: str = "stats") -> Path:
    command = [sys.executable, "-m", "astray", "run", "-o", str(folder), "--keep", keep, str(SCRIPT), *arguments]
    # One thread: the model is tiny, and two threads that wait for each other are slow on a busy machine.
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


def test_make_demo_ends_with_the_answer(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "First divergence: step 3, forward, call 0 of h.2.mlp.proj (Linear), output" in done.stdout
    assert "forward, call 0 of /log (torch.log)\n    train_gpt.py:72 in loss_by_hand" in done.stderr
    check_answer(tmp_path / "demo" / "good", tmp_path / "demo" / "bad")


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["tensors", "sample", "fingerprint"])
def test_the_planted_fault_is_named_exactly(keep: str, tmp_path: Path) -> None:
    good = record(tmp_path / "good", keep=keep)
    bad = record(tmp_path / "bad", "--fault", keep=keep)
    check_answer(good, bad, has_error=keep != "fingerprint")


def check_answer(good: Path, bad: Path, *, has_error: bool = True) -> None:
    diff = astray.compare(good, bad)
    first = diff.first
    assert first is not None
    assert (first.step, first.site, first.type, first.call, first.phase) == (3, "h.2.mlp.proj", "Linear", 0, "forward")
    assert first.cause == "parameter"
    assert "return self.proj(x)" in str(diff)
    assert "train_gpt.py" in str(diff)
    if has_error:
        assert first.error == pytest.approx(1e-3, rel=0.3)
    assert diff.exit_code == 1


@pytest.mark.slow
def test_two_runs_of_the_same_program_are_identical(tmp_path: Path) -> None:
    diff = astray.compare(record(tmp_path / "a"), record(tmp_path / "b"))
    assert diff.same
    assert diff.first is None
    assert diff.counts["identical"] == len(diff.pairs)


@pytest.mark.slow
def test_the_json_and_csv_say_the_same(tmp_path: Path) -> None:
    good, bad = record(tmp_path / "good"), record(tmp_path / "bad", "--fault")
    done = subprocess.run(
        [sys.executable, "-m", "astray", "compare", str(good), str(bad), "--csv", str(tmp_path / "csv"),
         "--json", str(tmp_path / "diff.json")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads((tmp_path / "diff.json").read_text())["first"]["site"] == "h.2.mlp.proj"
    assert list((tmp_path / "csv").glob("*.csv"))
