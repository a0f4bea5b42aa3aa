"""`astray run --graft` and `--single-step`: an unchanged script goes on with what another run recorded."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import astray
from astray.capture.graft_words import graft_notes
from recorded_rows import rows

SCRIPT = """
import sys
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x * (1.5 if "gate" in sys.argv else 1.0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 8), Gate(), nn.Linear(8, 2)

    def forward(self, x):
        return self.down(self.gate(self.up(x)))


torch.manual_seed(0)
model = Model()
if "weight" in sys.argv:
    model.up.weight.data.mul_(1.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
"""

pytestmark = pytest.mark.slow  # each starts processes; test_grafting.py has the grafts themselves
KEPT = ("--level", "module,function", "--keep", "tensors")


def run(folder: Path, name: str, *options: str, script: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "astray", "run", "-o", f"runs/{name}", *KEPT, *options, "train.py", *script]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, and `runs/a` of it."""
    folder = tmp_path_factory.mktemp("graft")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = run(folder, "a")
    assert done.returncode == 0, done.stderr
    (folder / "losses.txt").write_text(done.stdout)
    return folder


def test_results_are_grafted_and_the_command_says_so(folder: Path) -> None:
    done = run(folder, "b", "--graft", "runs/a:gate", script=("gate",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (folder / "losses.txt").read_text().splitlines()[0]
    says = "astray: grafted 2 tensors from runs/a, gate@outputs; 2 had other bits than the program's own.\n"
    assert done.stderr.endswith(says)
    [note] = graft_notes(astray.open(folder / "runs" / "b").ranks[0].setup)
    assert note == ("gate@outputs", str(folder / "runs" / "a"), 2, 2, 0)


def test_a_single_step_judges_each_call_alone(folder: Path) -> None:
    """The model, which is found at its first call, is given the run's inputs and parameters from that call on."""
    done = run(folder, "c", "--single-step", "runs/a", script=("gate", "weight"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (folder / "losses.txt").read_text()
    says = r"astray: grafted \d+ tensors from runs/a, every call; \d+ had other bits than the program's own\.\n"
    assert re.search(says + r"\Z", done.stderr)
    runs = [
        {
            (row["step"], row["site"], row["phase"], row["call"], row["role"], row["path"]): row["fingerprint"]
            for row in found
        }
        for found in (rows(astray.open(folder / "runs" / name)) for name in "ac")
    ]
    assert {key[1] for key in runs[0] if runs[0][key] != runs[1][key]} == {"gate", "gate/mul"}


def test_what_cannot_be_grafted_ends_the_script_with_a_sentence(folder: Path) -> None:
    done = run(folder, "d", "--graft", "runs/a:gaet")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "has no site gaet to graft from. Did you mean 'gate'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs" / "d").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--graft", "runs/nowhere:gate"),
            "runs/nowhere does not exist, from which runs/nowhere:gate is to be grafted.",
        ),
        (("--graft", "runs/a:gate@output"), "'output' cannot be grafted."),
        (("--graft", "runs/a:g(ate"), "g(ate is not a regular expression"),
        (("--single-step", "runs/a:gate"), "say --graft runs/a:gate@inputs,parameters."),
    ],
)
def test_wrong_words_are_answered_before_the_script_runs(folder: Path, options: tuple[str, ...], says: str) -> None:
    done = run(folder, "e", *options)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
