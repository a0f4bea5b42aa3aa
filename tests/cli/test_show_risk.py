"""`astray show RUN --risk` as a person meets it: output, exit codes, bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import astray
from astray.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A float16 model whose input comes near the end of its dtype."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("runs") / "half"
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).half()
    with astray.record(path, model) as rec:
        for _ in range(3):
            model(torch.randn(4, 8).mul(15000).clamp(-40000, 40000).half()).float().mean().backward()
            rec.step()
    return str(path)


def test_it_lists_the_worst_first_and_exits_with_0(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", run, "--risk"]) == 0
    out = capsys.readouterr().out
    head, first = out.split("\n\n")[1].splitlines()[:2]
    assert head.split()[:2] == ["risk", "site"]
    assert first.split()[:2] == ["overflow", "<root>"]
    assert "the dtype ends at 65504" in first


def test_it_can_be_narrowed_sorted_and_cut(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--match", "^0$", "--phase", "forward", "--role", "parameter", "--steps", "1:", "--rank", "0"]
    assert main(["show", run, "--risk", *words, "--sort", "absmax", "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert len(text.split("\n\n")[1].splitlines()) == 2
    assert "1 more place" in text


def test_other_dtypes(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", run, "--as", "float8_e4m3fn", "--as", "bf16,fp32"]) == 0
    text = capsys.readouterr().out
    assert "as float8_e4m3fn: " in text
    assert text.index("as float8_e4m3fn: ") < text.index("as bfloat16: ") < text.index("as float32: ")
    assert "overflows" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--risk", "--as", "flaot16"], "'flaot16' is not a floating-point dtype. Did you mean 'float16'?"),
        (["--risk", "--rank", "5"], "has no rank 5. It has 0."),
        (["--risk", "--match", "("], "is not a regular expression"),
        (["--risk", "--sort", "l2"], "--sort l2 does not go with --risk. Sites are sorted by absmax, headroom,"),
        (["--sort", "headroom"], "--sort headroom goes with --risk. Tensors are sorted by absmax, l2,"),
        (["--risk", "--steps", "x"], "'x' is not a selection of steps."),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(
    run: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", run, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_statistics_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with astray.record(tmp_path / "bare", model := nn.Linear(2, 2), keep="fingerprint"):
        model(torch.ones(1, 2))
    assert main(["show", str(tmp_path / "bare"), "--risk"]) == 0
    assert "it was recorded without statistics" in capsys.readouterr().out.replace("\n", " ")


def test_a_pipe_gets_no_colour_and_short_lines(run: str) -> None:
    words = [sys.executable, "-m", "astray", "show", run, "--risk"]
    piped = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines()[1:])) <= 100  # the first line holds a path, of any length
    assert piped.stderr == ""
