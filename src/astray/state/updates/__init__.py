"""Was each weight updated as its optimizer says? The update that was made, against the one recomputed in float64.

check.py             copies the inputs of a step, and measures its results afterwards, element by element
optimizer_steps.py   what that needs of a framework's optimizer
torch_steps.py       the same of torch's
paddle_steps.py      the same of Paddle's
rules.py             what each optimizer of torch should compute
paddle_rules.py      what each optimizer of Paddle should compute
table.py             a verdict for each parameter in each step, and the table of them
"""

from astray.state.updates.check import UpdateChecker, check_updates
from astray.state.updates.rules import ExpectedUpdate, ParameterState, Rule
from astray.state.updates.table import Update, Updates

__all__ = ["ExpectedUpdate", "ParameterState", "Rule", "Update", "UpdateChecker", "Updates", "check_updates"]
