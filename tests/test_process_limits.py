"""Limits of the system, real ones: a file that may not grow, no thread to be had, a wrong number of threads.

Each command runs in a process of its own under such a limit, and answers with a sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from astray.errors import UsageError
from astray.process import configured_threads
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter, open_run

NO_THREADS = "resource.setrlimit(resource.RLIMIT_STACK, (1 << 46, resource.RLIM_INFINITY))"
"""A stack of 64 TiB for each thread, for which the system has no room: none can be started."""

SOURCE = Path(__file__).parents[1] / "src"
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # Python would leave half-written bytecode for every later process
SMALL_FILES = "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with more than a file of 8 kB can hold."""
    return record(tmp_path / "run")


def record(path: Path, size: int = 64, factor: float = 1.0) -> Path:
    with RunWriter(path, info=RunInfo.of_process(framework="torch", settings={"keep": ["stats", "tensors"]})) as writer:
        for seq in range(20):
            writer.call(Call(seq, seq // 4, 0, "module", f"h.{seq % 4}", "Linear", 0, "forward"))
            array = np.full((size, 16), seq * factor, np.float32)
            found = measure(Strided.from_numpy(array))
            tensor = Tensor(seq, "output", "out", "float32", (size, 16), (16, 1), "cpu", False, *found)
            writer.tensor(tensor, array)
    return path


def under(limit: str, *words: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `astray` with these words under a limit, in a process that has it from its first moment on."""
    program = (
        f"import os, resource, sys; {limit}; "
        "os.execv(sys.executable, [sys.executable, '-c', 'import sys; from astray.cli import main; sys.exit(main())', "
        "*sys.argv[1:]])"
    )
    command = [sys.executable, "-c", program, *map(str, words)]
    known = {"PATH": "/usr/bin", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE), **NO_BYTECODE}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=known | (environment or {})
    )


@pytest.mark.parametrize("command", ["--json", "--html", "--xlsx", "--junit", "--csv"])
def test_a_report_that_may_not_grow(run: Path, tmp_path: Path, command: str) -> None:
    if command == "--html" and not (SOURCE / "astray/web/static/page.js").exists():
        pytest.skip("the page was not built")
    other = record(tmp_path / "other", factor=1.5)
    found = under(SMALL_FILES, "compare", run, other, command, tmp_path / "report")
    assert "Traceback" not in found.stderr
    if found.returncode == 2:
        assert "files may have 8,192 bytes here (raise that with `ulimit -f unlimited`)." in found.stderr


@pytest.mark.parametrize("name", ["astray", "msprobe", "saving_hook", "torch_npu", "hooktools"])
def test_a_conversion_that_may_not_grow_says_so(run: Path, tmp_path: Path, name: str) -> None:
    found = under(SMALL_FILES, "convert", record(tmp_path / "large", 4096), tmp_path / "out", "--to", name)
    assert found.returncode == 2, found.stdout
    assert "Traceback" not in found.stderr
    assert "File too large: files may have 8,192 bytes here" in found.stderr


def test_files_of_values_fit_into_what_is_allowed(tmp_path: Path) -> None:
    """A file of values is made at its full size, which a limit of 300 kB would refuse."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "sys.path.insert(0, sys.argv[2]); from pathlib import Path; from test_process_limits import record; "
        "record(Path(sys.argv[1]), 64)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), str(Path(__file__).parent)]
    subprocess.run(command, check=True, timeout=300, env=os.environ | NO_BYTECODE)
    run = open_run(tmp_path / "run")
    assert run.problems == []
    values = run.ranks[0].verified(19)
    assert values is not None
    assert values.min() == values.max() == 19


def test_without_threads_runs_are_still_compared(run: Path, tmp_path: Path) -> None:
    found = under(NO_THREADS, "compare", run, record(tmp_path / "other"))
    assert (found.returncode, found.stderr) == (0, "")
    assert "No divergence" in found.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "RUN", "OUT", "--to", "astray"], "takes a thread of its own, and the system starts no more"),
        (["view", "RUN", "--no-browser"], "The page works in threads, and the system starts no more"),
    ],
)
def test_without_threads_what_needs_them_says_so(run: Path, tmp_path: Path, words: list[str], said: str) -> None:
    found = under(NO_THREADS, *({"RUN": run, "OUT": tmp_path / "out"}.get(word, word) for word in words))
    assert found.returncode == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("given", ["abc", "-3", "1.5", "٣"])
def test_a_wrong_number_of_threads(run: Path, given: str) -> None:
    found = under("None", "show", run, environment={"ASTRAY_THREADS": given, "PYTHONUTF8": "1"})
    assert found.returncode == 2
    assert found.stderr == (
        f"astray show: ASTRAY_THREADS={given!r} is not a number of threads. Set it to a whole number from 1 on, or "
        "unset it for one thread for each core.\n"
    )


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, threads in (("", None), ("0", None), (" 3 ", 3), ("9" * 5000, 999_999_999)):
        monkeypatch.setenv("ASTRAY_THREADS", given)
        assert configured_threads() == threads
    monkeypatch.setenv("ASTRAY_THREADS", "two")
    with pytest.raises(UsageError, match="ASTRAY_THREADS='two'"):
        configured_threads()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "RUN", "RUN", "--offset", "9" * 30], "it is added to step numbers, so it is a whole number up to"),
        (["compare", "RUN", "RUN", "--top", "-5"], "-5 rows cannot be shown. Give a number from 0 on."),
        (["show", "RUN", "--top", "-5"], "-5 rows cannot be shown. Give a number from 0 on."),
        (["show", "RUN", "--risk", "--top", "-5"], "-5 rows cannot be shown. Give a number from 0 on."),
    ],
)
def test_numbers_that_mean_nothing(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from astray.cli import main

    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""


def test_too_little_memory_is_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from astray.cli import main
    from astray.report import listing

    def render(*_: object, **__: object) -> str:
        raise MemoryError

    monkeypatch.setattr(listing, "render", render)
    assert main(["show", str(run)]) == 2
    assert "astray show: there is not enough memory for this." in capsys.readouterr().err
