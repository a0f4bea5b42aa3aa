"""Names from a recording as names of files. Every writer that names files after what was called asks here."""

from __future__ import annotations

import re

MOST_BYTES = 240
"""Of a name: file systems take 255 bytes, and the draft of a file has a longer name."""

_FORBIDDEN = re.compile("[/\0\ud800-\udfff]")
"""What no name of a file can hold: separators, nulls, and halves of pairs, which are no text."""


def file_name(text: str, ending: str) -> str | None:
    """The text as the name of a file, with `_` for what none can hold; None where it would be hidden or too long.

    >>> file_name("Module.a/b.forward", ".pt"), file_name("x" * 300, ".pt"), file_name("..", ".pt")
    ('Module.a_b.forward.pt', None, None)
    """
    name = _FORBIDDEN.sub("_", text) + ending
    return None if name.startswith(".") or len(name.encode()) > MOST_BYTES else name
