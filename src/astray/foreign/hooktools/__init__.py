"""Dumps of hooktools, and of `astray.compat.hooktools`: one .pt file for each call and phase.

layout.py      where which file lies, and how its epochs and steps are numbered
call_file.py     what a file holds, as a nest of plain values and as paths of tensors
reader.py        one file, read; reader.py: a dump → a Run
translator.py   the rows of a recording → such files; layout.py: their numbers and folders
"""

from __future__ import annotations

from astray.foreign.hooktools.layout import recognises
from astray.foreign.hooktools.reader import open_dump
from astray.foreign.hooktools.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]

NAME = "hooktools"
