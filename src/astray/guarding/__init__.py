"""A recording that is looked at while the program runs: `astray.guard` and `astray check`.

guard.py       the guard as the user holds it: start, step, stop
recording_guard.py    the guard of a recording onto disk: `guard=` of a recorder, `astray run --guard`
options.py       whether they can do what they are asked for
guard.py   the recording that it looks at
step_monitor.py     looks at the rows of each step as they come
spikes.py      losses and gradients that are suddenly far larger than they were
exact.py       looks at every single row instead, and stops the program at the very call
actions.py      what happens then: the program is stopped, warned, or told
trip.py        what was found, and the error that says so
snapshots.py       writes the last steps as a run
snapshots.py      where, by all ranks of a program
guard.py        the ends of a program: exceptions, and the signal by which a scheduler ends it
"""
