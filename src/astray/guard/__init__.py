"""A recording that is looked at while the program runs: `astray.guard` and `astray check`.

guard.py       the guard as the user holds it: start, step, stop, and what happens at a trip
lookout.py     looks at the rows of each step as they come
spikes.py      a number that is suddenly far larger than it was
exact.py       looks at every single row instead, and stops the program at the very call
trip.py        what was found, and the error that says so
places.py      where the last steps are written, by all ranks of a program
ends.py        the ends of a program: exceptions, and the signal by which a scheduler ends it
"""
