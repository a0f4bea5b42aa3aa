"""The records of an alarm: NaN or infinity, the call it comes from, and what it reached. Made from rows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from astray.records import Frame, Statistics

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
        from astray.nonfinite.report import render_alarm

        return render_alarm(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, Statistics | Frame):
        return _plain(value._asdict())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
