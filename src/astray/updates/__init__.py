"""Was each weight updated as its optimizer says? The update that was made, against the one recomputed in float64.

`watch` holds what a step begins with, `rules` says what it should give, `weighing` compares the two element by
element, `rows` is what people read.
"""

from astray.updates.rows import Update, Updates
from astray.updates.rules import Before, Expected, Rule
from astray.updates.watch import UpdateWatch, check_updates

__all__ = ["Before", "Expected", "Rule", "Update", "UpdateWatch", "Updates", "check_updates"]
