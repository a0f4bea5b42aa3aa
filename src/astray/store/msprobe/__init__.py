"""Dumps of msprobe (MindStudio Probe), read and written.

`names.py` knows what entries are called. `reader.py` makes a run of a dump, over `files.py` and `cut_json.py` (folders,
and what the JSON files say, cut or whole), `steps.py` (rows), `identities.py` and `micro_steps.py` (which call an entry
is), `gradients.py` (whose they are), `tensors.py` (leaves and their values) and `leftovers.py` (files without entries).
`translator.py` writes one, over `entries.py`, `arguments.py` (where they were given), `leaves.py` and `choice.py` (what
is wanted).
"""

from __future__ import annotations

from astray.store.msprobe.reader import NAME, open_dump, recognises
from astray.store.msprobe.translator import translate

__all__ = ["NAME", "open_dump", "recognises", "translate"]
