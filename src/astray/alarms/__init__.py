"""Where NaN and infinity come from in one run, and what they reached.

step_rows.py   the rows of one step, as the others want them
flow.py        from whom each tensor has its NaN and infinities; origins.py: which of these reach something that matters
bounds.py      between which calls it was born, where gradients of calls were not read
rules.py       what sort of accident it was (kinds.py asks them, about a case.py); naming.py: names of functions
telling.py     all that is known of an origin → alarm.py; elements.py: which element is the first bad one
step_findings.py   one step; findings.py: a whole run, by merging.py steps and ranks and scaling.py what is intended
"""

from __future__ import annotations

from astray.alarms.alarm import Alarm
from astray.alarms.findings import Findings, alarms
from astray.alarms.step_findings import StepFindings, step_alarms

__all__ = ["Alarm", "Findings", "StepFindings", "alarms", "step_alarms"]
