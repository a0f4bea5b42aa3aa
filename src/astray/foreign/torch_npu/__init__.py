"""Dumps of torch_npu.hooks, read as runs and written: a ".pkl" of JSON lines, or a folder of numpy's files.

They record functions without modules, steps or micro steps: every call is in step 0, at a site of its function alone.

names.py       a tensor of a dump, and its name
lines.py       the ".pkl": its lines, their numbers, and what is wrong with it
arrays.py      the folder of numpy's files
reader.py      the tensors of a dump → calls → a `Run`
writer.py      the rows of a recording → whole calls → either form
hooks.py       `register_hook`: the recordings behind it, and which steps they dump
overflow.py    the guard behind `wrap_checkoverflow_hook`
comparing.py   `compare`: two dumps → a CSV
"""

from __future__ import annotations

from astray.foreign.torch_npu.reader import NAME, open_dump, recognises
from astray.foreign.torch_npu.writer import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]
