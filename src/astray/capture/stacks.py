"""Records the Python stacks of calls, each distinct stack once."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from astray.records import Frame, SpelledFrame, Spelling

if TYPE_CHECKING:
    from astray.capture.native.core import StackWalk

_ASTRAY = (f"{Path(__file__).parents[1]}{os.sep}", str(Path(sysconfig.get_path("scripts"), "astray")))


class Stacks:
    """Interns Python stacks and hands each new one to `write(id, frames)`, innermost frame first.

    `walk` is the compiled class `StackWalk`, which finds known stacks. `internal` are folders whose code is left out,
    each with a separator at its end. With `spell`, which says how the innermost frame has called a function, the first
    frame of a stack has that spelling; then stacks differ by the frames that are left out, too.
    """

    def __init__(
        self,
        walk: type[StackWalk],
        write: Callable[[int, list[Frame]], None],
        internal: tuple[str, ...] = (),
        spell: Callable[[FrameType], Spelling | None] | None = None,
    ) -> None:
        self._write = write
        self._internal = (*_ASTRAY, *internal)
        self._spell = spell
        self._frames: list[list[Frame]] = []
        self._lock = threading.Lock()
        self.capture = walk(self._is_left_out, self._add)
        """Returns the id of the stack of a frame.

        The next two arguments are an outer frame and the id of its stack. None when that frame is not on the stack: the
        call it was running has ended without its hook.
        """

    def _add(self, frame: FrameType | None, outer: FrameType | None, outer_id: int | None) -> int:
        frames = []
        inner = frame
        while frame is not None and frame is not outer:
            if not self._is_internal(frame.f_code):
                frames.append(_frame(frame.f_code, frame.f_lineno))
                if frames[-1].function == "<module>" and frames[-1].file.startswith(CELL):
                    break  # the outer frames are those of the notebook
            frame = frame.f_back
        if outer_id is not None:
            frames += self._frames[outer_id]
        spelling = self._spell(inner) if self._spell is not None and inner is not None else None
        if spelling is not None and frames:
            frames[0] = SpelledFrame.of(frames[0], spelling)
        with self._lock:
            number = len(self._frames)
            self._frames.append(frames)
            self._write(number, frames)
        return number

    def _is_left_out(self, code: CodeType) -> bool:
        """Whether a frame is ignored when stacks are compared."""
        return self._is_internal(code) if self._spell is None else code.co_filename.startswith(_ASTRAY)

    def _is_internal(self, code: CodeType) -> bool:
        return code.co_filename.startswith((*self._internal, "<frozen"))


def _frame(code: CodeType, line: int | None) -> Frame:
    line = line or code.co_firstlineno
    name = getattr(code, "co_qualname", code.co_name)  # the qualified name came with Python 3.11
    return Frame(_display_name(code.co_filename), line, name, linecache.getline(code.co_filename, line).strip())


def _display_name(file: str) -> str:
    """The name of a file as the user knows it: a notebook's cell, which runs from a temporary file, is `In [5]`."""
    named = _CELL.match(file)
    number = named[1] if named else _cell_number(file)
    return file if number is None else f"{CELL}{number}]"


CELL = "In ["
"""The prefix of the names of notebook cells."""

_CELL = re.compile(r"<ipython-input-(\d+)-")


def _cell_number(file: str) -> object:
    """The number of the cell that a notebook kernel has compiled from this file; None for any other file."""
    shell = sys.modules.get("IPython.core.getipython")
    if shell is None or not _is_of_kernel(file):
        return None
    try:
        return shell.get_ipython().compile._filename_map.get(file)  # which IPython's own tracebacks read
    except AttributeError:
        return None


def _is_of_kernel(file: str) -> bool:
    return Path(file).parent.name.startswith(("ipykernel_", "xpython_"))
