"""Dumps of msprobe (MindStudio Probe): read, written, and compared as msprobe does.

names.py           the names of entries, read and written; the positions of arguments, and the argument of a gradient
leaves.py          the leaves of dump.json, one for each tensor, read and written
files.py           the folders of a dump, its JSON files, whole or cut, and the files of tensors

reader.py          a dump → a `Run`
steps.py           one step of a dump → rows: which call each entry is, and its tensors

translator.py      the rows of a recording → files; which entries are written
entries.py         one step's rows → the entries of the JSON files

debugger.py        `PrecisionDebugger` and `seed_all`, and the recording behind a debugger
configuration.py   config.json, checked; which entries it selects

comparing.py       `compare`: the table as CSV or a workbook; the command
table.py           the rows of the table
run_entries.py     the names of a run's tensors as msprobe's entries, and their arguments
mapping.py         `data_mapping` and `cell_mapping`
"""

from __future__ import annotations

from astray.foreign.msprobe.reader import NAME, open_dump, recognises
from astray.foreign.msprobe.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]
