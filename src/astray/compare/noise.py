"""How large a difference rounding alone can make. The boundary between `rounding`, `drifting` and `diverged`.

Everything `judge` knows about noise is in the two functions here, so that a better model replaces only this file.

One rounding changes a number by at most half an epsilon. A float32 or float64 call sums many products in its own
precision, which costs about √k roundings for k terms: 32 covers sums of a thousand terms. A call in a coarser dtype
sums in float32 and rounds its result, so a few roundings are all there is: 4. From call to call the roundings add up
like a random walk, so n calls after the first bit that differs they may be √(1 + n) times larger. While two runs are
bit-identical nothing adds up: a fault in step 1,000 is then judged as strictly as one in step 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from astray.compare.rows import Floats, Ints

ROUNDINGS_FINE = 32
ROUNDINGS_COARSE = 4
FLOAT32_EPS = 2.0**-23
STATISTICS_EPS = 2.0**-45
"""Statistics are exact to about 1e-12 and depend on the order of summing, so they cannot judge float64 any closer."""
UPDATE_ROUNDINGS = 4
"""How often a weight is rounded in its update, over both runs: once for its decay, and once for what is added."""
AMPLIFIED = 100
"""How much further than the whole of a weight a few of its elements may be off, once an optimizer has moved them."""
SUMMED = 8
"""How many roundings of a norm the sum of its numbers may be off by: their own, and those of adding them up."""
LARGEST_DRIFT = 0.5
"""A tensor that is off by more than half of itself has not drifted, whatever its precision."""


class Limits(NamedTuple):
    """The largest relative error that is still called by each name."""

    rounding: Any
    drifting: Any


def limits(eps: Floats, calls: Ints) -> Limits:
    """What a tensor of precision `eps` may be off by, so many calls after the first difference.

    >>> limit = limits(np.array([2.0**-23, 2.0**-7]), np.array([0, 99]))
    >>> limit.rounding.tolist(), limit.drifting.tolist()
    ([3.814697265625e-06, 0.03125], [3.814697265625e-06, 0.3125])
    """
    roundings = np.where(eps > FLOAT32_EPS, ROUNDINGS_COARSE, ROUNDINGS_FINE)
    rounding = np.minimum(roundings * eps, LARGEST_DRIFT)
    return Limits(rounding, np.minimum(rounding * np.sqrt(1.0 + calls), LARGEST_DRIFT))


def negligible(absmax: Floats, scale: Floats, eps: Floats) -> Any:
    """Whether a tensor is so small beside the numbers it came from that it holds nothing but their rounding.

    Such a tensor is zero in exact arithmetic (the gradient of a bias before a softmax, say), so that its relative error
    means nothing: 0 against 1e-9 is infinitely wrong, and fine. `absmax` is the larger of the two sides, `scale` the
    magnitude of what it came from; the sums behind it are taken in float32 or finer.
    """
    return absmax <= np.minimum(eps, FLOAT32_EPS) * scale
