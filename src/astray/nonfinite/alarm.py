"""An alarm: NaN or infinity, the call it comes from, and what it reached; as records, and as text for a terminal.

`details` makes the records from rows. The text is laid out like the report of a comparison; `findings` shows several.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal

from astray.formatting import figures
from astray.formatting.page import DIM, MARGIN, RED, WIDTH, TextPage
from astray.records import Frame, Statistics
from astray.wording import printable

_MOST_TENSORS = 6
_MOST_SURFACED = 3
_MOST_CANDIDATES = 6

Where = Literal["output", "loss", "gradient", "weight", "buffer", "update", "state"]


@dataclass(frozen=True)
class SurfacePoint:
    """Where NaN or infinity surfaced: in what kind of tensor that matters, at which site and path."""

    what: Where
    site: str
    path: str

    def __str__(self) -> str:
        if self.what == "output":
            return f"the output of {self.site}"
        if self.what == "loss":
            return f"the loss ({self.site})"
        if self.what in ("weight", "buffer"):
            return f"the {self.what} {self.site}"
        part = f" {self.path}" if self.what == "state" else ""
        return f"the {self.what}{part} of {self.site}"


@dataclass(frozen=True)
class Element:
    """One element of a tensor.

    part: which part of a complex number `value` is.
    whole: for a shard of a distributed tensor, the shape of the whole tensor, to which the index refers.
    """

    index: tuple[int, ...]
    value: float
    part: Literal["real", "imaginary"] | None = None
    whole: tuple[int, ...] | None = None

    def __str__(self) -> str:
        part = f"the {self.part} part of " if self.part else ""
        return f"{part}element [{', '.join(map(str, self.index))}]"


@dataclass(frozen=True)
class TensorSummary:
    """A tensor of a call. forward: whether it belongs to the forward call of a backward call."""

    role: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    statistics: Statistics
    forward: bool = False
    first: Element | None = None  # the first element that is NaN or infinite

    @property
    def name(self) -> str:
        """Which tensor of the call: "input `0`"."""
        noun = "gradient in" if self.role == "gradient" else self.role
        name = noun if self.path in ("", "out", "grad") else f"{noun} `{self.path}`"
        return f"forward {name}" if self.forward else name


@dataclass(frozen=True)
class CallLocation:
    """A call, and the line of the program that made it; of a backward call, the line of its forward call."""

    site: str
    type: str
    call: int
    phase: str
    kind: str
    stack: tuple[Frame, ...] = ()
    args: str | None = None

    @property
    def name(self) -> str:
        """The site with its type: `h.2.mlp (MLP)`."""
        return f"{self.site} ({self.type})" if self.type else self.site

    @property
    def frame(self) -> Frame | None:
        """The line of the program where the call was made."""
        return self.stack[0] if self.stack else None


@dataclass(frozen=True)
class AccidentKind:
    """What sort of accident it was: a short word, a sentence with the numbers that show it, and what helps."""

    word: str
    text: str
    advice: str

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class Alarm:
    """NaN or infinity that reached something that matters, and the call it comes from.

    ranks: all ranks on which the same call did the same, or which were reached by a collective.
    later: further steps that go wrong for the same reason.
    candidates: where gradients of calls were not read, the calls whose backward may have made it; `origin` is then the
        parameter with the first bad gradient.
    origin: the call; `enclosing` are the module calls around it, outermost first, as far as modules were recorded.
    offenders: its tensors that hold NaN or infinity; `given`, its inputs.
    chain: the calls from the origin to where it surfaced first; `skipped` of them in the middle are left out.
    surfaced: all that it reached in this step, in order.
    """

    step: int
    micro: int
    rank: int
    origin: CallLocation
    kind: AccidentKind
    offenders: tuple[TensorSummary, ...]
    given: tuple[TensorSummary, ...]
    chain: tuple[CallLocation, ...]
    surfaced: tuple[SurfacePoint, ...]
    skipped: int = 0
    enclosing: tuple[tuple[str, str], ...] = ()
    ranks: tuple[int, ...] = ()
    later: tuple[int, ...] = ()
    candidates: tuple[CallLocation, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for alarms of other ranks and steps that have the same origin."""
        origin = self.origin
        return self.micro, origin.site, origin.type, origin.call, origin.phase, self.kind.word

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain objects, for JSON and Arrow; NaN and infinity are written as text."""
        return _plain(asdict(self))  # type: ignore[no-any-return]

    def __str__(self) -> str:
        page = TextPage(WIDTH, colour=False)
        add_alarm(page, self)
        return page.text()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Statistics | Frame):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# -- text --------------------------------------------------------------------------------------------------------------


def add_alarm(page: TextPage, alarm: Alarm) -> None:
    """Add an alarm in full to a page: the call, where, why, and what it reached."""
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
