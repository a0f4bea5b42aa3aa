"""Every number by which a verdict is decided, with the reason for its value. Nothing else in `judge` holds one.

A row is right while its error is at most

    allowed gain · base,        base = input error ⊕ own rounding   (`bases`)

so there is no limit "for bfloat16" as such. Its dtype enters by u, the unit roundoff (`stats.dtypes`): half the spacing
of numbers just above 1, the most that one rounding changes a number by; 2⁻²⁴ for float32, 2⁻⁸ for bfloat16. The first
section below makes own rounding of u, by measure (`errors`); those after it give the allowed gain. For a bfloat16 call
whose inputs are bit-identical the limit by values is `OWN_ROUNDINGS` · u = 8 · 2⁻⁸ = 0.031; by the norm of 65,536
elements it is `OWN_ROUNDINGS` · `SUM_SIGMAS` · u / √65,536 = 4.9e-4.

"Furthest" below: of all rows of a set of pairs of right runs, the one whose gain was the largest multiple of that of
its next sibling.
"""

from __future__ import annotations

# -- own rounding ------------------------------------------------------------------------------------------------------

FLOAT32 = 2.0**-24
"""The unit roundoff of float32, in which calls of coarser dtypes add up, too."""

FINE_SUM = 8
"""A float32 or float64 call adds up many products in its own precision: about √k roundings for k terms. Kernels add up
in blocks: 8 is one rounding for each of 64 blocks. A coarser dtype adds up in float32 and rounds once."""

WORST_ELEMENT = 4
"""The worst of many elements is about four times as far off as they are on average, for up to 10⁵ normal numbers."""

WORST_SLICE = 2
"""The slice of a tensor that is furthest off is about twice as far off as the whole: large rows round by more."""

SUM_SIGMAS = 4
"""How many standard deviations a sum over n elements may be off by, where each is off by δ, independently: 4·δ/√n."""

SHARED_ROUNDINGS = 8
"""Elements may also be off together: the mean and the scale that a norm divides by are sums in float32, and what they
are off by is common to all. So many roundings of float32 are allowed in a sum whatever n is; of float64, where all of
it is float64."""

STATISTICS_ROUNDOFF = 2.0**-45
"""Statistics are sums in float64, which depend on their order: they cannot tell float64 numbers any closer."""

# -- the allowed gain: rule `model` ------------------------------------------------------------------------------------

OWN_ROUNDINGS = 8
"""A call whose inputs are bit-identical may be off by so many times the rounding of one call: 64 u in float32 (sums of
4,096 terms), 8 u in bfloat16 (a few roundings inside of one module)."""

BUFFER_ROUNDINGS = 2
"""A buffer of a coarse dtype in the first step is a table (of frequencies, of positions), made in float32 and rounded
once in each run."""

MODEL_GAIN = {
    "values": 16.0,
    "worst": 16.0,
    "slices": 25.0,
    "typical": 16.0,
    "norm": 16.0,
    "mean": 16.0,
    "extremes": 16.0,
}
"""The gain that a row without siblings may have: a softmax, a norm or an attention multiplies errors by 2 to 5. The
furthest slice of such a call (a position of a loss) was off by 15.6 times its base in a run of twelve steps."""

LINEAR_RANGE = 0.1
NONLINEAR_GAIN = 2.0
"""A gain is the slope of a function: it does not hold for what comes of weights and numbers that are off by more than a
tenth. So many times as much is allowed there. In BERTs after some ten steps, of 18 pairs by values in all, the furthest
was 7.4."""

# -- the allowed gain: rule `siblings` ---------------------------------------------------------------------------------

SIBLING_GAIN = {
    "values": 3.0,
    "worst": 4.0,
    "slices": 5.0,
    "typical": 3.0,
    "norm": 18.0,
    "mean": 20.0,
    "extremes": 14.0,
}
"""The gain of a row may be so many times the largest gain of its siblings, as long as weights are the same in both
runs. Sums and extremes scatter like single random numbers, of which each pair of runs has ten thousand in each step: of
259 pairs of right runs (ten models, eight seeds, six kinds of difference) the furthest was 10.8 times its next sibling
by the norm, 10.3 by the mean and 8.4 by the extremes, and one of seven with another seed was 16 by the mean. Errors of
elements are averages over many: of 160 pairs the furthest was 1.8 by values, 2.4 by the worst element and 2.3 by
slices; 2.3, 2.3 and 3.3 where elements are off by more than a tenth. Of 63 pairs (nine models) the furthest was 1.6 by
a typical row. Two thirds are added for runs that were not measured."""

