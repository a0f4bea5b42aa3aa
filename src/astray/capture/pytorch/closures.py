"""Tells one `optimizer.step()` from another: torch calls its hooks from one frame at the start and the end of a step.

`optimizers` and `pace` hang on these hooks. A class of the user's own whose `step` calls that of its parent has its
hooks called for both, one inside the other, though it is one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any


def is_inner(frame: FrameType, optimizer: Any) -> bool:
    """Whether the step in this frame of torch's runs inside a step of the same optimizer."""
    return any(
        outer.f_code is frame.f_code and outer.f_locals.get("self") is optimizer for outer in frames(frame.f_back)
    )


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those around it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What computes the gradients inside the step, if the program gave one; `args` begins with the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
