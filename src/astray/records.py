"""The data every stage shares: what was called, and what the tensors of that call were.

Capture makes these, `store` writes and reads them, `compare` pairs them. No framework is imported here. They are named
tuples rather than dataclasses because capture makes one per tensor while the user's program waits: a named tuple of
this size is built in a fifth of the time of a frozen dataclass, and `zip(*rows)` turns rows into columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["module", "function", "op", "parameter", "optimizer", "collective", "custom"]
Phase = Literal["forward", "backward", "update"]
Role = Literal["input", "output", "parameter", "gradient", "state"]

ANY_CALL = "any call"
"""The `what` of a `MissedTensor` when the recording is empty; its `why` says why."""

ROOT = "<root>"
"""The site of the outermost module itself, whose qualified name is empty."""

STOPPED_BY_GUARD = "a guard's stop, at a call that had made NaN or infinity"
"""The `ended` of a recording whose program a guard has stopped in the middle of a step."""

GENERATOR = ("generator.before", "generator.after")
"""The paths of the states that a random generator had before and after a call of a function, in the role `state`.

They are kept to execute the call again. They are no part of what is compared: runs of other seeds or devices differ in
them, and what was drawn is seen in the results.
"""

SKIPPED_UPDATE = "astray/skipped update"
"""The site of a note that a GradScaler has left an update out, because gradients had overflowed."""


class Call(NamedTuple):
    """One observed call.

    `seq` is handed out when the call starts, so a module's number is smaller than those of the modules inside it.
    For a backward call, `parent` is the forward call it belongs to.
    """

    seq: int
    step: int
    micro: int
    kind: Kind
    site: str
    type: str
    call: int
    phase: Phase
    parent: int | None = None
    stack: int | None = None
    args: str | None = None
    recompute: bool = False


class Statistics(NamedTuple):
    """Statistics from one pass over a tensor. The six measures are over its finite elements; None if there are none.

    `first_bad` is the flat, row-major index of the first element that is NaN or infinite, and `first_bad_value` what it
    is; None when all are finite. Of complex tensors real numbers are counted: 2 × element, + 1 for the imaginary part.
    Of the part of a distributed tensor it is the index in the whole, where it is known which part that is.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float | None
    absmax: float | None
    zeros: int
    nan: int
    inf: int
    count: int  # type: ignore[assignment]  # tuples have a method of this name, which is not needed
    first_bad: int | None = None
    first_bad_value: float | None = None

    @classmethod
    def of(cls, cells: Mapping[str, Any]) -> Statistics | None:
        """The statistics in the cells of a row, where None, NaN in a measure or −1 in a count stand for no value."""
        if not _is_known(cells["count"]):
            return None
        fields: dict[str, Any] = {name: None if _is_missing(cells[name]) else cells[name] for name in cls._fields[:6]}
        fields |= {name: cells[name] if _is_known(cells[name]) else 0 for name in ("zeros", "nan", "inf", "count")}
        if _is_known(cells["first_bad"]):  # else all are finite, or the run is older than this column
            value = cells["first_bad_value"]
            # One NaN object for all: tuples compare a NaN by identity, since it does not equal itself.
            fields |= {"first_bad": cells["first_bad"], "first_bad_value": math.nan if _is_missing(value) else value}
        return cls(**fields)


def _is_known(count: int | None) -> bool:
    return count is not None and count >= 0


def _is_missing(measure: float | None) -> bool:
    return measure is None or math.isnan(measure)


class Blob(NamedTuple):
    """Where the bytes of a tensor are stored: shard number, offset in that file, length.

    `part` is the text of an `astray.part.Part` when only that slice of the tensor was kept; `sampled` is the number of
    values when only a sample was, of the part or of the whole. Both are None when the blob holds every value.
    """

    file: int
    offset: int
    nbytes: int
    sampled: int | None = None
    part: str | None = None


class Tensor(NamedTuple):
    """One tensor of a call, as it was at that moment.

    `value` is the same number for the same memory in the same version, wherever in the rank it is seen.
    """

    seq: int
    role: Role
    path: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    statistics: Statistics | None = None
    fingerprint: int | None = None
    blob: Blob | None = None
    placement: str | None = None
    note: str | None = None
    value: int | None = None


class Key(NamedTuple):
    """What identifies a tensor across runs. Nothing else does: neither time nor a counter over the whole step."""

    step: int
    micro: int
    site: str
    call: int
    phase: Phase
    role: Role
    path: str
    rank: int = 0


class Frame(NamedTuple):
    """One line of a Python stack, with the text of the line so that a report reads the same on another machine."""

    file: str
    line: int
    function: str
    code: str


class Spelling(NamedTuple):
    """How a call of a function is written in the program.

    `operator` is `+`, `+=`, `<` or the like, empty for a call by name. Where one operand is not a tensor, `reflected`
    says that it is the left one; None when that is not known. Of a function that is written in Python, `parameters`
    are its own, `positional` is how many of them were passed by position, and `keywords` were passed by name;
    `parameters` is None when that is not known, and for other functions, whose arguments are seen as they were passed.
    """

    operator: str = ""
    reflected: bool | None = None
    name: str = ""
    parameters: tuple[str, ...] | None = None
    positional: int = 0
    keywords: tuple[str, ...] = ()


class SpelledFrame(Frame):
    """A frame with the spelling of the recorded call that it makes, for formats that store it."""

    spelling: Spelling

    @classmethod
    def of(cls, frame: Frame, spelling: Spelling) -> SpelledFrame:
        spelled = cls(*frame)
        spelled.spelling = spelling
        return spelled


class Setup(NamedTuple):
    """Settings from a step on: of a module, an optimizer's group, torch itself, the environment.

    `subject` is the kind of thing and `site` which one; empty where there is only one. `values` are plain:
    numbers, texts, booleans, None, and lists of these. A name that is not among them is as it was before.
    """

    step: int
    subject: str
    site: str
    values: dict[str, Any]


class MissedTensor(NamedTuple):
    """Something that was not observed, why, and how often."""

    what: str
    why: str
    count: int = 1  # type: ignore[assignment]
