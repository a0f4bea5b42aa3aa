"""Compares ranks in processes of their own, as many at a time as there are cores.

Reads the answers of `worker` and hands out ranks, all in the thread that asked, so that progress is told there. The
result is that of comparing one rank after another, to the bit. A worker that dies ends the comparison with a sentence;
whatever ends it here, Ctrl-C too, ends the workers.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from io import FileIO
from typing import cast

from astray.comparison.ranks.rank import Compared
from astray.comparison.ranks.schedule import RanksProgress, cores
from astray.comparison.ranks.worker import Failed, Job, Progressed, Task, receive, send
from astray.errors import CompareError
from astray.process import threads_asked

PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1:]; "
    "from astray.comparison.ranks.worker import main; main()"
)
"""Ctrl-C reaches every process of a terminal; here it is for the one that asked to decide. Modules come from where it
has them."""


def compare_in_processes(job: Job, ranks: Sequence[int], processes: int, progress: RanksProgress) -> list[Compared]:
    """Compare these ranks, so many at once. Raises what a worker raised, or CompareError when one is lost."""
    waiting = deque(ranks)
    found: dict[int, Compared] = {}
    threads = threads_asked() or cores()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as ready:
        for _ in range(processes):
            worker = stack.enter_context(Worker(job))
            worker.compare(waiting.popleft(), max(1, threads // processes))
            ready.register(worker.answers, selectors.EVENT_READ, worker)
        while len(found) < len(ranks):
            for key, _ in ready.select():
                worker = key.data
                answer = worker.answer()
                if isinstance(answer, Progressed):
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

    def __init__(self, job: Job) -> None:
        self.rank = -1
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c", PROGRAM]
        command += [place for place in sys.path if isinstance(place, str)]
        errors = None if sys.__stderr__ is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        )
        self._tasks = cast(FileIO, self._process.stdin)
        self.answers = cast(FileIO, self._process.stdout)
        self._job: Job | None = job

    def compare(self, rank: int, threads: int) -> None:
        """Ask for a rank."""
        self.rank = rank
        with contextlib.suppress(BrokenPipeError):  # it is dead; who reads its answer is told
            if self._job is not None:
                send(self._tasks, self._job)
                self._job = None
            send(self._tasks, Task(rank, threads))

    def answer(self) -> Compared | Progressed:
        """What it says next."""
        try:
            answer = receive(self.answers)
        except EOFError:
            raise CompareError(
                f"The process that compared rank {self.rank} {_how(self._process.wait())}. Fewer at once take less "
                "memory: --processes 1 compares one rank after another."
            ) from None
        if isinstance(answer, Failed):
            raise answer.error from _Elsewhere(answer.trace)
        return cast("Compared | Progressed", answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it holds nothing that is worth saving
        self._process.wait()
        self._tasks.close()
        self.answers.close()


class _Elsewhere(Exception):  # noqa: N818 - shows as the cause of an error
    """Where in another process an error was raised."""

    def __str__(self) -> str:
        return f"in a process that compared a rank:\n{self.args[0]}"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} before it was done"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was killed by signal {-code} ({name})" + (", as happens when memory runs out" if name == "SIGKILL" else "")