SIBLING_GAIN_BY_VALUES = {"norm": 0.65}
"""Where all values were kept, what elements are off by is measured and not estimated from sums. So norms are closer to
their siblings': of 166 such pairs the furthest was 6.4 times its next, and 4.8 with a noise run."""

DRIFTED_GAIN = {"values": 3.0, "worst": 3.0, "slices": 3.0, "typical": 3.0, "norm": 2.0, "mean": 2.0, "extremes": 2.0}
"""Once weights have drifted apart, what they have in common at all positions adds up, more in one layer than in
another: so many times as much is allowed. Of 57 pairs of twelve steps the furthest was 23.4 times its next sibling by
the norm, 19.2 by the mean, 8.8 by the extremes; of 274 second steps 18.6 by the extremes. Of the second steps of 160
pairs with values it was 5.4 by values, 5.1 by the worst element and 7.1 by slices, all of them in float32."""

GRADIENT_GAIN = {
    "values": 1.0,
    "worst": 1.0,
    "slices": 1.0,
    "typical": 1.0,
    "norm": 1.25,
    "mean": 1.25,
    "extremes": 1.5,
}
"""In backward so many times as much is allowed. Gradients are sums of terms that mostly cancel, more in one layer than
in another: those of the keys of a BERT's last attention were 20 times its siblings' by the norm, in a run with a fault
elsewhere."""

MIN_SIBLINGS = 3
"""Siblings decide from so many other sites on: among fewer, a fault and the odd one out look alike."""

FEW_SIBLINGS_GAIN = 2.0
"""The largest gain of three or four siblings is often a small one: twice as much is allowed."""

DISTANT_SIBLINGS_GAIN = 2.0
"""Siblings at the same position of other layers are alike. Where there are none, all of the same class count, which may
have other shapes and stand elsewhere: twice as much is allowed."""

MIN_SIBLINGS_BEFORE = 5
"""With so many siblings before a row only these count: those after it may have come of it."""

MIN_SIBLING_GAIN = {
    "values": 1.0,
    "worst": 1.0,
    "slices": 1.0,
    "typical": 1.0,
    "norm": 1 / SUM_SIGMAS,
    "mean": 1 / SUM_SIGMAS,
    "extremes": 2 / WORST_ELEMENT,
}
"""Siblings that were lucky count as if they had the gain of a plain rounding: one standard deviation."""

MIN_SUMMED_GAIN = 0.25
"""The same for gradients of parameters by their elements: each is a sum over all positions, in which what the terms are
off by averages out, in all layers alike. The rounding of its own counts in full. Of 27 pairs of right runs (nine
models, three seeds, bfloat16 with other kernels) none was further from its next sibling than 1.3 times with this, nor
with a noise run."""

ROWS_MIXED = 32
"""Calls mix rows, as attention does: of what all elements are off by, most of it in a few rows, a typical one may get a
part. So large it is where a thousand rows share it, each for itself."""

MAX_ROUNDS = 3
"""Rows are judged again without the gains of those that were found wrong, until no more are; so often at most."""

# -- the allowed gain: rule `noise run` --------------------------------------------------------------------------------

NOISE_GAIN = {
    "values": 3.0,
    "worst": 3.5,
    "slices": 3.5,
    "typical": 3.0,
    "norm": 12.0,
    "mean": 17.0,
    "extremes": 10.5,
}
DRIFTED_NOISE_GAIN = 2.5
"""A noise run shows the gain of a row in a run that is right. What other kernels make of it is so many times as much,
and as many times more as its siblings in the same two runs show beyond their own noise. Of 80 pairs of right runs in
bfloat16 with a noise run each (ten models, eight seeds) the furthest row was 1.7, 2.1 and 1.8 times as far beyond its
noise as its next sibling by values, the worst and slices, and 6.9, 10.3 and 5.1 by norm, mean and extremes without
values. Weights of a noise run drift like the candidate's, so sums are no further off then. Elements are: 4.3, 3.4 and
4.5 times in second steps of 40 pairs in float32; 4.2, 4.5 and 5.5 in six pairs of twelve steps in bfloat16, where the
extremes were 12.9 with numbers off by more than a tenth."""

