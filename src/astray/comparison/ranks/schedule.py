"""Compares all ranks of two runs: one after another, or in worker processes where that saves time.

Reads the runs and the answers of `worker`, feeds `comparison`. The result is the same either way, to the bit and in the
same order. Ranks are handed out by the calling thread, which also reports progress. A worker that dies ends the
comparison with a sentence; whatever ends the comparison, Ctrl-C too, ends the workers.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from io import FileIO
from typing import Any, NamedTuple, cast

from astray.comparison.measure.evidence import Progress
from astray.comparison.pair.matching import Matching
from astray.comparison.ranks.rank import JudgeOptions, RankComparison, RankSides, compare_rank
from astray.comparison.ranks.worker import ComparisonJob, FailureMessage, ProgressMessage, RankTask, receive, send
from astray.errors import CompareError, UsageError
from astray.process import configured_threads
from astray.store import RunData

START = 0.5
"""Seconds to start processes and to send their results back: measured by `benchmarks/compare_ranks.py`."""

SECONDS_A_ROW = 1.3e-6
SECONDS_A_BYTE = 1 / 8e9
SECONDS_A_BYTE_OF_METRICS = 1 / 1e8
"""Seconds of one process for a pair of tensors, for a byte of kept values, and for one that custom metrics read."""


class ComparedRuns(NamedTuple):
    """What is compared; `noise` are further recordings of the reference."""

    reference: RunData
    candidate: RunData
    noise: tuple[RunData, ...] = ()

    def sides(self, rank: int) -> RankSides:
        """One rank of each."""
        noise = tuple(run.ranks.get(rank) for run in self.noise)
        return RankSides(self.reference.ranks.get(rank), self.candidate.ranks.get(rank), noise)


def compare_ranks(
    runs: ComparedRuns,
    matching: Matching,
    judging: JudgeOptions,
    job: ComparisonJob | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[RankComparison]:
    """Compare every selected rank, `processes` at once. `job` is the same for workers; None where they cannot do it."""
    if processes is not None and processes < 1:
        raise UsageError(f"Ranks cannot be compared in {processes} processes; it takes 1, which is this one, or more.")
    ranks = matching.ranks_of(runs.reference, runs.candidate)
    of_all = RanksProgress(progress, len(ranks))
    count = min(processes or cores(), len(ranks))
    if job is None or count < 2 or (processes is None and not worth_it(runs, ranks, count, bool(job.metrics))):
        return [_compare(rank, runs, matching, judging, of_all) for rank in ranks]

    compared = compare_in_processes(job, ranks, count, of_all)
    for rank_comparison in compared:
        for run, summary in zip(runs[:2], rank_comparison.accounts, strict=True):
            if summary is not None:
                run.ranks[rank_comparison.rank].summary = summary  # else the tables are read once more for it
    return compared


def _compare(
    rank: int, runs: ComparedRuns, matching: Matching, judging: JudgeOptions, progress: RanksProgress
) -> RankComparison:
    def report(done: int, total: int) -> None:
        progress(rank, done, total)

    comparison = compare_rank(rank, runs.sides(rank), matching, judging, report)
    progress.finished(rank)
    return comparison


def job_of(
    runs: Sequence[Any], matching: Matching, judging: JudgeOptions, metrics: Sequence[Any] | None
) -> ComparisonJob | None:
    """What worker processes need, or None when they cannot do the work.

    A run that is open already may be of any kind, and has its tables read; a function does not exist in another
    process, nor does one of the main module, which is not run again.
    """
    reference, candidate, noise = runs
    paths = all(isinstance(run, str | os.PathLike) for run in (reference, candidate, *noise))
    named = all(isinstance(metric, str) and not metric.startswith("__main__:") for metric in metrics or ())
    interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)  # and not a program made of one
    if not paths or not named or not interpreter or os.name != "posix":
        return None
    noise_paths = tuple(os.fspath(run) for run in noise)
    names = tuple(metrics or ())
    return ComparisonJob(
        os.fspath(reference),
        os.fspath(candidate),
        noise_paths,
        matching,
        judging.tolerances,
        judging.exact,
        names,
        judging.replayer,
    )


def cores() -> int:
    """The cores this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worth_it(runs: ComparedRuns, ranks: Sequence[int], processes: int, with_custom_metrics: bool = False) -> bool:
    """Whether so many processes save more time than it takes to start them.

    The end of each recording says how many rows and bytes it has; one without an end may be of any size.
    """
    each = SECONDS_A_BYTE_OF_METRICS if with_custom_metrics else SECONDS_A_BYTE
    seconds = 0.0
    for run in (runs.reference, runs.candidate, *runs.noise):
        for rank in filter(None, map(run.ranks.get, ranks)):
            if rank.end is None:
                return True
            seconds += (rank.end.tensors * SECONDS_A_ROW + rank.end.value_bytes * each) / 2
    return seconds * (1 - 1 / processes) > START


