"""NaN and infinity for a terminal: the call that made them, where, why, and what they reached, on one screen.

Takes `Findings` or an `Alarm` and returns text, laid out like the report of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from astray.formatting import figures
from astray.formatting.page import DIM, GREEN, MARGIN, RED, WIDTH, YELLOW, TextPage
from astray.wording import printable

if TYPE_CHECKING:
    from astray.nonfinite.alarm import Alarm, CallLocation, TensorSummary
    from astray.nonfinite.findings import Findings

_MOST_TENSORS = 6
_MOST_OTHERS = 8
_MOST_SURFACED = 3
_MOST_CANDIDATES = 6


def render(findings: Findings, *, width: int = WIDTH, colour: bool = False) -> str:
    """All findings: the first alarm in full, the others in a line each."""
    page = TextPage(width, colour)
    if not findings and findings.notes:
        seen = "≈ No NaN or infinity is seen to reach a result, a gradient or a weight. The notes say what is missing."
        for line in page.folded(seen, later_indent=" " * MARGIN):
            page.line(page.paint(line, YELLOW))
    elif not findings:
        page.line(page.paint("✓ No NaN or infinity reached a result, a gradient or a weight.", GREEN))
    for alarm in findings[:1]:
        _alarm(page, alarm)
    others = [f"{location_of(other)}: {other.kind.word}" for other in findings[1 : 1 + _MOST_OTHERS]]
    if others:
        page.line()
        page.entry("by itself", ["These have other origins:", *others])
        left = len(findings) - 1 - len(others)
        page.entry("", f"and {left:,} more") if left else None
    notes = list(notes_of(findings))
    if notes:
        page.line()
        page.entry("notes", notes, margin=0)
    return page.text()


def render_alarm(alarm: Alarm, *, width: int = WIDTH, colour: bool = False) -> str:
    """One alarm in full."""
    page = TextPage(width, colour)
    _alarm(page, alarm)
    return page.text()


def _alarm(page: TextPage, alarm: Alarm) -> None:
    for line in page.folded(f"✗ {non_finite_word(alarm)} from {location_of(alarm)}", later_indent=" " * MARGIN):
        page.line(page.paint(line, RED))
    _frame(page, alarm.origin)
    if alarm.enclosing:
        page.entry("inside", " › ".join(f"{site} ({type_})" if type_ else site for site, type_ in alarm.enclosing))
    page.entry("one of", _candidates(alarm)) if alarm.candidates else None
    page.entry("kind", f"{alarm.kind.word}. {alarm.kind.text}")
    _tensors(page, alarm)
    page.entry("surfaced", _surfaced(alarm))
    if len(alarm.chain) > 1:
        page.entry("way there", _chain(alarm))
    page.entry("ranks", f"on ranks {', '.join(map(str, alarm.ranks))}") if len(alarm.ranks) > 1 else None
    page.entry("later", _later(alarm)) if alarm.later else None
    page.entry("next", alarm.kind.advice)


def non_finite_word(alarm: Alarm) -> str:
    """Whether it is NaN or infinity."""
    statistics = alarm.offenders[0].statistics
    return "NaN" if statistics.nan else "Infinity"


def location_of(alarm: Alarm) -> str:
    """The call that NaN or infinity come from."""
    micro = f", micro {alarm.micro}" if alarm.micro else ""
    rank = f", on rank {alarm.rank}" if alarm.rank else ""
    if alarm.candidates:
        return f"step {alarm.step}{micro}, backward, on the way to the gradient of {alarm.origin.site}{rank}"
    return f"step {alarm.step}{micro}, {alarm.origin.phase}, call {alarm.origin.call} of {alarm.origin.name}{rank}"


def _frame(page: TextPage, origin: CallLocation) -> None:
    if origin.frame is None:
        return
    call = ", its forward call" if origin.phase == "backward" else ""
    line = f"{PurePath(origin.frame.file).name}:{origin.frame.line} in {origin.frame.function}{call}"
    page.code(line, origin.frame.code)


def _tensors(page: TextPage, alarm: Alarm) -> None:
    """A table of the origin's tensors: the bad ones, then its inputs."""
    shown = [*alarm.offenders, *alarm.given][:_MOST_TENSORS]
    rows = [_cells(tensor) for tensor in shown]
    head = ("", "tensor", "min", "max", "zeros", "NaN, Inf")
    wide = [max(len(row[at]) for row in [head, *rows]) + 2 for at in range(len(head))]
    page.line()
    page.line(" " * MARGIN + page.paint("".join(cell.ljust(size) for cell, size in zip(head, wide, strict=True)), DIM))
    for row in rows:
        page.line(" " * MARGIN + "".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)))
    for tensor in shown:
        if tensor.first is not None:
            whole = tensor.first.whole
            name = tensor.name if whole is None else f"{tensor.name}, of {figures.shape(whole)} in all,"
            page.entry("first", f"{tensor.first} of {name} is {tensor.first.value}")
    page.line()


def _cells(tensor: TensorSummary) -> tuple[str, ...]:
    statistics = tensor.statistics
    numbers = (figures.statistic(statistics.min), figures.statistic(statistics.max), f"{statistics.zeros:,}")
    name, dtype = printable(tensor.name), printable(tensor.dtype)
    return (name, f"{dtype} {figures.shape(tensor.shape)}", *numbers, figures.non_finite(statistics))


def _candidates(alarm: Alarm) -> str:
    """The calls whose backward may be the origin, those next to where it showed first."""
    names = [call.name for call in alarm.candidates]
    more = len(names) - _MOST_CANDIDATES
    return f"{f'… {more:,} more, ' if more > 0 else ''}{', '.join(names[-_MOST_CANDIDATES:])}"


def _surfaced(alarm: Alarm) -> str:
    shown = [str(point) for point in alarm.surfaced[:_MOST_SURFACED]]
    more = len(alarm.surfaced) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _chain(alarm: Alarm) -> str:
    names = [
        f"{call.site}{' (backward)' if call.phase == 'backward' and alarm.origin.phase != 'backward' else ''}"
        for call in alarm.chain
    ]
    if alarm.skipped:
        names.insert(len(names) // 2, f"… {figures.counted(alarm.skipped, 'more call')} …")
    return " → ".join(names)


def _later(alarm: Alarm) -> str:
    steps = alarm.later
    shown = ", ".join(map(str, steps[:4])) + (f" … {steps[-1]}" if len(steps) > 4 else "")
    return f"also to blame for what is wrong in step{'s' * (len(steps) > 1)} {shown}"


def notes_of(findings: Findings) -> Iterator[str]:
    """What is worth knowing besides the alarms, and what limits the answer."""
    if findings.skipped_by_scaler:
        steps = sorted({step for step, _ in findings.skipped_by_scaler})
        many = figures.counted(len(steps), "update")
        yield f"GradScaler left out {many} because gradients had overflowed (first in step {steps[0]}): no alarm."
    if findings.harmless:
        calls = figures.counted(findings.harmless, "call")
        yield f"{calls} made NaN or infinities that were killed before they reached anything."
    yield from findings.notes
