"""Hands numbers to TensorBoard, or to whatever else takes scalars."""

from __future__ import annotations

import os
from typing import Any, Protocol

from astray.errors import UsageError
from astray.paths import absolute
from astray.state.series import RATIO, Point


class Scalars(Protocol):
    """What `SummaryWriter` of TensorBoard offers, and many others like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def writer_of(given: str | os.PathLike[str] | Scalars) -> Scalars:
    """Something to write to: what was given, or for a folder a `SummaryWriter`, which somebody has to close."""
    if not isinstance(given, str | os.PathLike):
        if not callable(getattr(given, "add_scalar", None)):
            raise UsageError(f"A {type(given).__name__} takes no scalars. Give a folder, or what has an add_scalar.")
        return given
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("TensorBoard is not installed. `pip install tensorboard`, or leave tensorboard out.") from None
    return SummaryWriter(os.fspath(absolute(given)))


def write(scalars: Scalars, point: Point) -> None:
    """One number, under a tag that TensorBoard groups by what it is."""
    group = point.what if point.what == RATIO else f"{point.what} {point.statistic}"
    scalars.add_scalar(f"{group}/{point.parameter}", point.value, point.step)
