"""Where NaN and infinity come from in one run, and what they reached.

step_rows.py   the rows of one step, as the others want them
flow.py        from whom each tensor has its NaN and infinities; origins.py: which of these reach something that matters
flow.py      between which calls it was born, where gradients of calls were not read
kinds.py       what sort of accident it was (kinds.py asks them, about a kinds.py); step_rows.py: names of functions
details.py     all that is known of an origin → alarm.py; details.py: which element is the first bad one
findings.py   one step; findings.py: a whole run, by findings.py steps and ranks and findings.py what is intended
"""

from __future__ import annotations

from astray.nonfinite.alarm import Alarm
from astray.nonfinite.findings import Findings, StepFindings, alarms, step_alarms

__all__ = ["Alarm", "Findings", "StepFindings", "alarms", "step_alarms"]
