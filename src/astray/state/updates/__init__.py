"""Was each weight updated as its optimizer says? The update that was made, against the one recomputed in float64.

check.py   copies what a step begins with, and measures afterwards what it has done, element by element
rules.py   what each optimizer should have done
table.py   a verdict for each parameter in each step, and the table of them
"""

from astray.state.updates.check import UpdateWatch, check_updates
from astray.state.updates.rules import ExpectedUpdate, ParameterState, Rule
from astray.state.updates.table import Update, Updates

__all__ = ["ExpectedUpdate", "ParameterState", "Rule", "Update", "UpdateWatch", "Updates", "check_updates"]
