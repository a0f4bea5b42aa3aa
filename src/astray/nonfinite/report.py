"""NaN and infinity for a terminal: the call that made them, where, why, and what they spoilt, on one screen.

Takes `Findings` or an `Alarm` and gives text, laid out like the report of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from astray.formatting import figures
from astray.formatting.page import DIM, GREEN, MARGIN, RED, WIDTH, YELLOW, TextPage
from astray.wording import printable

if TYPE_CHECKING:
    from astray.nonfinite.alarm import Alarm, CallLocation, TensorMention
    from astray.nonfinite.findings import Findings

_MOST_TENSORS = 6
_MOST_OTHERS = 8
_MOST_SURFACED = 3
_MOST_CANDIDATES = 6


def render(findings: Findings, *, width: int = WIDTH, colour: bool = False) -> str:
    """All that was found: the first alarm in full, the others in a line each."""
    page = TextPage(width, colour)
    if not findings and findings.notes:
        seen = "≈ No NaN or infinity is seen to reach a result, a gradient or a weight. The notes say what is missing."
        for line in page.folded(seen, later_indent=" " * MARGIN):
            page.line(page.paint(line, YELLOW))
    elif not findings:
        page.line(page.paint("✓ No NaN or infinity reached a result, a gradient or a weight.", GREEN))
    for alarm in findings[:1]:
        _alarm(page, alarm)
    others = [f"{place_of(other)}: {other.kind.word}" for other in findings[1 : 1 + _MOST_OTHERS]]
    if others:
        page.line()
        page.entry("by itself", ["These have other origins:", *others])
        left = len(findings) - 1 - len(others)
        page.entry("", f"and {left:,} more") if left else None
    notes = list(besides(findings))
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
    for line in page.folded(f"✗ {what_of(alarm)} from {place_of(alarm)}", later_indent=" " * MARGIN):
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


def what_of(alarm: Alarm) -> str:
    """Whether it is NaN or infinity."""
    statistics = alarm.offenders[0].statistics
    return "NaN" if statistics.nan else "Infinity"


def place_of(alarm: Alarm) -> str:
    """The call it comes from."""
    micro = f", micro {alarm.micro}" if alarm.micro else ""
    rank = f", on rank {alarm.rank}" if alarm.rank else ""
    if alarm.candidates:
        return f"step {alarm.step}{micro}, backward, on the way to the gradient of {alarm.origin.site}{rank}"
    return f"step {alarm.step}{micro}, {alarm.origin.phase}, call {alarm.origin.call} of {alarm.origin.name}{rank}"


def _frame(page: TextPage, origin: CallLocation) -> None:
    if origin.frame is None:
        return
    of = ", its forward call" if origin.phase == "backward" else ""
    at = f"{PurePath(origin.frame.file).name}:{origin.frame.line} in {origin.frame.function}{of}"
    page.code(at, origin.frame.code)


def _tensors(page: TextPage, alarm: Alarm) -> None:
    """A table of the origin's tensors: the spoilt ones, then what it was given."""
    shown = [*alarm.offenders, *alarm.given][:_MOST_TENSORS]
    rows = [_cells(one) for one in shown]
    head = ("", "tensor", "min", "max", "zeros", "NaN, Inf")
    wide = [max(len(row[at]) for row in [head, *rows]) + 2 for at in range(len(head))]
    page.line()
    page.line(" " * MARGIN + page.paint("".join(cell.ljust(size) for cell, size in zip(head, wide, strict=True)), DIM))
    for row in rows:
        page.line(" " * MARGIN + "".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)))
    for one in shown:
        if one.first is not None:
            of = one.name if one.first.whole is None else f"{one.name}, of {figures.shape(one.first.whole)} in all,"
            page.entry("first", f"{one.first} of {of} is {one.first.value}")
    page.line()


def _cells(one: TensorMention) -> tuple[str, ...]:
    statistics = one.statistics
    numbers = (figures.statistic(statistics.min), figures.statistic(statistics.max), f"{statistics.zeros:,}")
    name, dtype = printable(one.name), printable(one.dtype)
    return (name, f"{dtype} {figures.shape(one.shape)}", *numbers, figures.non_finite(statistics))


def _candidates(alarm: Alarm) -> str:
    """The calls of whose backward one is the origin, those next to where it showed first."""
    names = [call.name for call in alarm.candidates]
    more = len(names) - _MOST_CANDIDATES
    return f"{f'… {more:,} more, ' if more > 0 else ''}{', '.join(names[-_MOST_CANDIDATES:])}"


def _surfaced(alarm: Alarm) -> str:
    shown = [str(one) for one in alarm.surfaced[:_MOST_SURFACED]]
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


def besides(findings: Findings) -> Iterator[str]:
    """Notes: what is worth knowing besides the alarms, and what limits the answer."""
    if findings.skipped_by_scaler:
        steps = sorted({step for step, _ in findings.skipped_by_scaler})
        many = figures.counted(len(steps), "update")
        yield f"GradScaler left out {many} because gradients had overflowed (first in step {steps[0]}): no alarm."
    if findings.harmless:
        calls = figures.counted(findings.harmless, "call")
        yield f"{calls} made NaN or infinities that were killed before they reached anything."
    yield from findings.notes
