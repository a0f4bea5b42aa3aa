"""Says of every pair of tensors whether it agrees, by what it came from.

A call is wrong when its result is further off than its own inputs explain. `measuring` settles what bits, shapes and
dtypes decide and measures the rest; `errors` has how far off each pair is by seven measures; `sources` what it came
from; `bases` what it may be off by because of that; `surprise` how much further off it is, with `siblings` to ask;
`verdicts` says what follows, and `victims` what has come of it, in `windows` of a few steps. `scaling` finds a factor
that all gradients have in common, `precision` in which precision float32 is multiplied. Every number is in
`thresholds`.
"""

from astray.comparison.judge.siblings import Gains
from astray.comparison.judge.verdicts import judge, noise_gains

__all__ = ["Gains", "judge", "noise_gains"]
