"""How a function makes NaN or infinity of finite numbers: one rule for each that is known to, and one for all ranges.

A rule says what it knows by numbers, or nothing. Statistics cannot prove which element met which, so what is merely
possible is worded as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from astray.nonfinite.alarm import Kind
from astray.nonfinite.case import Case, counts, is_float, zeros
from astray.stats import dtypes

Rule = Callable[[Case], Kind | None]

_EPSILON = "Add an epsilon to the divisor, or mask these elements before dividing."
_LOGITS = (
    "Clamp the argument, or use a form that takes logits, such as log_softmax or binary_cross_entropy_with_logits."
)
_BEFORE = "Add an epsilon inside, or replace these elements before the call: a `where` behind it does not help here."
_RANGE = "Scale the inputs down first, or compute this call in bfloat16 or float32."
_RUNAWAY = "Numbers of this size have run away before: look at how they grew in the steps before, and at the step size."
_WIDE = ("bfloat16", "float32", "float64")
"""With a range that only what has gone wrong already exceeds."""


def _division(case: Case) -> Kind | None:
    divisor = case.input("0" if case.function in ("reciprocal", "rdiv") else "1")
    if divisor is None or not divisor.statistics.zeros:
        return None
    text = zeros(divisor, f"the divisor ({divisor.name})")
    if case.flushed:
        advice = f"Add an epsilon that {divisor.dtype} can hold, or compute this part in float32."
        return Kind("underflow then reciprocal", f"{text}: {case.flushed}", advice)
    return Kind("division by zero", f"{text}.", _EPSILON)


def _logarithm(case: Case) -> Kind | None:
    given = case.input("0")
    if given is None or given.statistics.min is None:
        return None
    edge, low = -1.0 if case.function == "log1p" else 0.0, given.statistics.min
    if low < edge:
        return Kind("log of a negative", f"The smallest element of {given.name} is {low:.6g}.", "Clamp it before.")
    if low == edge:
        text = f"The smallest element of {given.name} is −1" if edge else zeros(given)
        return Kind("log of zero", f"{text}: {case.flushed}" if case.flushed else f"{text}.", _LOGITS)
    return None


def _root(case: Case) -> Kind | None:
    given = case.input("0")
    if given is None or given.statistics.min is None:
        return None
    if given.statistics.min < 0:
        text = f"The smallest element of {given.name} is {given.statistics.min:.6g}."
        return Kind("sqrt of a negative", text, "Clamp it at zero; rounding alone can bring a small number below it.")
    if case.function == "rsqrt" and given.statistics.zeros:
        return Kind("division by zero", f"{zeros(given)}, and it divides by their root.", _EPSILON)
    return None


def _power(case: Case) -> Kind | None:
    base, exponent = case.input("0"), case.constant(1)
    if base is None or exponent is None or base.statistics.min is None:
        return None
    if exponent != round(exponent) and base.statistics.min < 0:
        text = f"The smallest element of {base.name} is {base.statistics.min:.6g}, and the exponent {exponent:g}."
        return Kind("sqrt of a negative", text, "Clamp it at zero.")
    if exponent < 0 and base.statistics.zeros:
        return Kind("division by zero", f"{zeros(base)}, and the exponent is {exponent:g}.", _EPSILON)
    return None


def _spread(case: Case) -> Kind | None:
    given = case.input("0")
    if given is None or given.statistics.count != case.result.statistics.count:
        return None
    text = "It is taken over a single element, and divides by one less than that."
    return Kind("division by zero", text, "Use correction=0, or more elements.")


def _eps(dtype: str) -> float:
    return dtypes.find(dtype).eps if dtype in dtypes.DTYPES else 0.0


def _exponential(case: Case) -> Kind | None:
    given = case.input("0")
    largest = None if given is None else given.statistics.max
    if given is not None and case.function in ("sinh", "cosh"):
        largest = given.statistics.absmax
    edge = math.log(case.limit) / (math.log(2) if case.function == "exp2" else 1)
    if given is None or largest is None or largest <= edge * (1 - _eps(given.dtype)):
        return None
    return Kind(
        "overflow",
        f"{case.function} of {largest:.6g} is beyond {case.limit:.6g}, the largest {case.result.dtype}: its argument"
        f" may not exceed {edge:.4g}.",
        "Subtract the largest element first, or use the stable form (softplus, logsumexp).",
    )


FORWARD: dict[str, Rule] = {
    **dict.fromkeys(("div", "rdiv", "reciprocal", "fmod", "remainder"), _division),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _logarithm),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    "pow": _power,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), _exponential),
}
"""By the name of the function. An op of the backward pass is what its own name says, too."""


def _derivative(word: str, why: str, advice: str = _BEFORE) -> Rule:
    """A derivative that is infinite, or none at all, where the function itself is fine: at zero."""

    def rule(case: Case) -> Kind | None:
        at = next((one for one in case.inputs if one.statistics.zeros), None)
        return None if at is None else Kind(word, f"{zeros(at)}. {why}", advice)

    return rule


def _deviation(case: Case) -> Kind | None:
    """The deviation of a row is zero when all its elements are the same."""
    at = next((one for one in case.forward if one.role == "output" and one.statistics.zeros), None)
    why = "The derivative divides by the deviation."
    return None if at is None else Kind("std of a constant", f"{zeros(at)}. {why}", _BEFORE)


BACKWARD: dict[str, Rule] = {
    "sqrt": _derivative("sqrt at zero", "Its derivative 1/(2·sqrt(x)) is infinite, or NaN where the gradient is zero."),
    "rsqrt": _derivative("sqrt at zero", "Its derivative is infinite there."),
    "pow": _derivative("power at zero", "The derivative of a power below one is infinite there."),
    "log": _derivative("log of zero", "Its derivative is 1/x.", _LOGITS),
    "xlogy": _derivative("log of zero", "Its derivative by y is x/y."),
    "div": _derivative("division by zero", "The derivative divides by them, too."),
    "rdiv": _derivative("division by zero", "The derivative divides by their square."),
    "reciprocal": _derivative("division by zero", "The derivative divides by their square."),
    "norm": _derivative("norm at zero", "A norm has no derivative at zero: 0/0."),
    "hypot": _derivative("norm at zero", "hypot(0, 0) has no derivative: 0/0."),
    "cdist": _derivative("norm at zero", "The distance of a point to itself has no derivative."),
    "atan2": _derivative("atan2(0, 0)", "Its derivative divides by x² + y²."),
    **dict.fromkeys(("std", "std_mean"), _deviation),
}
"""By the name of the function whose backward call it is."""


def cast(case: Case) -> Kind | None:
    """A number that fits its own dtype, and not the one it is converted to."""
    for one in case.given:
        size = one.statistics.absmax
        if one.dtype != case.result.dtype and is_float(one) and size is not None and size > case.limit:
            largest = f"the largest {case.result.dtype} is {case.limit:.6g}"
            return Kind("overflow", f"Its {one.name} reaches {size:.6g} in {one.dtype}, and {largest}.", _advice(case))
    return None


_PRODUCTS = ("mul", "square", "prod", "pow", "matmul", "linear", "einsum", "addcmul", "conv1d", "conv2d", "conv3d")
_SUMS = ("add", "sub", "sum", "cumsum", "mean", "norm", "mse_loss", "all_reduce", "reduce", "reduce_scatter")
_GROWING = frozenset((*_PRODUCTS, *_SUMS))
"""Functions whose results are sums or products of what they are given."""


def overflow(case: Case) -> Kind | None:
    """A result beyond the range of its dtype, if the sizes of the inputs allow one."""
    floats = [one for one in [*case.given, *case.forward] if is_float(one) and one.statistics.absmax]
    sizes = sorted((one.statistics.absmax or 0.0 for one in floats), reverse=True)
    if not sizes:
        return None
    terms = max(one.statistics.count for one in floats)
    factors = [abs(one) for one in (case.constant(0), case.constant(1)) if one is not None]
    most = sizes[0] * max(*factors, *sizes[1:2], *sizes[:1], 2.0) * terms
    if most < case.limit:
        return None
    sure = case.phase == "backward" or case.function in _GROWING
    doubt = "" if sure else " The sizes allow it; they do not prove it."
    inputs = " and ".join(f"{size:.4g}" for size in sizes[:2])
    return Kind(
        "overflow",
        f"The largest {case.result.dtype} is {case.limit:.6g}. What it is given reaches {inputs}, and what it makes of"
        f" that does not fit: {counts(case.result)}.{doubt}",
        _advice(case),
    )


def _advice(case: Case) -> str:
    return _RUNAWAY if case.result.dtype in _WIDE else _RANGE
