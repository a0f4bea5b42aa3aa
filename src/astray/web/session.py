"""What the page is about: the runs that were given, what is known of each, and what is being done with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from astray.formatting import figures
from astray.report import checkpoints
from astray.store import CheckpointRun, Run
from astray.web.views import View
from astray.web.wire import Document

Mode = Literal["live", "file"]
DONE: Document = {"state": "done", "done": 0, "total": 0, "text": ""}


def session_of(view: View, options: Mapping[str, Any]) -> Document:
    """The session of a file, which is about one comparison or one run."""
    runs = [run_document(str(number), run) for number, run in enumerate(view.runs)]
    return document("file", view.kind, runs, [run["id"] for run in runs], options, DONE)


def document(
    mode: Mode, kind: str, runs: list[Document], chosen: Sequence[str], options: Mapping[str, Any], job: Document
) -> Document:
    """A session; `chosen` are the reference and the candidate, or one run alone."""
    try:
        known = version("astray")
    except PackageNotFoundError:  # run from a checkout
        known = "0+unknown"
    reference, candidate = (*chosen, None, None)[:2]
    return {
        "version": known,
        "mode": mode,
        "kind": kind,
        "runs": runs,
        "reference": reference,
        "candidate": candidate,
        "options": dict(options),
        "job": job,
    }


def run_document(id: str, run: Run) -> Document:
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


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    info = run.info
    if isinstance(run, CheckpointRun):
        yield "checkpoint", checkpoints.described(run.checkpoint)
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
    missed = [one for rank in run.ranks.values() if rank.end is not None for one in rank.end.missed]
    yield from (("missed", f"{one.what}: {one.why} ({one.count:,}×)") for one in missed)
