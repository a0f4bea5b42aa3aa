"""Looks at a recording while the program runs: `astray.guard` and `astray check`.

guard.py             `Guard`: records into memory, looks at each step, acts; also on exceptions and SIGTERM
recording_guard.py   the guard of a recording onto disk: `guard=` of a recorder, `astray run --guard`
options.py           checks what either of them is asked to do
step_monitor.py      looks at the rows of each step as they come
spikes.py            losses and gradient norms that are suddenly far larger than before
exact.py             looks at every single row instead, and stops the program at the very call
trip.py              what was found, and the error that says so
actions.py           acts on a trip: stops the program, warns, or calls the user's function
snapshots.py         writes the last steps as a run, into a folder that all ranks of the program share
"""

from __future__ import annotations

from astray.guarding.trip import Trip

__all__ = ["Trip"]
