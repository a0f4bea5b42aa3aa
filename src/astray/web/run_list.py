"""The runs that the page may open, and the session document: these runs, what is shown, and the job under way.

Runs are those named on the command line, and those in a folder named there. Nothing else is ever opened: the page
identifies a run by a number that is assigned here, and sends no paths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from astray.errors import RunError, UsageError
from astray.formatting import figures
from astray.report import checkpoints
from astray.store import CheckpointData, RunData, open_run
from astray.store.formats import formats
from astray.store.safe_paths import entries
from astray.web.views import ResultView
from astray.web.wire import Document

DEPTH = 2
MOST = 1000
"""How deep below a folder runs are searched, and how many are listed."""


class RunList:
    """Runs by number.

    >>> runs = RunList(["runs/good", "runs/bad"])
    >>> runs.named, runs.open("1")
    (['0', '1'], <Run runs/bad: torch, 6 steps, 1 rank, 858 calls, 1,698 tensors, complete>)
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths: dict[str, Path] = {}
        self._open: dict[str, RunData] = {}
        self._documents: dict[str, Document] = {}
        self._lock = threading.RLock()
        self.named: list[str] = []  # numbers of the runs that were named, not found in a folder
        for path in map(Path, paths):
            inside = [] if _is_run(path) else list(_runs_below(path, DEPTH))[:MOST]
            if inside:
                for run in inside:
                    self._add(run)
            else:
                number = self._add(path)
                self._open[number] = open_run(path)  # raises now if it cannot be read
                self.named.append(number)

    def _add(self, path: Path) -> str:
        number = str(len(self._paths))
        self._paths[number] = path
        return number

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, number: str) -> Path:
        """The path of a run. Raises UsageError for a number that was not assigned."""
        if number not in self._paths:
            raise UsageError(f"There is no run {number!r:.40}; there are {len(self._paths)}.")
        return self._paths[number]

    def open(self, number: str) -> RunData:
        """A run, opened at the first call."""
        path = self.path(number)
        with self._lock:
            if number not in self._open:
                self._open[number] = open_run(path)
            return self._open[number]

    def keep(self, number: str, run: RunData) -> None:
        """Keeps a run that was opened elsewhere, so that its tables are not read again, and makes its document."""
        with self._lock:
            self._open[number] = run
        self.document(number)

    def documents(self) -> list[Document]:
        """All runs, with what is known of those that were opened. Reads nothing."""
        return [self._documents.get(number) or self._unread(number, []) for number in self._paths]

    def document(self, number: str) -> Document:
        """One run with all that is known of it: reads its tables. Where that fails, `problems` has the error."""
        try:
            document = run_document(number, self.open(number)) | {"open": True}
        except RunError as error:
            document = self._unread(number, [str(error)])
        self._documents[number] = document
        return document

    def _unread(self, number: str, problems: list[str]) -> Document:
        path = self._paths[number]
        about: Document = {"id": number, "path": str(path), "label": path.name, "facts": [], "problems": problems}
        return about | {"steps": [], "ranks": [], "open": False}


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """The runs in a folder and in folders in it, by name; links that lead out of it are not followed."""
    if not folder.is_dir():
        return
    try:
        members = entries(folder)
    except RunError:
        return
    for entry in members:
        if _is_run(entry):
            yield entry
        elif entry.is_dir() and depth > 1:
            yield from _runs_below(entry, depth - 1)


def _is_run(path: Path) -> bool:
    return path.exists() and any(format.recognises(path) for format in formats())


# -- session -----------------------------------------------------------------------------------------------------------


Mode = Literal["live", "file"]
DONE: Document = {"state": "done", "done": 0, "total": 0, "text": ""}


def session_of(view: ResultView, options: Mapping[str, Any]) -> Document:
    """The session of a one-file report, which is about one comparison or one run."""
    runs = [run_document(str(number), run) for number, run in enumerate(view.runs)]
    return session_document("file", view.kind, runs, [run["id"] for run in runs], options, DONE)


def session_document(
    mode: Mode, kind: str, runs: list[Document], chosen: Sequence[str], options: Mapping[str, Any], job: Document
) -> Document:
    """A session; `chosen` are the numbers of the reference and the candidate, or of one run alone."""
    try:
        astray_version = version("astray")
    except PackageNotFoundError:  # run from a checkout
        astray_version = "0+unknown"
    reference, candidate = (*chosen, None, None)[:2]
    return {
        "version": astray_version,
        "mode": mode,
        "kind": kind,
        "runs": runs,
        "reference": reference,
        "candidate": candidate,
        "options": dict(options),
        "job": job,
    }


def run_document(id: str, run: RunData) -> Document:
    """A run that is open."""
    return {
        "id": id,
        "path": str(run.path),
        "label": run.path.name or str(run.path),
        "facts": [[name, text] for name, text in _facts(run)],
        "problems": run.problems,
        "steps": run.steps,
        "ranks": sorted(run.ranks),
    }


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    info = run.info
    if isinstance(run, CheckpointData):
        yield "checkpoint", checkpoints.describe(run.checkpoint)
        return
    yield "recorded", f"{info.created} with {info.framework or 'no framework'}"
    if info.command:
        yield "command", " ".join(info.command)
    yield from ((name, text) for name, text in info.versions.items())
    if info.devices:
        yield "devices", ", ".join(info.devices)
    for name in ("level", "keep"):
        if info.settings.get(name):
            value = info.settings[name]
            yield name, "+".join(map(str, value)) if isinstance(value, list) else str(value)
    if info.flight is not None:
        yield "written", f"{info.flight.written} from memory: {info.flight.why}"
    if info.perturbed is not None:
        yield "perturbed", f"its inputs, by roundings (seed {info.perturbed})"
    calls = sum(len(rank.calls) for rank in run.ranks.values())
    tensors = sum(len(rank.tensors) for rank in run.ranks.values())
    yield "calls", figures.counted(calls, "call")
    yield "tensors", figures.counted(tensors, "tensor")
    yield "complete", "yes" if run.complete else "no"
    missed = [each for rank in run.ranks.values() if rank.end is not None for each in rank.end.missed]
    yield from (("missed", f"{each.what}: {each.why} ({each.count:,}×)") for each in missed)
