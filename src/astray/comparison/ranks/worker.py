"""The worker process: it reads a job, then one rank after another, and answers with each comparison.

Started by `schedule`. It is a fresh interpreter that runs nothing of the program it works for: no main module, no fork
of its threads or of its GPU. Messages are pickles, with the bytes of arrays behind them as they are.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
import traceback
from collections.abc import Sequence
from io import FileIO
from typing import Any, NamedTuple

from astray.comparison.judge.tolerances import Tolerances
from astray.comparison.pair.matching import Matching

PROGRESS_INTERVAL = 0.05
"""Seconds between two messages about progress."""

_SIZE = struct.Struct("<Q")


class ComparisonJob(NamedTuple):
    """What to compare, in a form that can be sent: runs by their paths, metrics and what replays calls by names."""

    reference: str
    candidate: str
    noise: tuple[str, ...]
    matching: Matching
    tolerances: Tolerances
    exact: bool
    metrics: Sequence[str]
    replayer: str | None = None


class RankTask(NamedTuple):
    """Compare this rank, with so many threads."""

    rank: int
    threads: int


class ProgressMessage(NamedTuple):
    """So many pairs of values are done, of so many."""

    done: int
    total: int


class FailureMessage(NamedTuple):
    """What was raised, and where."""

    error: Exception
    trace: str


def send(stream: FileIO, message: Any) -> None:
    """Write a message."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    head = [len(parts), *(part.nbytes for part in parts)]
    for part in (memoryview(b"".join(map(_SIZE.pack, head))), *parts):
        while part.nbytes:
            part = part[stream.write(part) :]


def receive(stream: FileIO) -> Any:
    """Read a message. Raises EOFError when the other side is gone, be it in the middle of one."""
    (count,) = _SIZE.unpack(_read(stream, _SIZE.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_read(stream, count * _SIZE.size))]
    body, *buffers = (_read(stream, size) for size in sizes)
    return pickle.loads(body, buffers=buffers)  # both ends of the pipe are astray, and no other process has it


def _read(stream: FileIO, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest.nbytes:
        count = stream.readinto(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return found


def main() -> None:
    """Work until the calling process closes the pipe."""
    tasks, answers = FileIO(0, closefd=False), FileIO(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's metric prints must not get among the answers: it goes where errors go
    try:
        _serve(tasks, answers)
    except (EOFError, BrokenPipeError):  # the calling process has what it wants, or has ended
        return


def _serve(tasks: FileIO, answers: FileIO) -> None:
    from astray.comparison.measure.custom_metrics import find_metrics
    from astray.comparison.ranks.rank import JudgeOptions, RankSides, compare_rank
    from astray.stats.kernels import set_threads
    from astray.store import open_run

    job: ComparisonJob = receive(tasks)
    last_message = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_message
        if done == total or time.monotonic() - last_message > PROGRESS_INTERVAL:
            last_message = time.monotonic()
            send(answers, ProgressMessage(done, total))

    def compare(rank: int) -> Any:
        # The runs are opened anew for each rank, so that what was read of one is freed with it.
        paths = (job.reference, job.candidate, *job.noise)
        reference, candidate, *noise = (open_run(path).ranks.get(rank) for path in paths)
        judging = JudgeOptions(custom_metrics, job.tolerances, job.exact, job.replayer)
        return compare_rank(rank, RankSides(reference, candidate, tuple(noise)), job.matching, judging, progress)

    custom_metrics = find_metrics(job.metrics, ())
    while True:
        task: RankTask = receive(tasks)
        set_threads(task.threads)
        try:
            answer = compare(task.rank)
        except Exception as error:  # noqa: BLE001 - the calling process raises it
            answer = FailureMessage(_sendable(error), traceback.format_exc())
        send(answers, answer)


def _sendable(error: Exception) -> Exception:
    """The error itself, or one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever the class of the error does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
