"""What was found in a checkpoint, whatever its format: what the readers of formats give, and `Checkpoint` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from astray import wording
from astray.checkpoints.stored_tensor import Stored

LONGEST = 200


def printable(text: str, longest: int = LONGEST) -> str:
    """A text of a file as it can be shown: one may move the cursor, be no text at all, or never end.

    >>> printable("red\x1b[31m")
    'red\\x1b[31m'
    """
    return wording.printable(text[:longest]) + "…" * (len(text) > longest)


class Unread(NamedTuple):
    """Something in a checkpoint that is not read: what it is, why not, and how many tensors are not read with it."""

    what: str
    why: str = ""
    tensors: int = 0

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint by name, in the order of the file, and everything else that is in it.

    others: plain values as they are, and `Unread` for what is none.
    """

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, Stored]
    others: dict[str, object] = field(default_factory=dict)
