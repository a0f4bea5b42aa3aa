"""`astray run --guard`: a script is recorded, and watched as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import astray
from astray.cli import main, parser
from cli.scripts import MAY_OVERFLOW, command, run_script

CATCHING = """
    try:
        optimizer.step()
    except Exception as error:
        {then}
"""
GOOD = MAY_OVERFLOW.format(bad=None, update="optimizer.step()")
BAD = MAY_OVERFLOW.format(bad=3, update="optimizer.step()")
WRAPPING = MAY_OVERFLOW.format(bad=3, update=CATCHING.format(then='raise RuntimeError("wrapped") from error'))
CAUGHT = MAY_OVERFLOW.format(bad=3, update=CATCHING.format(then="pass"))
FIRST = "✗ Infinity from step 3, forward, call 0 of <root>/log (torch.log)"


def end_of(folder: Path) -> Any:
    return json.loads((folder / "run" / "rank0" / "end.json").read_text())


def test_a_script_is_stopped_and_its_recording_has_all_of_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, BAD, "--level", "function", "--guard")
    lines = done.stderr.splitlines()
    assert (done.returncode, len(done.stdout.splitlines()), lines[0]) == (1, 3, FIRST)
    assert "Traceback" not in done.stderr
    path = tmp_path / "run"
    assert lines[-2].startswith("astray: 4 steps, ")
    assert lines[-1] == f"astray: 1 alarm in 4 steps. Look closer: astray show {path} --alarms"
    assert done.stderr.count("astray show") == 1
    assert end_of(tmp_path)["ended"] == f"a guard's alarm: {FIRST[2:]}"
    run = astray.open(path)
    assert (run.steps, run.complete, run.alarms()[0].step) == ([0, 1, 2, 3], True, 3)


@pytest.mark.slow
def test_or_is_warned_in_the_words_of_the_command_and_goes_on(tmp_path: Path) -> None:
    done = run_script(tmp_path, BAD + "sys.exit(7)\n", "--guard=warn", "--spike", "1000")
    assert (done.returncode, len(done.stdout.splitlines())) == (7, 6)
    assert "next         Record the same step with --level function to see which line." in done.stderr
    assert f"All of it is in {tmp_path / 'run'}: astray show" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("astray: 1 alarm in 6 steps, ")
    assert (end_of(tmp_path)["ended"], astray.open(tmp_path / "run").steps) == ("exit: 7", [0, 1, 2, 3, 4, 5])


@pytest.mark.slow
def test_nothing_wrong_is_one_more_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, GOOD + "sys.exit(5)\n", "--guard")
    assert done.returncode == 5
    assert [line.partition(",")[0] for line in done.stderr.splitlines()] == [
        "astray: 6 steps",
        "astray: no alarm in 6 steps.",
    ]


@pytest.mark.slow
def test_a_script_that_catches_it_goes_on_and_its_exit_code_tells(tmp_path: Path) -> None:
    done = run_script(tmp_path, CAUGHT, "--level", "function", "--guard")
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr.count(FIRST)) == (1, 6, 1)
    assert end_of(tmp_path)["ended"] == "normally"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("run", "-o", "run", "--guard"), ("check", "-o", "found")], ids=lambda words: words[0]
)
def test_an_error_that_it_causes_is_shown_without_our_frames(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(WRAPPING)
    done = command(*words, "script.py")
    assert done.returncode == 1
    assert "RuntimeError: wrapped" in done.stderr
    assert "astray.guarding.trip.Tripped: ✗" in done.stderr
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert frames
    assert not [frame for frame in frames if str(Path(astray.__file__).parent) in frame]


REFUSED = [
    (["--guard", "--keep", "fingerprint"], "keep='fingerprint' counts no NaN and no infinities. A guard needs keep="),
    (["--guard", "--spike", "0.5"], "spike=0.5 is not a factor. It is a number above 1: 10 trips at ten times the"),
    (["--spike", "5"], "--spike 5 is for a guard. Give --guard, too."),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_it_cannot_do_is_said_before_the_script_runs(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError('it ran')\n")
    assert main(["run", "-o", str(tmp_path / "run"), *options, str(tmp_path / "script.py")]) == 2
    assert capsys.readouterr().err.startswith(f"astray run: {sentence}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "guard", "perturb"),
    [
        (["--guard"], "raise", None),
        (["--guard=warn", "--perturb"], "warn", 0),
        (["--perturb=3", "--guard=raise"], "raise", 3),
        ([], None, None),
    ],
    ids=str,
)
def test_the_script_may_follow_the_bare_option(words: list[str], guard: str | None, perturb: int | None) -> None:
    options = parser().parse_args(["run", "-o", "run", *words, "script.py", "--guard", "its own"])
    assert (options.guard, options.perturb, options.script) == (guard, perturb, "script.py")
    assert options.arguments == ["--guard", "its own"]
