"""Says of every pair of tensors whether it agrees, by what it came from.

A row is right while error out ≤ allowed gain · (error in ⊕ own rounding). In the order of reading:

measuring.py    settles what bits, shapes and dtypes decide, and measures the rest
errors.py       error out: how far off each pair is, by seven measures
calls.py        the calls of one rank as columns
provenance.py   how each row came about
sources.py      what it came from: error in is the largest error among its sources
bases.py        base = error in ⊕ own rounding
flips.py        a part of own rounding: gates, choices and optimizers on numbers that are off
siblings.py     gains (error / base) of the same row at other sites
surprise.py     the allowed gain, and how far beyond it a row is
replays.py      what executing a call again in both runs says of it
verdicts.py     what follows
victims.py      what has come of wrong rows
windows.py      the steps of a rank, a few at a time, with what their rows share: float32 precision, a common factor
tolerances.py   the largest errors that the user allows
thresholds.py   every number by which a verdict is decided, with its reason
"""

from astray.comparison.judge.siblings import Gains
from astray.comparison.judge.verdicts import Measured, Settled, decide, measure_pairs, noise_gains

__all__ = ["Gains", "Measured", "Settled", "decide", "measure_pairs", "noise_gains"]
