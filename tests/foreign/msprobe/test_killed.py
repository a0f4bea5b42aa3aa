"""kill -9 in the middle of a step: those before it are complete, and it has what was recorded until a moment ago."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import astray
from msprobe_parts import batches, debugging, names, network, read, tensors, train

PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.slow  # a process that imports torch, and a second of waiting in it
def test_a_kill_takes_nothing_but_the_last_moment(tmp_path: Path) -> None:
    places = [str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    ended = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path / "killed")], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    with debugging(task="tensor", level="mix", dump_path=tmp_path / "whole") as debugger:
        train(debugger, model := network(), 4, model)
    for step in range(3):
        killed, whole = (tmp_path / one / f"step{step}" / "rank" for one in ("killed", "whole"))
        assert read(killed)["data"] == read(whole)["data"]
        assert read(killed, "construct.json") == read(whole, "construct.json")
        assert tensors(killed) == tensors(whole)
        assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())
    killed, whole = (tmp_path / one / "step3" / "rank" for one in ("killed", "whole"))
    assert names(killed) == [name for name in names(whole) if "forward" in name]
    file = "dump_tensor_data/Module.linear_1.Linear.forward.0.input.0.pt"
    assert torch.equal(torch.load(killed / file, weights_only=True), batches(4)[3])
    assert astray.open(tmp_path / "killed").steps == [0, 1, 2, 3]
