"""How close the numbers of a run come to overflow, to zero and to updates too small for their weight, from statistics.

risk.py           the way in: `risk(run)` → a `Risk`, a table of places with a level and a cause each
observations.py   the rows of a run, one place (site, phase, role, path, dtype) at a time
dtype_limits.py   where each dtype ends
measures.py       head-room of each place, its growth over steps, zeros, subnormal numbers
shares.py         bounds on how many elements lie below a magnitude
motion.py         weights that no longer move
what_if.py        the same numbers in another dtype
report.py         a `Risk` as text
"""
