"""The classes users hold: a `Run` and a `Comparison`, whose methods call the rooms above their data.

run.py           `astray.open`: a run with methods for the origins of NaN and for head-room
comparison.py    `astray.compare`: a comparison that is printed, shown in a notebook, and written to files

astray itself works on their base classes, `store.RunData` and `comparison.ComparisonData`. They are two modules, since
importing what compares takes as long as importing what reads a run.
"""
