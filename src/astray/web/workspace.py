"""What is open in the page: runs to choose from, the comparison or run that is shown, the work under way.

`server` reads documents from here. `generation` counts what was shown: a document belongs to one of them. A comparison
runs in a thread of its own (`BackgroundJob`), which reports its progress and can be stopped.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from astray.comparison.comparison import compare
from astray.comparison.measure.evidence import Progress
from astray.errors import AstrayError, UsageError
from astray.store.formats import format_of
from astray.web.detail import detail_of
from astray.web.options import arguments_of
from astray.web.overview import overview_of
from astray.web.run_list import RunList, document
from astray.web.views import ComparisonView, RunView
from astray.web.wire import Document, encode, pack

CACHED = 64
"""Details that are kept, so that going back to a row does not wait for it again."""


class WorkspaceBusyError(AstrayError):
    """Something else is under way, or there is nothing to show yet."""


class ViewRequest(NamedTuple):
    """What the page asked to see: one run or two by their numbers, the options of the page, a run that shows noise."""

    chosen: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    noise: str | None = None


class ShownView:
    """A view and what was made of it."""

    def __init__(self, view: ComparisonView | RunView, asked: ViewRequest, generation: int) -> None:
        self.view = view
        self.asked = asked
        self.generation = generation
        self._details: dict[int, bytes] = {}

    @cached_property
    def overview(self) -> bytes:
        return encode(overview_of(self.view))

    @cached_property
    def columns(self) -> bytes:
        with self.view.lock:
            return pack(self.view.table)

    def pair(self, row: int) -> bytes:
        """The detail of a row. Raises UsageError when there is no such row."""
        if not 0 <= row < len(self.view):
            raise UsageError(f"There is no row {row}; there are {len(self.view):,}.")
        found = self._details.get(row)
        if found is None:
            found = encode(detail_of(self.view, row))
            self._details[row] = found
            for old in list(self._details)[:-CACHED]:
                self._details.pop(old, None)
        return found


class Workspace:
    """The runs, what is shown of them, and what is being done.

    fixed: arguments of `compare` that hold for every comparison and that the page cannot change, such as a mapping.
    """

    def __init__(self, shelf: RunList, fixed: Mapping[str, Any] | None = None) -> None:
        self.shelf = shelf
        self._fixed = dict(fixed or {})
        self._lock = threading.RLock()
        self._shown: ShownView | None = None
        self._job = BackgroundJob()
        self._asked = ViewRequest()

    @property
    def shown(self) -> ShownView:
        """What is shown. Raises WorkspaceBusyError when that is nothing yet."""
        found = self._shown
        if found is None:
            raise WorkspaceBusyError("Nothing has been compared yet. Choose a run, or two.")
        return found

    def session(self) -> Document:
        """The session document: the runs, what is shown, and the state of the job."""
        with self._lock:
            shown, job = self._shown, self._job.document()
            asked = self._asked if shown is None else shown.asked
        kind = "choose" if shown is None else shown.view.kind
        return {
            **document("live", kind, self.shelf.documents(), asked.chosen, asked.options, job),
            "noise": asked.noise,
            "fixed": {name: _shown(value) for name, value in self._fixed.items()},
            "generation": 0 if shown is None else shown.generation,
        }

    def look(
        self, reference: str, candidate: str | None, options: Mapping[str, Any], noise: str | None = None
    ) -> BackgroundJob:
        """Begin to compare two runs, or to read one.

        Raises UsageError for wrong options, WorkspaceBusyError while a job is running.
        """
        arguments = self._fixed | arguments_of(options)
        asked = ViewRequest((reference,) if candidate is None else (reference, candidate), options, noise)
        for number in asked.chosen:
            self.shelf.path(number)
        if noise is not None:
            arguments["noise"] = self.shelf.path(noise)
        with self._lock:
            if self._job.running:
                raise WorkspaceBusyError("A comparison is under way. Stop it first.")
            self._asked = asked

            def work(progress: Progress) -> None:
                alone = candidate is None
                view = self._read(reference) if alone else self._compare(asked.chosen, arguments, progress)
                self._show(view, asked)

            self._job = BackgroundJob(work, "comparing values" if candidate is not None else "reading the run")
            return self._job.start()

    def stop(self) -> None:
        """End what is under way, if anything is."""
        self._job.stop()

    def _compare(self, chosen: Sequence[str], arguments: dict[str, Any], progress: Progress) -> ComparisonView:
        reference, candidate = (self.shelf.path(number) for number in chosen)
        if all(_is_of_hooktools(path) for path in (reference, candidate)):  # whose users look at it first
            metrics = arguments.get("metrics") or []
            arguments = arguments | {"metrics": [*metrics, *(["mean_abs"] if "mean_abs" not in metrics else [])]}
        view = ComparisonView(compare(reference, candidate, progress=progress, **arguments))
        if arguments.get("micro") != "joined":  # else these are other tables than those of the runs
            for number, run in zip(chosen, view.runs, strict=True):
                self.shelf.hold(number, run)
        return view

    def _read(self, number: str) -> RunView:
        view = RunView(self.shelf.open(number))
        self.shelf.hold(number, view.run)
        return view

    def _show(self, view: ComparisonView | RunView, asked: ViewRequest) -> None:
        _ = view.calls  # so that the first document is there at once
        with self._lock:
            number = 1 if self._shown is None else self._shown.generation + 1
            self._shown = ShownView(view, asked, number)


def _is_of_hooktools(path: Path) -> bool:
    format = format_of(path)
    return format is not None and format.name == "hooktools"


def _shown(value: Any) -> str:
    """An argument as the page shows it."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# -- background job ----------------------------------------------------------------------------------------------------


State = Literal["idle", "running", "done", "stopped", "failed"]
Work = Callable[[Progress], None]
"""Does the work, and reports its progress: (done, total)."""


class JobStopped(BaseException):
    """Raised out of a report of progress when the work is to be stopped; no `except Exception` catches it."""


class BackgroundJob:
    """One piece of work. `idle` until it is started, then it runs once."""

    def __init__(self, work: Work | None = None, text: str = "") -> None:
        self._work = work
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.state: State = "idle"
        self.done = self.total = 0
        self.text = text
        self._thread: threading.Thread | None = None

    def start(self) -> BackgroundJob:
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
            raise JobStopped
        with self._lock:
            self.done, self.total = done, total

    def _run(self) -> None:
        assert self._work is not None, "an idle job is never started"
        try:
            self._progress(0, 0)
            self._work(self._progress)
            self._end("done", "")
        except JobStopped:
            self._end("stopped", "Stopped before it was done.")
        except AstrayError as error:
            self._end("failed", str(error))
        except Exception as error:  # noqa: BLE001 - nothing is above the thread; the page must not wait for ever
            traceback.print_exc()
            self._end("failed", f"This is a fault in astray itself, please report it: {error!r}.")

    def _end(self, state: State, text: str) -> None:
        with self._lock:
            self.state, self.text = state, text
