"""How close the numbers of a run come to overflow, to zero and to updates too small for their weight, from statistics.

risk.py           `risk(run)` → a `Risk`, a table of places with a level and a cause each; the same in another dtype
observations.py   the rows of a run, one place (site, phase, role, path, dtype) at a time
dtype_limits.py   the largest and the smallest numbers of each dtype
measures.py       head-room of each place, its growth over steps, zeros, subnormal numbers; bounds on how many elements
                  lie below a magnitude
motion.py         weights that no longer move
report.py         a `Risk` as text
"""
