"""Warnings that point at the user's line, however deep inside of astray they are made."""

from __future__ import annotations

import sys
import warnings


def warn(message: str) -> None:
    """Warn about the innermost line that is not ours."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("astray."):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
