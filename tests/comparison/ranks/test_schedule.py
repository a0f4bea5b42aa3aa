"""Ranks in processes of their own: the same result as one after another, and what happens when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray import Comparison, compare
from astray.cli import main
from astray.comparison.measure.custom_metrics import CustomMetrics
from astray.comparison.pair.matching import Matching
from astray.comparison.ranks import schedule
from astray.comparison.ranks.rank import JudgeOptions
from astray.comparison.ranks.schedule import ComparedRuns, RanksProgress, compare_in_processes, job_of, worth_it
from astray.comparison.ranks.worker import receive, send
from astray.errors import CompareError, RunError, UsageError
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import DictionaryColumn, End, RunInfo, RunWriter, open_run

STEPS = 3


def write(path: Path, *, off: float = 1.0, ranks: int = 3, keep: str = "tensors", odd: str | None = None) -> str:
    """A run of a few layers. Each rank has names and shapes of its own; `odd` is a layer more, before the last."""
    for rank in range(ranks):
        random = np.random.default_rng(rank)
        with RunWriter(path, rank, info=RunInfo.of_process(world_size=ranks)) as writer:
            seq = 0
            for step in range(STEPS):
                sites = ["stem", f"rank{rank}.fc", *([odd] if odd else []), "head", "head"]
                for number, site in enumerate(sites):
                    values = random.normal(size=(4, 3 + rank)).astype(np.float32)
                    values *= np.float32(off if step + rank > 1 and site != "stem" else 1.0)
                    writer.call(
                        Call(seq, step, 0, "module", site, "Linear", max(0, number - len(sites) + 2), "forward")
                    )
                    given, made = np.ones(3, np.float32), np.abs(values) / np.abs(values).sum(-1, keepdims=True)
                    for role, name, array in (
                        ("input", "0", given),
                        ("output", "out", made),
                        ("output", "raw", values),
                    ):
                        memory = Strided.from_numpy(array)
                        row = Tensor(seq, role, name, "float32", memory.shape, memory.stride, "cpu", False)  # type: ignore[arg-type]
                        writer.tensor(row._replace(**measure(memory)._asdict()), array if keep == "tensors" else None)
                    seq += 1
                writer.step_done()
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to compare: a right one, the same again, wrong ones, and some of other ranks, layers and contents."""
    home = tmp_path_factory.mktemp("runs")
    write(home / "good")
    write(home / "again", off=1.0 + 1e-7)
    write(home / "bad", off=1.01)
    write(home / "odd", off=1.01, odd="extra")
    write(home / "fewer", off=1.01, ranks=2)
    write(home / "stats", keep="stats")
    write(home / "bad stats", off=1.01, keep="stats")
    (home / "mine.py").write_text(METRICS)
    (home / "map.yaml").write_text("sites: {extra: head}\n")
    (home / "mine-1.dist-info").mkdir()
    (home / "mine-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (home / "mine-1.dist-info" / "entry_points.txt").write_text("[astray.metrics]\nbrought = mine:largest\n")
    return home


METRICS = """
import os, signal, sys, time
from pathlib import Path

def largest(reference, candidate):
    print("a metric may print")
    return abs(candidate - reference).max()

def picky(reference, candidate):
    if reference.shape[-1] == 4:
        raise ValueError("four is too few")
    return 1.0

def killed(reference, candidate):
    if reference.shape[-1] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def leaving(reference, candidate):
    if reference.shape[-1] == 4:
        os._exit(3)
    return 1.0

def endless(reference, candidate):
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[schedule.Worker]:
    """The workers that were started; none may be left."""
    found: list[schedule.Worker] = []

    class Counted(schedule.Worker):
        def __init__(self, job: Any) -> None:
            super().__init__(job)
            found.append(self)

    monkeypatch.setattr(schedule, "Worker", Counted)
    return found


def assert_gone(started: list[schedule.Worker]) -> None:
    assert started
    assert all(worker._process.poll() is not None for worker in started)


def assert_same(one: Comparison, other: Comparison) -> None:
    """Field by field, to the bit."""
    assert one.pairs.names == other.pairs.names
    for name in one.pairs.names:
        left, right = one.pairs[name], other.pairs[name]
        if isinstance(left, DictionaryColumn):
            assert left.values == right.values, name
            left, right = left.codes, right.codes
        assert left.dtype == right.dtype, name
        assert left.tobytes() == right.tobytes(), name
    for name in ("firsts", "others", "problems", "selected", "counts", "steps", "calls", "sources"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name  # NaN is like NaN
    orders = [[found.order for found in (*side.firsts, *side.others)] for side in (one, other)]
    assert orders[0] == orders[1]
    assert str(one) == str(other)


@pytest.mark.parametrize(
    ("reference", "candidate", "asked"),
    [
        pytest.param("good", "bad", {}, marks=pytest.mark.slow),
        ("stats", "bad stats", {}),
        pytest.param("good", "bad stats", {}, marks=pytest.mark.slow),
        pytest.param("good", "odd", {}, marks=pytest.mark.slow),
        ("good", "fewer", {}),
        ("fewer", "good", {"steps": "1:3", "ranks": [1, 2]}),
        pytest.param("good", "bad", {"noise": "again"}, marks=pytest.mark.slow),
        ("stats", "bad stats", {"noise": "again", "tolerances": {"head": 0.5}}),
        ("good", "again", {"exact": True}),
        ("good", "bad", {"metrics": ["kl", "mine.py:largest", "mine:picky", "brought"]}),
        ("good", "odd", {"mapping": "map.yaml", "sites": "head|rank"}),
        pytest.param("good", "odd", {"by": "order", "shapes": "same"}, marks=pytest.mark.slow),
        pytest.param("good", "bad", {"offset": 1, "shapes": "loose"}, marks=pytest.mark.slow),
        ("good", "odd", {"micro": "joined"}),
    ],
)
def test_the_same_as_one_after_another(folder, monkeypatch, started, reference, candidate, asked):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    alone = compare(reference, candidate, processes=1, **asked)
    assert not started
    together = compare(reference, candidate, processes=2, **asked)
    assert len(started) == 2
    assert_gone(started)
    assert_same(alone, together)
    wrong = "error > 1e-3 or verdict != identical"
    assert together.select(wrong, sort="-error").rows.tolist() == alone.select(wrong, sort="-error").rows.tolist()
    for name in ("absmax_reference", "mean_candidate"):  # which are fetched from the runs
        np.testing.assert_array_equal(together.columns[name].column, alone.columns[name].column)


def test_what_a_rank_lacks_and_what_is_torn_is_said_alike(folder, tmp_path, started):
    torn = write(tmp_path / "torn", off=1.01)
    table = tmp_path / "torn" / "rank1" / "tensors.arrows"
    table.write_bytes(table.read_bytes()[:-100])
    (tmp_path / "torn" / "rank2" / "end.json").unlink()
    alone, together = (compare(folder / "good", torn, processes=count) for count in (1, 3))
    assert len(started) == 3
    assert_same(alone, together)
    assert any("rank1/tensors.arrows is cut" in problem for problem in together.problems)
    assert not together.candidate.complete


def test_tables_are_not_read_here_again(folder):
    found = compare(folder / "stats", folder / "bad stats", processes=2)
    assert str(found)
    for run in (found.reference, found.candidate):
        assert run.steps == [0, 1, 2]
        assert all("_tensors" not in vars(rank) for rank in run.ranks.values())


def test_what_was_not_measured_takes_no_memory(folder):
    found = compare(folder / "stats", folder / "bad stats", processes=2)
    assert found.pairs["cosine"].strides == (0,)
    assert np.isnan(found.pairs["cosine"]).all()


def own(reference: Any, candidate: Any) -> float:
    return float(len(reference))


@pytest.mark.parametrize("metric", [own, "__main__:own"])
def test_a_function_stays_in_its_process(folder, started, monkeypatch, metric):
    monkeypatch.setattr(sys.modules["__main__"], "own", own, raising=False)
    found = compare(folder / "good", folder / "bad", metrics=[metric], processes=2)
    assert not started
    assert "own" in found.pairs


def test_a_run_that_is_open_stays_in_its_process(folder, started):
    compare(open_run(folder / "good"), folder / "bad", processes=2)
    assert not started


def test_one_rank_or_one_core_or_little_to_do_takes_no_process(folder, started, monkeypatch):
    compare(folder / "good", folder / "bad", ranks=1, processes=8)
    compare(folder / "good", folder / "bad")
    monkeypatch.setattr(schedule, "START", 0)
    monkeypatch.setattr(schedule, "cores", lambda: 1)
    compare(folder / "good", folder / "bad")
    assert not started
    monkeypatch.setattr(schedule, "cores", lambda: 64)
    compare(folder / "good", folder / "bad")
    assert len(started) == 3
    assert_gone(started)


@pytest.mark.parametrize(
    ("end", "worth"),
    [
        (End(complete=True, tensors=100_000), False),
        (End(complete=True, tensors=1_000_000), True),
        (End(complete=True, value_bytes=1 << 30), False),
        (End(complete=True, value_bytes=1 << 36), True),
        (None, True),
    ],
)
def test_processes_are_for_what_takes_long(runs, end, worth):
    made = [runs.Builder(), runs.Builder()]
    for builder in made:
        for rank in (0, 1):
            builder.rank(rank).end = end
    assert worth_it(ComparedRuns(made[0].run, made[1].run), [0, 1], 2) is worth


def test_values_take_longer_with_metrics_that_were_asked_for(runs):
    made = [runs.Builder(), runs.Builder()]
    for builder in made:
        for rank in (0, 1):
            builder.rank(rank).end = End(complete=True, value_bytes=1 << 28)
    both = ComparedRuns(made[0].run, made[1].run)
    assert [worth_it(both, [0, 1], 2, own) for own in (False, True)] == [False, True]


def test_progress_is_that_of_all_ranks(folder):
    told: list[tuple[int, int]] = []
    found = compare(folder / "good", folder / "bad", processes=2, progress=lambda *at: told.append(at))
    done = [at[0] for at in told]
    assert done == sorted(done)
    changed = len(found.pairs) - found.counts["identical"]
    assert told[-1] == (changed, changed)


def test_a_rank_that_has_not_begun_is_taken_to_be_like_the_others():
    told: list[tuple[int, int]] = []
    progress = RanksProgress(lambda *at: told.append(at), 3)
    progress(0, 50, 100)
    progress.finished(1)  # which had nothing to read
    progress(0, 60, 100)
    progress(2, 10, 60)
    assert told == [(50, 300), (60, 150), (70, 160)]


def test_a_worker_that_is_killed(folder, started, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(CompareError) as caught:
        compare("good", "bad", metrics=["mine.py:killed"], processes=2)
    assert str(caught.value) == (
        "The process that compared rank 1 was killed by signal 9 (SIGKILL), as happens when memory runs out. Fewer at "
        "once take less memory: --processes 1 compares one rank after another."
    )
    assert_gone(started)


def test_a_worker_that_leaves(folder, started, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["compare", "good", "bad", "--metric", "mine.py:leaving", "--processes", "3"]) == 2
    assert capsys.readouterr().err == (
        "astray compare: The process that compared rank 1 ended with exit code 3 before it was done. Fewer at once "
        "take less memory: --processes 1 compares one rank after another.\n"
    )
    assert_gone(started)


def test_what_a_worker_raises_is_raised_here(tmp_path, started):
    job = job_of((tmp_path / "no", tmp_path / "no", ()), Matching(), JudgeOptions(CustomMetrics({})), None)
    with pytest.raises(RunError, match=r"no does not exist") as caught:
        compare_in_processes(job, [0, 1], 2, RanksProgress(None, 2))
    assert "in open_run" in str(caught.value.__cause__)
    assert_gone(started)


@pytest.mark.parametrize("count", [0, -1])
def test_no_process_is_not_enough(folder, capsys, count):
    with pytest.raises(UsageError, match=rf"^Ranks cannot be compared in {count} processes; it takes 1"):
        compare(folder / "good", folder / "bad", processes=count)
    assert main(["compare", str(folder / "good"), str(folder / "bad"), f"--processes={count}"]) == 2


SCRIPT = """
import threading, time
print("the main module runs")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
import astray
found = astray.compare("good", "bad", processes=2)
print(len(found.pairs), found.first.rank)
"""


@pytest.mark.parametrize("how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in ("command", "stdin"))])
def test_the_main_module_runs_once_wherever_it_comes_from(folder, tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = {"file": [str(tmp_path / "script.py")], "command": ["-c", SCRIPT], "stdin": ["-"]}[how]
    given = SCRIPT if how == "stdin" else None
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, input=given, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("the main module runs\n108 2\n", "")


def test_without_stderr(folder):
    command = f"{sys.executable} -m astray compare good bad --metric mine.py:largest --processes 2 2>&-"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "First divergence" in done.stdout
    assert "a metric may print" not in done.stdout


@pytest.fixture
def interrupted(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A command whose two workers never come to an end, as a terminal starts it."""
    command = [sys.executable, "-m", "astray", "compare", "good", "bad", "--metric", "mine.py:endless", "--processes=2"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit deaf ears
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PIDS": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("signals", [os.kill, pytest.param(os.killpg, marks=pytest.mark.slow)])
def test_ctrl_c_ends_all(interrupted, tmp_path, signals):
    pids = [int(file.name) for file in tmp_path.iterdir()]
    signals(interrupted.pid, signal.SIGINT)
    interrupted.wait(60)
    assert interrupted.returncode == -signal.SIGINT
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]


def test_messages_keep_arrays_as_they_are():
    message = {
        "empty": np.empty(0),
        "large": np.arange(1 << 16),
        "every other": np.arange(10)[::2],
        "words": ["a", ("b", 1)],
    }
    reading, writing = os.pipe()
    with FileIO(reading) as inward, FileIO(writing, "wb") as outward:
        thread = threading.Thread(target=send, args=(outward, message))  # for a pipe holds less than that
        thread.start()
        found = receive(inward)
        thread.join()
    assert found["words"] == message["words"]
    for name in ("empty", "large", "every other"):
        np.testing.assert_array_equal(found[name], message[name])
        assert found[name].dtype == message[name].dtype


def test_a_message_that_is_cut_is_an_end():
    reading, writing = os.pipe()
    with FileIO(reading) as inward:
        with FileIO(writing, "wb") as outward:
            outward.write(b"\x01\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0half")
        with pytest.raises(EOFError):
            receive(inward)


def test_the_public_function_takes_them_too(folder):
    found = astray.compare(folder / "good", folder / "bad", processes=3)
    assert [first.rank for first in found.firsts] == [2, 1, 0]  # the earliest first
