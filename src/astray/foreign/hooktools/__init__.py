"""Dumps of hooktools, and of `astray.compat.hooktools`: one .pt file for each call and phase.

layout.py            folders and names of files, and how files, epochs and steps are numbered
call_file.py         what a file holds: a nest of plain values, and the paths of tensors in it
reader.py            a dump → a `Run`
translator.py        the rows of a recording → files
tracer.py            `Tracer`, and the YAML file it takes
comparer.py          `Comparer`
comparer_config.py   the YAML file of a `Comparer`, and hooktools' metrics
config_keys.py       checks the keys of both YAML files
demo.py              the two YAML files that users begin with
"""

from __future__ import annotations

from astray.foreign.hooktools.files import recognises
from astray.foreign.hooktools.reader import open_dump
from astray.foreign.hooktools.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]

NAME = "hooktools"
