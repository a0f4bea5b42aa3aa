"""Comparisons whose calls are executed again: a bad kernel planted into a bf16 GPT, beside right runs of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import astray
from astray.cli import main
from replay import faults, programs

SITE = "h.0.expand/linear"
BAD = faults.Fault("addmm.default", 2, faults.wrong_tile, SITE)
"""Two percent too large in one tile of 256: less than eight roundings of bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    for name, fault in (("good", None), ("bad", faults.Planted(BAD))):
        programs.record(home / name, programs.FIRST_HALF["gpt bf16"], fault=fault)
    return home


def test_a_bad_kernel_below_every_limit_is_proven(folder):
    assert astray.compare(folder / "good", folder / "bad", replay=False).same
    diff = astray.compare(folder / "good", folder / "bad")
    first = diff.first
    assert (first.site, first.phase, first.rule, first.sureness) == (SITE, "forward", "replay", "certain")
    assert first.replay.finding == "candidate"
    assert first.replay.candidate.ratio > 5
    assert "the reference's is fine (0.50 ulps)" in str(diff).replace("\n                 ", " ")


def test_it_may_be_the_reference_that_is_wrong(folder):
    first = astray.compare(folder / "bad", folder / "good").first
    assert (first.site, first.replay.finding) == (SITE, "reference")


def test_the_command_writes_it_and_can_leave_it_out(folder, tmp_path, capsys):
    report = tmp_path / "diff.json"
    runs = [str(folder / "good"), str(folder / "bad")]
    assert main(["compare", *runs, "--json", str(report)]) == 1
    assert "    replay       the candidate's result is" in capsys.readouterr().out
    document = json.loads(report.read_text())
    assert document["first"]["replay"]["finding"] == "candidate"
    assert document["first"]["replay"]["candidate"]["dtype"] == "bfloat16"
    assert document["suspects"][0]["replay"] == document["first"]["replay"]
    assert main(["compare", *runs, "--no-replay"]) == 0


@pytest.mark.slow
def test_ranks_are_replayed_where_they_are_compared(folder, tmp_path):
    """Worker processes give the same as this one."""
    for name in ("good", "bad"):
        path = tmp_path / name
        shutil.copytree(folder / name, path)
        shutil.copytree(folder / "good" / "rank0", path / "rank1")
    here, there = (astray.compare(tmp_path / "good", tmp_path / "bad", processes=processes) for processes in (1, 2))
    assert [first.rank for first in here.firsts] == [0]
    assert here.first.replay == there.first.replay
    assert here.replays.keys() == there.replays.keys()


def test_equal_runs_are_compared_without_torch(folder):
    code = (
        f"import sys, astray; assert astray.compare({str(folder / 'good')!r}, {str(folder / 'good')!r}).same; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_replaying_draws_no_random_numbers(folder):
    before = torch.get_rng_state()
    astray.compare(folder / "good", folder / "bad")
    assert torch.equal(torch.get_rng_state(), before)
