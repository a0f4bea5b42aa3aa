"""Where NaN and infinity come from in one run, and what they reached.

step_rows.py   the rows of one step as the other modules read them; one name for functions, ops and modules alike
flow.py        which event each tensor with NaN or infinity has them from
origins.py     which of these events reached something that matters
kinds.py       what sort of accident an origin was: a rule for each function that is known to make NaN
details.py     everything known of an origin → an `Alarm`; the first bad element of a tensor
alarm.py       the records that make up an alarm, and its text
findings.py    one step by itself, then a run: one origin in several steps and ranks, updates that a GradScaler skipped;
               their text
"""

from __future__ import annotations

from astray.nonfinite.alarm import Alarm
from astray.nonfinite.findings import Findings, StepFindings, alarms, step_alarms

__all__ = ["Alarm", "Findings", "StepFindings", "alarms", "step_alarms"]
