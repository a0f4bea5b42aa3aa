"""Dumps of msprobe (MindStudio Probe): read, written, and compared as msprobe does.

`names.py` knows what entries are called. `reader.py` makes a run of a dump, over `files.py` (folders, and what
the JSON files say, cut or whole), `steps.py` (rows), `identities.py` (which call an entry is), `arguments.py` (whose
they are) and `tensors.py` (leaves and their values).
`translator.py` writes one, over `entries.py`, `arguments.py` (where they were given), `leaves.py` and `translator.py`
(what is wanted).
"""

from __future__ import annotations

from astray.foreign.msprobe.reader import NAME, open_dump, recognises
from astray.foreign.msprobe.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]
