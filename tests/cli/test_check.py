"""`astray check`: scripts that know nothing of astray, run under a guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import astray
from astray.cli import main, parser
from astray.cli.check import _settings
from cli.scripts import MAY_OVERFLOW

GOOD = MAY_OVERFLOW.format(bad=None, update="optimizer.step()")
BAD = MAY_OVERFLOW.format(bad=3, update="optimizer.step()")
FIRST = "✗ Infinity from step 3, forward, call 0 of <root>/log (torch.log)"


def check(
    folder: Path, script: str, *options: str, under: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, *under, "-m", "astray", "check", "-o", "found", *options, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def bare(folder: Path) -> str:
    """What the script prints without us, whatever its exit code."""
    return subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True).stdout


def test_a_script_is_stopped_where_infinity_reaches_the_loss(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    done = check(tmp_path, BAD)
    assert done.returncode == 1
    assert done.stdout.splitlines() == bare(tmp_path).splitlines()[:3]
    golden("check.txt", done.stderr.rstrip("\n"))
    run = astray.open(tmp_path / "found" / "step3-non-finite")
    assert run.steps == [0, 1, 2, 3]
    assert run.info.flight.why == FIRST[2:]
    assert run.info.settings["level"] == ["function"]


@pytest.mark.slow
def test_or_goes_on_and_says_so_in_its_exit_code(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    done = check(tmp_path, BAD, "--on", "warn", "--remember", "2")
    assert done.returncode == 1
    assert done.stdout == bare(tmp_path)
    golden("check_warn.txt", done.stderr.rstrip("\n"))
    assert astray.open(tmp_path / "found" / "step3-non-finite").steps == [2, 3]


@pytest.mark.slow
def test_a_script_in_which_all_is_well_runs_as_without_it(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD + "total = loss + 1\nsys.exit(7)\n")
    assert done.stdout == bare(tmp_path)
    assert done.stderr == "astray check: no alarm in 6 steps.\n"
    assert done.returncode == 7
    assert not (tmp_path / "found").exists()


@pytest.mark.slow
def test_modules_alone_name_the_module(tmp_path: Path) -> None:
    (tmp_path / "astray.yaml").write_text("level: module\n")
    done = check(tmp_path, BAD, "--config", "astray.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("✗ Infinity from step 3, forward, call 0 of <root> (Model)\n")


@pytest.mark.slow
def test_a_script_that_catches_it_goes_on_and_its_exit_code_tells(tmp_path: Path) -> None:
    caught = MAY_OVERFLOW.format(
        bad=3,
        update="""
    try:
        optimizer.step()
    except Exception as error:
        print("caught", type(error).__name__)
""",
    )
    done = check(tmp_path, caught)
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if "caught" in line] == ["caught Tripped"]
    assert len(done.stdout.splitlines()) == 7
    assert done.stderr.count(FIRST) == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("astray check: 1 alarm in 6 steps")


@pytest.mark.slow
def test_exact_stops_at_the_call_and_knows_the_element(tmp_path: Path) -> None:
    done = check(tmp_path, BAD, "--exact")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr.startswith(FIRST)
    assert "element [0, 0] of output is -inf" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "astray check: 1 alarm in 4 steps. Look closer: astray show found/step3-non-finite --alarms"
    )


@pytest.mark.slow
def test_an_exception_is_shown_as_python_shows_it_and_the_last_steps_are_written(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD + "raise ValueError('too bad')\n")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "astray/" not in "".join(lines[:-1])
    assert lines[-4:-1] == ["ValueError: too bad", "✗ ValueError in step 6: too bad", ""]
    assert lines[-1] == ("astray check: no alarm in 6 steps. Look closer: astray show found/step6-exception --risk")
    assert astray.open(tmp_path / "found" / "step6-exception").steps == [1, 2, 3, 4, 5]


def test_a_signal_that_ends_it_leaves_the_last_steps(tmp_path: Path) -> None:
    done = check(tmp_path, GOOD + "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.splitlines() == [
        "✗ SIGTERM in step 6",
        "",
        "The last steps are in found/step6-signal: astray show found/step6-signal --risk",
        "",
    ]


@pytest.mark.slow
def test_nan_in_the_step_that_an_exception_ends_is_what_is_told(tmp_path: Path) -> None:
    raising = MAY_OVERFLOW.format(bad=3, update="assert loss.isfinite(), 'the loss'; optimizer.step()")
    done = check(tmp_path, raising)
    assert done.returncode == 1
    assert "AssertionError: the loss" in done.stderr
    assert FIRST in done.stderr
    assert "✗ AssertionError" not in done.stderr


@pytest.mark.slow
def test_updates_that_a_scaler_skips_are_no_alarm(tmp_path: Path) -> None:
    done = check(
        tmp_path,
        """
        import torch
        from torch import nn
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
        for step in range(4):
            loss = 100 * model(torch.ones(4, 2)).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "skipped by a GradScaler" in done.stderr
    assert done.stderr.startswith("astray check: no alarm in 4 steps, ")


