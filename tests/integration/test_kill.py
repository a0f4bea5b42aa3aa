"""`kill -9` in the middle of a real recording, again and again: what was acknowledged is there and right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import astray
from astray.stats import Strided, measure

PROGRAM = """
    import sys, torch, astray
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with astray.record(sys.argv[1], model, keep="tensors") as rec:
        for step in range(int(sys.argv[2])):
            loss = model(torch.randn(32, 64)).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            rec.step()
            if step % 3 == 0:
                rec.flush()
                print(step, flush=True)
"""


@pytest.mark.slow
def test_twenty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    subprocess.run([sys.executable, script, tmp_path / "whole", "2"], check=True, capture_output=True)
    rows_per_step = len(astray.open(tmp_path / "whole").ranks[0].tensors) // 2
    chance = random.Random(1)
    for number in range(20):
        folder = tmp_path / f"killed{number}"
        process = subprocess.Popen([sys.executable, script, folder, "100000"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = int(process.stdout.readline())
        time.sleep(chance.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        process.stdout.close()
        process.wait()

        run = astray.open(folder)
        assert not run.complete
        assert any("stopped before it ended" in problem for problem in run.problems)
        rank = run.ranks[0]
        steps = rank.calls.numbers("step")[rank.call_rows]
        for step in range(acknowledged + 1):
            assert np.count_nonzero(steps == step) == rows_per_step
        for row in chance.sample(range(len(rank.tensors)), min(200, len(rank.tensors))):
            kept = run.values(0, row)
            assert kept is not None
            whole = np.ascontiguousarray(kept)
            assert measure(Strided.from_numpy(whole)).fingerprint == rank.tensors.row(row)["fingerprint"]


@pytest.mark.slow
def test_a_killed_run_compares_with_a_whole_one(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    subprocess.run([sys.executable, script, tmp_path / "whole", "40"], check=True, capture_output=True)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "killed", "100000"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < 30:
        pass
    process.kill()
    process.stdout.close()
    process.wait()
    diff = astray.compare(tmp_path / "whole", tmp_path / "killed", steps="0:30")
    assert diff.same
    assert diff.counts["identical"] == len(diff.pairs)
    assert "stopped before it ended" in " ".join(diff.problems)
