"""What is open in the page: runs to choose from, the comparison or run that is shown, the job under way.

`server` reads documents from here. `generation` is the number of the shown view, so that the page can tell documents of
an earlier one. A comparison runs in a thread (`BackgroundJob`), which reports its progress and can be stopped.
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
from astray.web.run_list import RunList, session_document
from astray.web.views import ComparisonView, RunView
from astray.web.wire import Document, encode, pack

CACHED = 64
"""Details that are kept, so that going back to a row is immediate."""


class WorkspaceBusyError(AstrayError):
    """Another job is under way, or there is nothing to show yet."""


class ViewRequest(NamedTuple):
    """What the page requests: one run or two by their numbers, its options, and a noise run."""

    chosen: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    noise: str | None = None


class ShownView:
    """A view, and the documents made of it."""

    def __init__(self, view: ComparisonView | RunView, request: ViewRequest, generation: int) -> None:
        self.view = view
        self.request = request
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
        detail = self._details.get(row)
        if detail is None:
            detail = encode(detail_of(self.view, row))
            self._details[row] = detail
            for old in list(self._details)[:-CACHED]:
                self._details.pop(old, None)
        return detail


class Workspace:
    """The runs, the view that is shown, and the job under way.

    fixed: arguments of `compare` that hold for every comparison and that the page cannot change, such as a mapping.
    replayer: what executes calls again for a comparison, as `compare` takes it.
    """

    def __init__(self, runs: RunList, fixed: Mapping[str, Any] | None = None, replayer: str | None = None) -> None:
        self.runs = runs
        self._fixed = dict(fixed or {})
        self._replayer = replayer
        self._lock = threading.RLock()
        self._shown: ShownView | None = None
        self._job = BackgroundJob()
        self._request = ViewRequest()

    @property
    def shown(self) -> ShownView:
        """The view that is shown. Raises WorkspaceBusyError when there is none yet."""
        shown = self._shown
        if shown is None:
            raise WorkspaceBusyError("Nothing has been compared yet. Choose a run, or two.")
        return shown

    def session(self) -> Document:
        """The session document: the runs, what is shown, and the state of the job."""
        with self._lock:
            shown, job = self._shown, self._job.document()
            request = self._request if shown is None else shown.request
        kind = "choose" if shown is None else shown.view.kind
        return {
            **session_document("live", kind, self.runs.documents(), request.chosen, request.options, job),
            "noise": request.noise,
            "fixed": {name: _shown(value) for name, value in self._fixed.items()},
            "generation": 0 if shown is None else shown.generation,
        }

    def open(
        self, reference: str, candidate: str | None, options: Mapping[str, Any], noise: str | None = None
    ) -> BackgroundJob:
        """Begin to compare two runs, or to read one.

        Raises UsageError for wrong options, WorkspaceBusyError while a job is running.
        """
        arguments = self._fixed | arguments_of(options)
        request = ViewRequest((reference,) if candidate is None else (reference, candidate), options, noise)
        for number in request.chosen:
            self.runs.path(number)
        if noise is not None:
            arguments["noise"] = self.runs.path(noise)
        with self._lock:
            if self._job.running:
                raise WorkspaceBusyError("A comparison is under way. Stop it first.")
            self._request = request

            def work(progress: Progress) -> None:
                is_one_run = candidate is None
                view = self._read(reference) if is_one_run else self._compare(request.chosen, arguments, progress)
                self._show(view, request)

            self._job = BackgroundJob(work, "comparing values" if candidate is not None else "reading the run")
            return self._job.start()

    def stop(self) -> None:
        """Stops the job under way, if there is one."""
        self._job.stop()

    def _compare(self, chosen: Sequence[str], arguments: dict[str, Any], progress: Progress) -> ComparisonView:
        reference, candidate = (self.runs.path(number) for number in chosen)
        if all(_is_of_hooktools(path) for path in (reference, candidate)):  # the metric that its users look at first
            metrics = arguments.get("metrics") or []
            arguments = arguments | {"metrics": [*metrics, *(["mean_abs"] if "mean_abs" not in metrics else [])]}
        view = ComparisonView(compare(reference, candidate, progress=progress, replayer=self._replayer, **arguments))
        if arguments.get("micro") != "joined":  # joined runs have other tables than the files
            for number, run in zip(chosen, view.runs, strict=True):
                self.runs.keep(number, run)
        return view

    def _read(self, number: str) -> RunView:
        view = RunView(self.runs.open(number))
        self.runs.keep(number, view.run)
        return view

    def _show(self, view: ComparisonView | RunView, request: ViewRequest) -> None:
        _ = view.calls  # computed now, so that the first document takes no time
        with self._lock:
            number = 1 if self._shown is None else self._shown.generation + 1
            self._shown = ShownView(view, request, number)


def _is_of_hooktools(path: Path) -> bool:
    format = format_of(path)
    return format is not None and format.name == "hooktools"


def _shown(value: Any) -> str:
    """An argument as the page shows it."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# -- background job ----------------------------------------------------------------------------------------------------


State = Literal["idle", "running", "done", "stopped", "failed"]
Work = Callable[[Progress], None]
"""A function that does the work; its argument is called with the progress, (done, total)."""


class JobStopped(BaseException):
    """Raised by a progress report to stop the work; a BaseException, so that `except Exception` does not catch it."""


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
        """Begins, in a thread that does not keep the program alive."""
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
        """Makes it end at its next progress report."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> None:
        """Waits until it has ended."""
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
        except Exception as error:  # noqa: BLE001 - nothing else would report it, and the page would wait for ever
            traceback.print_exc()
            self._end("failed", f"This is a fault in astray itself, please report it: {error!r}.")

    def _end(self, state: State, text: str) -> None:
        with self._lock:
            self.state, self.text = state, text