class RanksProgress:
    """The progress of all ranks as one. A rank that has not begun is taken to have as much to do as the others.

    >>> progress = RanksProgress(print, ranks=2)
    >>> progress(0, 50, 100)
    50 200
    >>> progress(1, 10, 60)
    60 160
    """

    def __init__(self, progress: Progress | None, ranks: int) -> None:
        self._progress = progress
        self._ranks = ranks
        self._done: dict[int, int] = {}
        self._total: dict[int, int] = {}

    def __call__(self, rank: int, done: int, total: int) -> None:
        """So many pairs of this rank are done."""
        self._done[rank], self._total[rank] = done, total
        if self._progress is not None:
            self._progress(sum(self._done.values()), sum(self._total.values()) * self._ranks // len(self._total))

    def finished(self, rank: int) -> None:
        """This rank is done, also if it never reported progress."""
        self._total.setdefault(rank, 0)


# -- worker processes --------------------------------------------------------------------------------------------------


PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1:]; "
    "from astray.comparison.ranks.worker import main; main()"
)
"""A worker has the `sys.path` of the calling process, and ignores Ctrl-C, which reaches both: the caller kills it."""


def compare_in_processes(
    job: ComparisonJob, ranks: Sequence[int], processes: int, progress: RanksProgress
) -> list[RankComparison]:
    """Compare these ranks, so many at once. Raises what a worker raised, or CompareError when one is lost."""
    waiting = deque(ranks)
    found: dict[int, RankComparison] = {}
    threads = configured_threads() or cores()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
        for _ in range(processes):
            worker = stack.enter_context(Worker(job))
            worker.compare(waiting.popleft(), max(1, threads // processes))
            ready.register(worker.answers, selectors.EVENT_READ, worker)
        while len(found) < len(ranks):
            for key, _ in ready.select():
                worker = key.data
                answer = worker.answer()
                if isinstance(answer, ProgressMessage):
                    progress(worker.rank, *answer)
                    continue
                found[worker.rank] = answer
                progress.finished(worker.rank)
                if waiting:  # the last ranks share what threads there are
                    busy = min(processes, len(ranks) - len(found))
                    worker.compare(waiting.popleft(), max(1, threads // busy))
    return [found[rank] for rank in ranks]


class Worker:
    """A process that compares ranks, one at a time; killed when its `with` ends."""

    def __init__(self, job: ComparisonJob) -> None:
        self.rank = -1
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c", PROGRAM]
        command += [place for place in sys.path if isinstance(place, str)]
        errors = None if sys.__stderr__ is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        )
        self._tasks = cast(FileIO, self._process.stdin)
        self.answers = cast(FileIO, self._process.stdout)
        self._job: ComparisonJob | None = job

    def compare(self, rank: int, threads: int) -> None:
        """Send it a rank to compare."""
        self.rank = rank
        with contextlib.suppress(BrokenPipeError):  # it is dead, which `answer` reports
            if self._job is not None:
                send(self._tasks, self._job)
                self._job = None
            send(self._tasks, RankTask(rank, threads))

    def answer(self) -> RankComparison | ProgressMessage:
        """Its next message."""
        try:
            answer = receive(self.answers)
        except EOFError:
            raise CompareError(
                f"The process that compared rank {self.rank} {_how_it_ended(self._process.wait())}. "
                "Fewer at once take less memory: --processes 1 compares one rank after another."
            ) from None
        if isinstance(answer, FailureMessage):
            raise answer.error from _WorkerError(answer.trace)
        return cast("RankComparison | ProgressMessage", answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it holds nothing that is worth saving
        self._process.wait()
        self._tasks.close()
        self.answers.close()


class _WorkerError(Exception):
    """The traceback of an error that a worker raised."""

    def __str__(self) -> str:
        return f"in a process that compared a rank:\n{self.args[0]}"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} before it was done"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was killed by signal {-code} ({name})" + (", as happens when memory runs out" if name == "SIGKILL" else "")
