"""Looks at a recording while the program runs: `astray.guard` and `astray check`.

guard.py             `Guard`: records into memory, looks at each step, acts; also on exceptions and SIGTERM
recording_guard.py   the guard of a recording onto disk: `guard=` of a recorder, `astray run --guard`
options.py           the options of both, and their checks
step_monitor.py      looks at the rows of each step as they come; losses and gradient norms that are suddenly far larger
exact.py             looks at every single row instead, and stops the program at the very call
trip.py              what went wrong, the error that says so; stops the program, warns, or calls the user's function;
                     writes the last steps as a run, into a folder that all ranks of the program share
"""

from __future__ import annotations

from astray.guarding.trip import Trip

__all__ = ["Trip"]
