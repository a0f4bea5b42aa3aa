"""What goes wrong inside one run: where NaN and infinity come from, and which numbers come close to them."""

from __future__ import annotations

from astray.alarms.alarm import Alarm
from astray.alarms.findings import Findings, alarms
from astray.alarms.step_findings import StepFindings, step_alarms

__all__ = ["Alarm", "Findings", "StepFindings", "alarms", "step_alarms"]
