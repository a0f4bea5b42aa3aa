"""From a text that a bad chip makes wrong to the proof which call it is, by commands alone: examples/generate_gpt.py.

The call is in a processor of logits, which is in no module, and no line of the script is changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import astray
from astray.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def generate(folder: Path, *options: str, chip: bool = True) -> str:
    """Records the script, and returns the text that it prints."""
    command = [sys.executable, "-m", "astray", "run", "-o", str(folder), "--level", "module,function", *options]
    script = [str(EXAMPLES / "generate_gpt.py"), "--tokens", "4", *(["--chip"] if chip else [])]
    done = subprocess.run(
        [*command, *script], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "--swap" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_bad_kernel_in_a_processor_of_logits_is_named_and_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, chip, swapped = (tmp_path / name for name in ("good", "chip", "swapped"))
    right = generate(good, "--keep", "tensors", chip=False)
    assert generate(chip, "--keep", "tensors") != right

    assert main(["compare", str(good), str(chip)]) == 1
    report = capsys.readouterr().out
    assert "First divergence: step 0, forward, call 0 of /cumsum (torch.cumsum), output" in report
    assert "in TopP.__call__    before = torch.cumsum(share, dim=-1) - share" in report

    assert generate(swapped, "--keep", "tensors", "--swap", "__main__.TopP.__call__=float64") == right
    assert main(["compare", str(good), str(swapped)]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert "No divergence" in report
    assert "__main__.TopP.__call__ is as the program has it in the reference and swapped to float64 in the" in report


@pytest.mark.slow
def test_what_the_swap_of_other_suspects_proves(tmp_path: Path) -> None:
    """The error goes with the call, outside of all modules, and stays with whatever else is swapped."""
    right = generate(tmp_path / "good", chip=False)
    wrong = generate(tmp_path / "chip")
    assert generate(tmp_path / "call", "--swap", "/cumsum=float64") == right
    assert generate(tmp_path / "model", "--swap", "<root>=float64") == wrong
    assert generate(tmp_path / "other", "--swap", "/softmax=float64", "--swap", "/sort=float64") == wrong
    assert not astray.compare(tmp_path / "good", tmp_path / "model").same