@pytest.mark.slow
def test_gradients_out_of_all_proportion(tmp_path: Path) -> None:
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(4, 2) * (1000 if step == 10 else 1)).mean().backward()
            optimizer.step()
        """
    assert check(tmp_path, script).returncode == 0
    done = check(tmp_path, script, "--spike", "100")
    assert done.returncode == 1
    assert "✗ The gradients of step 10 have a norm of " in done.stderr
    assert "Look closer: astray show found/step10-spike --risk" in done.stderr


@pytest.mark.slow
def test_what_was_not_watched_is_not_called_fine(tmp_path: Path) -> None:
    for script, options, code, said in [
        ("print('hello')", (), 2, "nothing was watched, since script.py never imported torch or paddle.\n"),
        ("import torch", (), 2, "nothing was watched: no call was recorded.\n"),
        (GOOD, ("--match", "nowhere"), 2, "nothing was watched: match, ignore, classes or scope leave out all there"),
        (GOOD, ("--ranks", "1"), 0, "nothing was watched: ranks=1 leaves this one out.\n"),
        ("import torch, sys; sys.exit(7)", (), 7, "nothing was watched: no call was recorded.\n"),
    ]:
        done = check(tmp_path, script, *options)
        assert done.returncode == code, done
        assert f"astray check: {said}" in done.stderr


@pytest.mark.slow
def test_children_that_the_script_forks_say_nothing(tmp_path: Path) -> None:
    done = check(
        tmp_path,
        GOOD
        + textwrap.dedent("""
        import multiprocessing, os, time
        fork = multiprocessing.get_context("fork")
        is_up = fork.Event()
        child = fork.Process(target=lambda: (is_up.set(), time.sleep(60)))
        child.start(); is_up.wait(); child.terminate(); child.join()
        print("child", child.exitcode)
        if os.fork():
            os.wait()
        """),
    )
    assert done.returncode == 0
    assert "child -15\n" in done.stdout
    assert [line for line in done.stderr.splitlines() if "astray" in line or "SIGTERM" in line] == [
        "astray check: no alarm in 6 steps."
    ]


@pytest.mark.slow
def test_a_module_can_be_checked_and_nothing_is_imported_before_it_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys\nprint([name for name in ('numpy', 'torch') if name in sys.modules], sys.argv[1:])\n" + BAD
    )
    done = subprocess.run(
        [sys.executable, "-m", "astray", "check", "-m", "package", "--steps", "9"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "[] ['--steps', '9']"
    assert "__main__.py:16 in Model.forward    return self.head(torch.log(h))" in done.stderr
    (found,) = (tmp_path / "astray-guard").iterdir()  # the default folder
    assert done.stderr.endswith(f"astray show astray-guard/{found.name}/step3-non-finite --alarms\n")


@pytest.mark.slow
def test_ranks_of_a_program_write_one_run(tmp_path: Path) -> None:
    done = check(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            scale = 0.0 if step == 1 and dist.get_rank() == 1 else 1.0
            optimizer.zero_grad()
            torch.log(model(torch.ones(2, 3)).square() * scale).sum().backward()
            optimizer.step()
            dist.barrier()
        """,
        under=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    )
    assert done.returncode == 1
    assert "✗ Infinity from step 1, forward, call 0 of /log (torch.log), on rank 1\n" in done.stderr
    assert "astray check, rank 1: 1 alarm in 2 steps. Look closer: astray show found/step1-non-finite" in done.stderr
    run = astray.open(tmp_path / "found" / "step1-non-finite")
    assert 1 in run.ranks
    assert run.info.flight.rank == 1


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('the script ran')")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("precious")
    for words, said in [
        (("nowhere.py",), "There is no script nowhere.py"),
        (("-m", "no.such.module"), "There is no module no.such.module"),
        (("-o", "taken", "script.py"), "taken is there already"),
        (("--level", "functions", "script.py"), "Did you mean 'function'?"),
        (("--keep", "fingerprint", "script.py"), "keep='fingerprint' counts no NaN"),
        (("--max-memory", "much", "script.py"), "max_memory='much' is not a size"),
        (("--exact", "--on", "warn", "script.py"), "exact=True stops the program, and on='warn' would let it go on"),
        (("--on", "print", "script.py"), "invalid choice: 'print'"),
        (("--remember", "0", "script.py"), "remember=0 is not a whole number of at least 1."),
        (("--remember", "few", "script.py"), "invalid"),
        (("--spike", "1", "script.py"), "spike=1.0 is not a factor"),
        (("--config", "no.yaml", "script.py"), "There is no file no.yaml"),
    ]:
        done = subprocess.run(
            [sys.executable, "-m", "astray", "check", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 2, done
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert "the script ran" not in done.stderr
    assert (tmp_path / "taken" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "level"), [([], "function"), (["--level", "module"], "module"), (["--config", "astray.yaml"], None)]
)
def test_functions_are_recorded_unless_somebody_says_otherwise(
    words: list[str], level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("astray.yaml").write_text("level: op\n")
    options = parser().parse_args(["check", *words, "script.py", "--level", "its own"])
    assert _settings(options)["level"] == level
    assert options.arguments == ["--level", "its own"]


def test_what_was_found_can_be_shown(
    tmp_path: Path,
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check(tmp_path, BAD, "--on", "warn").returncode == 1
    monkeypatch.chdir(tmp_path)
    assert main(["show", "found/step3-non-finite", "--alarms"]) == 1
    golden("alarms.txt", capsys.readouterr().out.rstrip("\n"))
    assert main(["show", "found/step3-non-finite"]) == 0
    assert f" from memory: {FIRST[2:]}" in " ".join(capsys.readouterr().out.split())
