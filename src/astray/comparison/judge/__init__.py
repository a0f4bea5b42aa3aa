"""Says of every pair of tensors whether it agrees, by what it came from.

A call is wrong when its result is further off than its own inputs explain. In the order of reading:

measuring.py    settles what bits, shapes and dtypes decide, and measures the rest
errors.py       how far off each pair is, by seven measures
calls.py        the calls of one rank as columns
sources.py      what each row came from
bases.py        what it may be off by because of that
siblings.py     the gains of the same row at other sites
surprise.py     how much further off it is than that
verdicts.py     what follows
victims.py      what has come of wrong rows
windows.py      a rank's steps, a few at a time
whole_run.py    the precision of float32 products, and a factor that all gradients share
tolerances.py   the largest errors that the user allows
thresholds.py   every number by which a verdict is decided, with its reason
"""

from astray.comparison.judge.siblings import Gains
from astray.comparison.judge.verdicts import judge, noise_gains

__all__ = ["Gains", "judge", "noise_gains"]
