"""`astray run --perturb`: where its seed stands, and what the commands say of such a run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import astray
from astray.cli import parser

TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 4), nn.Linear(4, 2)
    def forward(self, words, *, scale):
        return self.layer(self.table(words)) * scale

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randint(5, (3,)), scale=torch.rand(3, 1)).square().sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print(sys.argv[1:], torch.get_rng_state().sum().item())
"""

INTEGERS = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, words):
        return words + 1
Model()(torch.arange(3))
"""


def astray_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "astray", *words], capture_output=True, text=True, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs `plain`, `noise` and `other`, and what each script printed."""
    folder = tmp_path_factory.mktemp("perturb")
    (folder / "train.py").write_text(textwrap.dedent(TRAINING))
    for name, *options in (("plain",), ("noise", "--perturb"), ("same", "--perturb"), ("other", "--perturb=1")):
        done = astray_command(folder, "run", "-o", name, "--keep", "tensors", *options, "train.py", "--perturb", "x")
        assert done.returncode == 0, done.stderr
        (folder / f"{name}.txt").write_text(done.stdout)
    return folder


@pytest.mark.parametrize(
    ("words", "seed", "arguments"),
    [
        (["--perturb", "train.py", "--perturb=9"], 0, ["--perturb=9"]),
        (["--perturb=7", "train.py", "--perturb"], 7, ["--perturb"]),
        (["--perturb", "--keep", "stats", "train.py"], 0, []),
        (["train.py", "--perturb"], None, ["--perturb"]),
    ],
)
def test_the_seed_stands_behind_an_equals_sign(words: list[str], seed: int | None, arguments: list[str]) -> None:
    options = parser().parse_args(["run", "-o", "runs/a", *words])
    assert (options.script, options.perturb, options.arguments) == ("train.py", seed, arguments)


def test_a_wrong_seed_is_answered_before_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    done = astray_command(tmp_path, "run", "-o", "run", "--perturb=-3", "train.py")
    assert done.returncode == 2
    expected = "astray run: perturb=-3 is not a seed. It is True, or a whole number from 0 to 4,294,967,295.\n"
    assert done.stderr == expected


@pytest.mark.slow
def test_the_script_draws_the_same_random_numbers_and_gets_its_own_arguments(folder: Path) -> None:
    assert len({(folder / f"{name}.txt").read_text() for name in ("plain", "noise", "other")}) == 1
    assert (folder / "plain.txt").read_text().startswith("['--perturb', 'x'] ")


@pytest.mark.slow
def test_the_first_call_of_a_model_that_is_found_is_perturbed_like_the_others(folder: Path) -> None:
    plain, noise = (astray.open(folder / name) for name in ("plain", "noise"))
    for step in range(3):
        for site, role, path in (("<root>", "input", "kwargs.scale"), ("table", "output", "out")):
            key = astray.Key(step, 0, site, 0, "forward", role, path)
            left, right = plain.tensor(key), noise.tensor(key)
            assert (left != right).any(), key
            if (step, role) != (2, "output"):  # weights have moved by then
                assert abs(left - right).max() <= 2.0**-22 * abs(left).max()


@pytest.mark.slow
def test_one_seed_is_one_run(folder: Path) -> None:
    assert astray.compare(folder / "noise", folder / "same", exact=True).same
    assert not astray.compare(folder / "noise", folder / "other", exact=True).same
    assert astray.compare(folder / "plain", folder / "other").same


@pytest.mark.slow
def test_show_and_compare_say_it(folder: Path) -> None:
    shown = astray_command(folder, "show", "noise").stdout
    assert "  perturbed  its inputs, by roundings (seed 0): for astray compare --noise\n" in shown
    assert "perturbed" not in astray_command(folder, "show", "plain").stdout
    said = "was recorded with perturbed inputs (seed 1)"
    compared = astray_command(folder, "compare", "plain", "other")
    assert compared.returncode == 0
    assert f"The candidate other {said}" in " ".join(compared.stdout.split())
    calibrated = astray_command(folder, "compare", "plain", "noise", "--noise", "other")
    assert calibrated.returncode == 0
    assert said not in " ".join(calibrated.stdout.split())


@pytest.mark.slow
def test_a_program_without_anything_to_perturb_ends_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "integers.py").write_text(textwrap.dedent(INTEGERS))
    done = astray_command(tmp_path, "run", "-o", "run", "--perturb", "integers.py")
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == (
        "astray perturbed nothing: no call was given floating-point tensors that could be changed, or made them of "
        "integers. As --noise this run shows no more than a second recording of the same."
    )
