"""Dumps of hooktools, and of `astray.compat.hooktools`: one .pt file for each call and phase.

files.py        the paths of files, the numbers of files, epochs and steps, and the content of a file
reader.py       a dump → a `Run`
translator.py   the rows of a recording → files
tracer.py       `Tracer`, and the YAML file it takes
comparer.py     `Comparer`; the command, and the two YAML files that users begin with
config.py       the keys of both YAML files, checked; the YAML file of a `Comparer`, and hooktools' metrics
"""

from __future__ import annotations

from astray.foreign.hooktools.files import recognises
from astray.foreign.hooktools.reader import open_dump
from astray.foreign.hooktools.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]

NAME = "hooktools"
