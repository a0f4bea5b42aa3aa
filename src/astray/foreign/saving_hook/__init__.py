"""The folders of the saving hook: a .npy file for the output of each leaf layer, and one for each gradient.

files.py     the names of files, read and written, and the files of a folder by their names
reader.py    a folder → a `Run`
writer.py    the rows of a recording → a folder, within limits
hook.py      puts the hooks in place: a recording of outputs and one of gradients
checker.py   two folders → a CSV for each rank

The format knows micro steps, which count forwards from 0, and no steps: as a Run everything is in step 0.
docs/coming-from/saving-hook.md has the rest.
"""

from __future__ import annotations

from astray.foreign.saving_hook.files import NAME
from astray.foreign.saving_hook.reader import open_dump, recognises
from astray.foreign.saving_hook.writer import Limit, SavingTranslator, translate

__all__ = ["NAME", "Limit", "SavingTranslator", "open_dump", "recognises", "translate"]