LONE_ROW_NOISE_GAIN = 3.0
"""A row without siblings does not show whether the candidate's kernels round more than the noise run: so many times as
much is allowed. Of 80 pairs the furthest row was 5.5 times beyond its noise by values (SDPA's backward), which is three
fifths of that. By sums a single noise run is too few samples of a single row, and only adds to the model."""

OTHER_PRECISION_NOISE_GAIN = {
    "values": 6.0,
    "worst": 8.0,
    "slices": 8.0,
    "typical": 6.0,
    "norm": 20.0,
    "mean": 24.0,
    "extremes": 20.0,
}
"""Where the candidate has another precision than the reference and its noise run, it rounds more than a perturbed input
does. The noise run may then only add to what siblings allow: so many times the largest gain of the row in any step. Of
400 pairs of right runs no row was further from its next sibling, by any step."""

MIXED_DTYPE_SHARE = 0.1
"""The least share of pairs with different dtypes in runs of different precision. Where fewer results are coarser in the
candidate than in the reference, that may be the fault: they are judged by the precision of the reference."""

# -- the same bits, where siblings have them ---------------------------------------------------------------------------

MIN_STEADY_SIBLINGS = 5
"""So many siblings must have made the same bits out of the same bits before one that does not is wrong by that alone,
and so many times as many as those that do not: atomic additions give other bits now and then. One is enough beside a
single row that is off by more than OWN_ROUNDINGS, which additions in another order seldom make."""

MIN_MOVED_ELEMENTS = 32
"""A weight that stayed as it was in one run is wrong if so many of its elements moved in the other, and both runs moved
MIN_STEADY_SIBLINGS: in bfloat16 steps are often less than a rounding, so that one or two elements of a bias move in one
run and none in the other, in every second pair of right runs. Of 32 that move in one, some move in the other, too."""

# -- elements that flip: gates, choices, optimizers --------------------------------------------------------------------

FLIP_DENSITY = 0.8
"""The part of normal numbers that change their sign, for each unit of relative error: the density at zero, twice."""

FLIP_SIGMAS = 4
"""Where k elements flip on average, up to k + 4·√k + 1 are allowed."""

GATE_ZERO_SHARE = 0.05
"""A gradient that leaves a call with so many more zeros than it came with has passed a gate (ReLU, max-pool)."""

SIGN_FLIP_MOVES = 2.0
"""An element whose gradient is nothing but rounding may move up in one run and down in the other: two moves apart."""

UPDATE_ROUNDINGS = 8.0
"""A weight is rounded four times in its update, over both runs: for its decay, and for what is added; by up to 2 u
each, where the weight passes a power of two."""

# -- casts, masks and a common factor ----------------------------------------------------------------------------------

CAST_SIGMAS = 6.0
"""Sums over a tensor that was cast may be off by so many standard deviations; one element by one rounding."""

MASK_SPREAD = 1e-3
"""What hides a score in a mask of numbers is a thousand or more below zero, and the same number everywhere: so closely
their mean is known in the dtypes that masks have."""

FACTOR_SPREAD = 0.02
FACTOR_SHARE = 0.9
"""All gradients are scaled by one factor, if nine of ten have the same ratio of norms up to 2 %: a few small ones
may hold nothing but rounding."""

MIN_FACTOR = 1e-2
"""A common factor closer to one is rounding of the loss."""

# -- calls that are executed again -------------------------------------------------------------------------------------

OWN_SHARE = 0.5
"""A difference came in with the inputs of a call where no more than this share of it is the call's own. Of values that
are off by several roundings the share is far smaller, of sums that a biased kernel shifts it is 1."""

# -- bounds of the computation -----------------------------------------------------------------------------------------

MAX_ERROR = 1e3
"""Errors beyond this are all the same: the reference is almost zero."""

MAX_CHAIN = 64
"""So many calls in a row are followed: in a finer dtype, to know how coarse the numbers are that they began with, and
behind a gate or a choice that flipped."""

ROWS_PER_WINDOW = 1 << 16
STEPS_PER_WINDOW = 8
"""No verdict depends on these two: so many rows are judged at a time, and so many steps at least, as those before them
are looked at again."""
