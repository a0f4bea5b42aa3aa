"""What `locate` has found as text, and as JSON: the verdict, suspects, what was tried on them, what would tell more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from astray.comparison.divergence import Divergence
from astray.formatting.page import BOLD, GREEN, RED, WIDTH, YELLOW, TextPage
from astray.locate.located import Fault, Located, Trial
from astray.process import relative_to_cwd
from astray.report.text import answer, cause_of, error_of
from astray.wording import counted, printable

_NOT_PROVEN = "no trial shows that this call alone makes the difference"


def render(located: Located, *, width: int = WIDTH, colour: bool = False) -> str:
    """The report as text."""
    page = TextPage(width, colour)
    steps = counted(len(located.comparison.steps), "step")
    title = printable(f"{relative_to_cwd(located.reference)}  →  {located.program}")
    page.line(page.paint(title, BOLD) + f"        {steps} compared")
    page.line()
    if located.faults:
        for number, fault in enumerate(located.faults):
            _fault(page, fault, located.trials if not number else [])
        _remaining(page, located)
    else:
        _headline(page, located)
        _trials(page, located.trials)
        page.line()
    if located.hints:
        page.entry("to tell more", located.hints, margin=0)
    page.entry("recordings", f"{relative_to_cwd(located.folder)}, with what the program printed", margin=0)
    return page.text()


def _headline(page: TextPage, located: Located) -> None:
    """The answer where no call was looked at closer."""
    text, colour = {
        "agrees": (f"✓ {answer(located.comparison)}", GREEN),
        "cannot tell": (f"? Cannot tell: {located.doubt}", YELLOW),
    }.get(located.verdict, (f"✗ {answer(located.comparison)}", RED))
    for line in page.folded(text, later_indent="  "):
        page.line(page.paint(line, colour))


def _fault(page: TextPage, fault: Fault, before: Sequence[Trial]) -> None:
    """A suspect with its trials. before: those about the program as a whole."""
    found = fault.divergence
    head = f"✗ {'Proven' if fault.proven else 'Not proven'}: {found.place.full}"
    for line in page.folded(head, later_indent="    "):
        page.line(page.paint(line, RED if fault.proven else YELLOW))
    if found.frame is not None:
        page.code(_where(found), found.frame.code)
    page.entry("error", error_of(found))
    page.entry("cause", cause_of(found))
    _trials(page, [*before, *fault.trials])
    if not fault.proven:
        page.entry("so", _NOT_PROVEN)
    page.line()


def _trials(page: TextPage, trials: Sequence[Trial]) -> None:
    for trial in trials:
        page.entry(trial.name, trial.text)


def _remaining(page: TextPage, located: Located) -> None:
    """What is wrong besides the faults that were followed."""
    last = located.faults[-1]
    if last.proven and last.rest is not None:
        for line in page.folded(f"Besides, {last.rest.place} is wrong still. It was not looked at."):
            page.line(line)
        page.line()


def _where(found: Divergence) -> str:
    assert found.frame is not None
    return f"{PurePath(found.frame.file).name}:{found.frame.line} in {found.frame.function}"


def as_json(located: Located) -> str:
    """The result as JSON: verdict, faults with their trials, hints."""
    content = {
        "reference": str(located.reference),
        "program": located.program,
        "folder": str(located.folder),
        "verdict": located.verdict,
        "doubt": located.doubt,
        "trials": [_trial_as_json(trial) for trial in located.trials],
        "faults": [_fault_as_json(fault) for fault in located.faults],
        "hints": located.hints,
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _fault_as_json(fault: Fault) -> dict[str, Any]:
    found = fault.divergence
    names = ("rank", "step", "micro", "site", "type", "call", "phase", "role", "path", "cause")
    return {
        "proven": fault.proven,
        **{name: getattr(found, name) for name in names},
        "error": error_of(found),
        "evidence": list(found.evidence),
        "line": None if found.frame is None else _where(found),
        "trials": [_trial_as_json(trial) for trial in fault.trials],
        "rest": None if fault.rest is None else str(fault.rest.place),
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    return {**trial._asdict(), "run": None if trial.run is None else str(trial.run)}
