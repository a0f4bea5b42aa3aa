"""The folders of the saving hook: a .npy file for each output of a leaf layer, and one for each gradient.

files.py          the names of files, read and written; a folder → a `Run`
writer.py         the rows of a recording → a folder, within limits
registration.py   `register_saving_hook` and `remove_saving_hook`
hook.py           the recordings behind them: one of outputs, one of gradients
torch_modules.py, paddle_layers.py   what that needs of each framework
checker.py        two folders → a CSV for each rank; the command

The format has micro steps, which count forwards from 0, but no steps: as a Run everything is in step 0.
docs/coming-from/saving-hook.md describes it.
"""

from __future__ import annotations

from astray.foreign.saving_hook.files import NAME, open_dump, recognises
from astray.foreign.saving_hook.writer import Limit, SavingTranslator, translate

__all__ = ["NAME", "Limit", "SavingTranslator", "open_dump", "recognises", "translate"]
