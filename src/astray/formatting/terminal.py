"""The terminal a command runs in: width, colours, a progress bar; and how commands print and report failure."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

COULD_NOT = 2
"""The exit code when a command could not do its work at all."""

_PATIENCE = 0.5  # seconds before a bar appears: quicker work needs none
_REDRAW = 0.1
_UNLIMITED = 1_000_000  # columns


def width() -> int:
    """Columns to use: the terminal's, within what is pleasant to read; 100 in a pipe."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))


def table_width() -> int:
    """Columns for a table: those of `width` on a terminal. In a pipe nothing is cut, so that names can be searched."""
    if os.environ.get("COLUMNS") or (sys.stdout is not None and sys.stdout.isatty()):
        return width()
    return _UNLIMITED


def print_report(text: str) -> None:
    """Prints a report. See `_print` for characters that the output cannot show."""
    _print(text, sys.stdout)


def print_note(text: str) -> None:
    """Prints on stderr what is not a part of a report: notes, files that were written, why something failed."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO | None) -> None:
    """Prints with a question mark for each character that the encoding lacks, and an escape for each unprintable one.

    Only line breaks, and the colours of reports on a terminal, are passed through: texts hold names from recordings,
    which may come from anywhere.
    """
    if stream is None:
        return
    from astray.formatting.page import without_controls

    colour = wants_colour(stream)
    text = "\n".join(without_controls(line, colour) for line in text.split("\n"))
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), file=stream, flush=stream is sys.stderr)


def wants_colour(stream: TextIO | None) -> bool:
    """Colour on a terminal, unless NO_COLOR is set or the terminal is dumb; FORCE_COLOR wins."""
    if stream is None:
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """A progress bar on stderr for long work; nothing in a pipe, and nothing for work that is soon done.

    >>> with Progress("reading") as progress:
    ...     progress(10, 100)

    The total may change meanwhile, as it does until all ranks of a run have begun.
    """

    def __init__(self, doing: str, stream: TextIO | None = None) -> None:
        self._doing = doing
        self._stream = stream or sys.stderr
        self._started = self._drawn = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_terminal() or now - self._started < _PATIENCE or now - self._drawn < _REDRAW:
            return
        self._drawn = now
        self._shown = True
        share = done / total if total else 1.0
        filled = round(share * 30)
        left = (now - self._started) * (1 - share) / share if share else 0.0
        bar = "█" * filled + "░" * (30 - filled)
        self._stream.write(f"\r\x1b[K{self._doing} {bar} {done:,} of {total:,}, {left:.0f} s left")
        self._stream.flush()

    def _is_terminal(self) -> bool:
        return self._stream is not None and self._stream.isatty()  # a program may be started without stderr

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
