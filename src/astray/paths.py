"""Paths that are kept for later: a program may go to another folder in the meantime, as Hydra does.

They are made absolute when they are given, and shown as somebody in the current folder would type them.
"""

from __future__ import annotations

import os
from pathlib import Path


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same place, wherever the program goes. Links are left as they are."""
    try:
        return Path(path).absolute()
    except OSError:  # the current folder is gone: whoever writes there will say so
        return Path(path)


def shown(path: Path) -> str:
    """A path in a sentence: relative if it lies in the current folder.

    >>> shown(Path.cwd() / "runs" / "a")
    'runs/a'
    """
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)
