"""Dumps of msprobe (MindStudio Probe): read, written, and compared as msprobe does.

names.py           the names of entries, read and written
arguments.py       where msprobe has arguments, and which argument a gradient is of

reader.py          a dump → a `Run`
files.py           the folders of a dump and its JSON files, whole or cut
steps.py           one step → rows
identities.py      which call an entry is: site, micro step, number
tensors.py         the leaves of entries and the files of their values → rows

translator.py      the rows of a recording → files; which entries are written
entries.py         one step's rows → the entries of the JSON files
leaves.py          one tensor → a leaf of dump.json

debugger.py        `PrecisionDebugger` and `seed_all`
session.py         the recorder behind a debugger, and the entries it is asked for
configuration.py   config.json, checked

comparing.py       `compare`: the table as CSV or a workbook
table.py           the rows of the table
table_scalars.py   its rows for arguments that are not tensors
run_names.py       msprobe's names for the tensors of a run
mapping.py         `data_mapping` and `cell_mapping`
"""

from __future__ import annotations

from astray.foreign.msprobe.reader import NAME, open_dump, recognises
from astray.foreign.msprobe.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]
