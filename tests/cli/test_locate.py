"""`astray locate`: the walk on real scripts, its exit codes, and `git bisect run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import astray
from astray.cli import main
from cli.scripts import command

MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.head(x)
"""

TRAIN = """\
import sys

import torch

from model import Net

torch.manual_seed(0)
torch.set_num_threads(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(6, 8)
    if "--tanh" in sys.argv and step == 1:
        net.h[1].down.forward = lambda y: torch.tanh(net.h[1].down.weight @ y.T).T + net.h[1].down.bias
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_walk_on_a_script(project: Path) -> None:
    assert command("run", "-o", "good", "train.py").returncode == 0
    done = command("locate", "--json", "-o", "walk", "--reference-command", "train.py", "good", "train.py", "--tanh")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "proven"
    fault = found["faults"][0]
    assert (fault["step"], fault["site"].partition("/")[0]) == (1, "h.1.down")
    assert {trial["name"]: trial["outcome"] for trial in fault["trials"]}["graft"] == "proves"
    assert astray.open(fault["trials"][-1]["run"]).steps == [1]
    assert (project / "walk" / "candidate.log").read_text().startswith("0 ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "train.py"], "nowhere"),
        (["good", "missing.py"], "There is no script missing.py"),
        (["-o", "train.py", "good", "train.py"], "train.py is there already"),
        (["--steps", "7", "good", "train.py"], "good has none of the steps 7; it has 0"),
        (["--tolerance", "attn", "good", "train.py"], "tolerance"),
    ],
)
def test_what_cannot_be_is_125_and_a_sentence(
    words: list[str], said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    with astray.record(project / "good", net):
        net(torch.ones(1, 2))
    assert main(["locate", *words]) == 125
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_script_that_does_not_start_cannot_be_judged(project: Path) -> None:
    command("run", "-o", "good", "train.py")
    (project / "model.py").write_text("raise ImportError('half a commit')\n")
    done = command("locate", "-o", "walk", "good", "train.py")
    assert done.returncode == 125
    assert "the candidate walk/candidate holds no tensors" in done.stderr
    assert "ended with ImportError: half a commit" in done.stderr


@pytest.mark.slow
def test_git_bisect_finds_the_commit(project: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *words], capture_output=True, text=True, check=True)
        return done.stdout

    command("run", "-o", str(project / "good"), "train.py")
    (project / ".gitignore").write_text("good\nruns\n__pycache__\n")
    git("init", "-q")
    for number in range(6):
        if number == 2:
            (project / "model.py").write_text("raise ImportError('half a commit')\n")
        if number == 3:
            (project / "model.py").write_text(MODEL)
        if number == 4:
            (project / "model.py").write_text(MODEL.replace("F.gelu", "F.silu"))
        (project / "notes.txt").write_text(str(number))
        git("add", "-A")
        git("commit", "-q", "-m", f"commit {number}")
    git("bisect", "start", "HEAD", "HEAD~5")
    said = git("bisect", "run", sys.executable, "-m", "astray", "locate", "--quick", "good", "train.py")
    assert "is the first bad commit" in said
    assert "commit 4" in said


@pytest.mark.slow
def test_ranks_under_torchrun(project: Path) -> None:
    (project / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        + TRAIN.replace("net = Net()", "net = torch.nn.parallel.DistributedDataParallel(Net())")
        .replace("net.h[1]", "net.module.h[1]")
        .replace("step == 1:", "step == 1 and dist.get_rank() == 1:")
        + "dist.destroy_process_group()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launch, "-m", "astray", "run", "-o", "good", "train.py"], check=True, env=environment)
    walk = ["locate", "--json", "-o", "walk", "--reference-command", " ".join([*launch, "train.py"]), "good"]
    done = command(*walk, *launch, "train.py", "--tanh", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stderr
    fault = json.loads(done.stdout)["faults"][0]
    assert fault["proven"]
    assert (fault["rank"], fault["step"], fault["site"].partition("/")[0]) == (1, 1, "h.1.down")
