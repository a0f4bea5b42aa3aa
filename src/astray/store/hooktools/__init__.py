"""Dumps of hooktools, and of `astray.compat.hooktools`: one .pt file for each call and phase.

folders.py      where which file lies, and how its epochs and steps are numbered
contents.py     what a file holds, as a nest of plain values and as paths of tensors
saved.py        one file, read; reader.py: a dump → a Run
translator.py   the rows of a recording → such files; series.py: their numbers and folders
"""

from __future__ import annotations

from astray.store.hooktools.folders import recognises
from astray.store.hooktools.reader import open_dump
from astray.store.hooktools.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]

NAME = "hooktools"
