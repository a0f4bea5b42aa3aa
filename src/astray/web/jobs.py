"""Long work in a thread of its own, with progress that can be asked for, and a way to stop it."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Literal

from astray.comparison.measure.evidence import Progress
from astray.errors import AstrayError, UsageError
from astray.web.wire import Document

State = Literal["idle", "running", "done", "stopped", "failed"]
Work = Callable[[Progress], None]
"""Does the work, and tells how far it is: (done, total)."""


class Stopped(BaseException):
    """Raised out of a report of progress when somebody wants the work to end; nobody's `except Exception` takes it."""


class Job:
    """One piece of work. `idle` until it is started, then it runs once."""

    def __init__(self, work: Work | None = None, text: str = "") -> None:
        self._work = work
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.state: State = "idle"
        self.done = self.total = 0
        self.text = text
        self._thread: threading.Thread | None = None

    def start(self) -> Job:
        """Begin, in a thread that does not keep the program alive."""
        self.state = "running"
        thread = threading.Thread(target=self._run, name="astray comparison", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.state = "idle"
            raise UsageError(
                f"The page works in threads, and the system starts no more ({error}). Allow more of them (`ulimit -u`, "
                "or the limit of the container)."
            ) from None
        self._thread = thread
        return self

    @property
    def running(self) -> bool:
        return self.state == "running"

    def stop(self) -> None:
        """Ask it to end, at the next report of its progress."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)

    def document(self) -> Document:
        with self._lock:
            return {"state": self.state, "done": self.done, "total": self.total, "text": self.text}

    def _progress(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.done, self.total = done, total

    def _run(self) -> None:
        assert self._work is not None, "an idle job is never started"
        try:
            self._progress(0, 0)
            self._work(self._progress)
            self._end("done", "")
        except Stopped:
            self._end("stopped", "Stopped before it was done.")
        except AstrayError as error:
            self._end("failed", str(error))
        except Exception as error:  # noqa: BLE001 - the thread has nobody above it; the page must not wait for ever
            traceback.print_exc()
            self._end("failed", f"This is a fault in astray itself, please report it: {error!r}.")

    def _end(self, state: State, text: str) -> None:
        with self._lock:
            self.state, self.text = state, text
