"""Was each weight updated as its optimizer says? The update that was made, against the one recomputed in float64.

`watch` holds what a step begins with, `rules` says what it should give, `weighing` compares the two element by
element, `rows` is what people read.
"""

from astray.state.updates.check import UpdateWatch, check_updates
from astray.state.updates.rules import ExpectedUpdate, ParameterState, Rule
from astray.state.updates.table import Update, Updates

__all__ = ["ExpectedUpdate", "ParameterState", "Rule", "Update", "UpdateWatch", "Updates", "check_updates"]
