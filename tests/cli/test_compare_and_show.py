"""`astray compare` and `astray show` as a person meets them: output, exit codes, bad input."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import astray
from astray.cli import main
from small_models import Residual, build, train


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str, str]:
    """A reference, its twin, and a run whose `inner` works with a wrong bias from step 1 on."""
    paths = []
    for name in ("good", "twin", "bad"):
        model = build(Residual)
        with astray.record(tmp_path / name, model) as rec:

            def after(rec: astray.Recorder = rec, model: torch.nn.Module = model, name: str = name) -> None:
                if name == "bad":
                    with torch.no_grad():
                        model.inner.bias.add_(0.5)
                rec.step()

            train(model, steps=3, after_step=after)
        paths.append(str(tmp_path / name))
    return paths[0], paths[1], paths[2]


def test_exit_codes(runs: tuple[str, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, twin, bad = runs
    assert main(["compare", good, twin]) == 0
    assert "No divergence" in capsys.readouterr().out
    assert main(["compare", good, bad]) == 1
    out = capsys.readouterr().out
    assert "inner" in out
    assert "step 1" in out
    assert main(["compare", good, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_pipe_gets_no_colour_and_no_bar_and_a_terminal_gets_colour(runs: tuple[str, str, str]) -> None:
    good, _, bad = runs
    words = [sys.executable, "-m", "astray", "compare", good, bad]
    piped = subprocess.run(words, capture_output=True, text=True)
    assert "\x1b" not in piped.stdout + piped.stderr
    assert max(map(len, piped.stdout.splitlines()[1:])) <= 100  # the first line holds paths, of any length
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    subprocess.run(words, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert b"\x1b[" in shown


def test_a_reader_that_has_seen_enough_is_not_an_error(runs: tuple[str, str, str]) -> None:
    words = f"{sys.executable} -m astray show {runs[0]} --top 0 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True)
    assert done.stderr == ""


def test_show_lists_filters_and_sorts(runs: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    good = runs[0]
    assert main(["show", good]) == 0
    out = capsys.readouterr().out
    assert "3 steps" in out
    assert "more rows" in out
    assert main(["show", good, "--match", "^inner$", "--role", "output", "--phase", "forward", "--steps", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "inner" in line]
    assert len(lines) == 1
    assert main(["show", good, "--sort", "absmax", "--top", "3"]) == 0
    assert main(["show", good, "--match", "nobody"]) == 0
    assert "No tensor" in capsys.readouterr().out
    assert main(["show", good, "--match", "("]) == 2
    assert "regular expression" in capsys.readouterr().err
    assert main(["show", good, "--rank", "5"]) == 2
    assert "rank 5" in capsys.readouterr().err


def test_outputs_that_cannot_be_written_get_a_sentence(runs: tuple[str, str, str], tmp_path: Path) -> None:
    good, twin, _ = runs
    (tmp_path / "file").write_text("")
    for options, shell in [
        (("--json", str(tmp_path / "file" / "x.json")), ""),
        (("--csv", str(tmp_path / "file" / "x")), ""),
        ((), " > /dev/full"),
    ]:
        words = " ".join([sys.executable, "-m", "astray", "compare", good, twin, *options]) + shell
        done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
        assert done.returncode == 2, done
        assert done.stderr.startswith("astray compare: ")
        assert "Traceback" not in done.stderr
    closed = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m astray compare {good} {twin} >&-"], capture_output=True
    )
    assert (closed.returncode, closed.stderr) == (0, b"")
    plain = subprocess.run(
        [sys.executable, "-m", "astray", "compare", good, twin],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert plain.returncode == 0
    assert b"No divergence" in plain.stdout


def test_help_fits_a_terminal_and_names_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "astray", "--help"], capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert all(command in done.stdout for command in ("run", "compare", "show"))
    version = subprocess.run([sys.executable, "-m", "astray", "--version"], capture_output=True, text=True)
    assert version.stdout.startswith("astray ")
