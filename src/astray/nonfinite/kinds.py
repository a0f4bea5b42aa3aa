"""What sort of accident made NaN or infinity: by the kind of event, or by the name of the call and its numbers.

Takes an `OriginCase`, tries the rules in order and returns the `AccidentKind` of the first that applies. A rule states
what the numbers show, or returns None: statistics cannot prove which elements met, so what is only possible is worded
as such. Where no rule applies the kind is "unknown", with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from astray.nonfinite.alarm import AccidentKind, TensorSummary
from astray.nonfinite.flow import EventKind
from astray.safe_text import parse_json
from astray.stats import dtypes

_ON_MASKS = "The infinities were put there on purpose: use a large finite number, or keep them away from this call."
_MOST_INPUTS = 4


@dataclass(frozen=True)
class OriginCase:
    """What is known of an origin when its kind is determined.

    forward: the tensors of the forward call, where the origin is a backward call.
    flushed: a sentence about the call that rounded an input to zero, where one did.
    weight: the name of a bad weight.
    before: of the first bad gradient, the parameter whose gradient came before it.
    """

    event: EventKind
    function: str
    phase: str
    given: Sequence[TensorSummary]
    made: Sequence[TensorSummary]
    forward: Sequence[TensorSummary] = ()
    args: str | None = None
    flushed: str = ""
    weight: str = ""
    before: str = ""

    @property
    def inputs(self) -> list[TensorSummary]:
        """The floating point inputs; of a backward call those of its forward call, where the derivative is taken."""
        source = self.forward if self.forward else self.given
        return [tensor for tensor in source if tensor.role != "output" and is_float(tensor)]

    @property
    def result(self) -> TensorSummary:
        """The first bad tensor that it made."""
        return self.made[0]

    @property
    def limit(self) -> float:
        """The largest number of the result's dtype; of one that is not known, that of float64."""
        return dtypes.DTYPES.get(self.result.dtype, dtypes.DTYPES["float64"]).max

    def input(self, path: str) -> TensorSummary | None:
        """The input with this path among the arguments."""
        return next((tensor for tensor in self.inputs if tensor.path == path), None)

    def constant(self, position: int) -> float | None:
        """The positional argument, if it is a plain number."""
        args = arguments(self.args)
        value = args[position] if position < len(args) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def arguments(args: str | None) -> list[Any]:
    """The positional arguments of a call as they were recorded; tensors are `<tensor>`."""
    try:
        values = parse_json(args or "{}").get("args", [])
    except (ValueError, AttributeError):  # what another version of the recorder wrote
        return []
    return values if isinstance(values, list) else []


def is_float(tensor: TensorSummary) -> bool:
    """Whether a tensor can hold infinities at all."""
    return tensor.dtype in dtypes.DTYPES and dtypes.find(tensor.dtype).kind in ("float", "complex")


def counts(tensor: TensorSummary) -> str:
    """How many elements are not finite: "3 NaN and 1 Inf among 64 elements"."""
    statistics = tensor.statistics
    parts = [f"{count:,} {name}" for count, name in ((statistics.nan, "NaN"), (statistics.inf, "Inf")) if count]
    return f"{' and '.join(parts)} among {statistics.count:,} elements"


def zeros(tensor: TensorSummary, name: str = "") -> str:
    """How many elements are zero."""
    return f"{tensor.statistics.zeros:,} of {tensor.statistics.count:,} elements of {name or tensor.name} are zero"


def value_range(tensor: TensorSummary) -> str:
    """The range of the finite elements."""
    low, high = tensor.statistics.min, tensor.statistics.max
    return "has no finite element" if low is None or high is None else f"from {low:.4g} to {high:.4g}"


def kind_of(case: OriginCase) -> AccidentKind:
    """The kind of an origin."""
    if case.event in _NOT_BY_CALL:
        return _NOT_BY_CALL[case.event](case)
    if case.event == "converted":
        return _converted(case)
    kinds = (rule(case) for rule in _rules(case))
    return next((kind for kind in kinds if kind is not None), None) or _unknown(case)


def _rules(case: OriginCase) -> Iterator[AccidentRule]:
    yield _constant
    named = (BACKWARD if case.forward else FORWARD).get(case.function)
    if named is not None:
        yield named
    yield cast
    yield overflow


def _bad_input(case: OriginCase) -> AccidentKind:
    return AccidentKind(
        "bad input",
        f"It was given {counts(case.result)} in {case.result.name}, and no recorded call has made them.",
        "Look at the data of this step and at what prepares it; or at memory that was never filled (torch.empty).",
    )


def _bad_weight(case: OriginCase) -> AccidentKind:
    return AccidentKind(
        "bad weight",
        f"{case.weight or 'A weight'}, its {case.result.name}, already holds {counts(case.result)} on entry.",
        "Look at the checkpoint it was loaded from, or at what wrote to it last.",
    )


def _memory(case: OriginCase) -> AccidentKind:
    return AccidentKind(
        "uninitialised memory",
        f"Its {case.result.name} holds {counts(case.result)}. No recorded call has made it, nor was the module around"
        " given it: it is memory that was never filled (torch.empty), or was written past torch (by numpy, say).",
        "Look at where that tensor is created.",
    )


def _inside(case: OriginCase) -> AccidentKind:
    return AccidentKind(
        "unknown",
        f"Its own code made {counts(case.result)}, between the modules it calls: what these gave is finite.",
        "Record the same step with level='function' to see which line.",
    )


def _outside(case: OriginCase) -> AccidentKind:
    return AccidentKind(
        "unknown",
        f"The gradient that arrives at it holds {counts(case.result)}, and comes from code that was not recorded.",
        "Record with level='function' to see the backward of the loss, too.",
    )


def _unread(case: OriginCase) -> AccidentKind:
    before = f"that of {case.before}, which came before it, is finite"
    if not case.before:
        before = "none came before it, so that the loss may have brought it"
    return AccidentKind(
        "unknown",
        f"It is the first gradient of this backward pass that is bad, with {counts(case.result)}; {before}. The "
        "gradients of calls were not read in this step, so that it is the backward of one of these calls, or of code "
        "between them; where a model branches, of any call from there on.",
        "Read the gradients of all calls to see which: gradients='all' of a guard, or level='function' for the line.",
    )


_NOT_BY_CALL: dict[str, Callable[[OriginCase], AccidentKind]] = {
    "input": _bad_input,
    "weight": _bad_weight,
    "memory": _memory,
    "inside": _inside,
    "outside": _outside,
    "unread": _unread,
}
"""Events that the call itself has not caused."""


def _converted(case: OriginCase) -> AccidentKind:
    """What a call made of infinities that were there on purpose."""
    infinite = next((tensor for tensor in [*case.given, *case.forward] if tensor.statistics.inf), None)
    given = "It was given infinities" if infinite is None else f"Its {infinite.name} holds {counts(infinite)}"
    made = counts(case.result)
    if not case.result.statistics.nan:
        return AccidentKind(
            "infinity in a result",
            f"{given}, put there on purpose, and they reach its {case.result.name}: {made}.",
            "A masked place is counted: leave masked places out, or mask with a large finite number.",
        )
    if any(word in case.function for word in ("softmax", "logsumexp", "attention")):
        if infinite is not None and infinite.statistics.first_bad_value == math.inf:
            return AccidentKind(
                "inf−inf",
                f"{given}, the first of them +inf: it takes the largest entry of a row from each, and gives {made}.",
                "Mask with −inf, not +inf; or clamp these entries before.",
            )
        return AccidentKind(
            "fully masked",
            f"{given}: where every entry of a row is −inf there is nothing to divide by, and it gives {made}.",
            "Leave an entry of each row unmasked, or replace the rows that are all masked behind it.",
        )
    if case.function in ("add", "sub", "sum", "mean", "cumsum", "all_reduce"):
        met = "infinities of one sign, subtracted," if _has_one_sign(case) else "infinities of both signs"
        return AccidentKind("inf−inf", f"{given}; {met} add up to {made}.", _ON_MASKS)
    if case.function in ("mul", "matmul", "linear", "einsum", "addcmul"):
        zeros = sum(tensor.statistics.zeros for tensor in case.given)
        return AccidentKind("0·inf", f"{given}, and zeros ({zeros:,} in its inputs) meet them: {made}.", _ON_MASKS)
    return AccidentKind("NaN from infinity", f"{given}, and it made {made} of them.", _ON_MASKS)


def _has_one_sign(case: OriginCase) -> bool:
    """Whether a difference is of infinities that have the same sign, as far as the first of each side tells."""
    signs = [tensor.statistics.first_bad_value for tensor in case.given if tensor.statistics.inf]
    return case.function == "sub" and len(signs) > 1 and None not in signs and len({*signs}) == 1


def _constant(case: OriginCase) -> AccidentKind | None:
    if '"nan"' not in (case.args or ""):
        return None
    return AccidentKind("constant", "NaN stands in its arguments.", "Look at what should have replaced it.")


def _unknown(case: OriginCase) -> AccidentKind:
    shown = [*case.given, *case.forward][:_MOST_INPUTS]
    given = "; ".join(f"{tensor.name} {value_range(tensor)}" for tensor in shown) or "none were recorded"
    return AccidentKind(
        "unknown",
        f"It made {counts(case.result)} of finite inputs: {given}.",
        "Record this step with level='function' to look inside, and keep='tensors' to see which elements met.",
    )


# -- rules: how a function makes NaN or infinity of finite numbers -----------------------------------------------------


AccidentRule = Callable[[OriginCase], AccidentKind | None]

_ADD_EPSILON = "Add an epsilon to the divisor, or mask these elements before dividing."
_USE_LOGITS = (
    "Clamp the argument, or use a form that takes logits, such as log_softmax or binary_cross_entropy_with_logits."
)
_FIX_ZEROS = "Add an epsilon inside, or replace these elements before the call: a `where` behind it does not help here."
_SCALE_DOWN = "Scale the inputs down first, or compute this call in bfloat16 or float32."
_RUNAWAY = "Numbers of this size have run away before: look at how they grew in the steps before, and at the step size."
_WIDE = ("bfloat16", "float32", "float64")
"""Dtypes whose range is exceeded only by numbers that have gone wrong before."""


def _division(case: OriginCase) -> AccidentKind | None:
    divisor = case.input("0" if case.function in ("reciprocal", "rdiv") else "1")
    if divisor is None or not divisor.statistics.zeros:
        return None
    text = zeros(divisor, f"the divisor ({divisor.name})")
    if case.flushed:
        advice = f"Add an epsilon that {divisor.dtype} can hold, or compute this part in float32."
        return AccidentKind("underflow then reciprocal", f"{text}: {case.flushed}", advice)
    return AccidentKind("division by zero", f"{text}.", _ADD_EPSILON)


def _logarithm(case: OriginCase) -> AccidentKind | None:
    given = case.input("0")
    if given is None or given.statistics.min is None:
        return None
    edge, low = -1.0 if case.function == "log1p" else 0.0, given.statistics.min
    if low < edge:
        return AccidentKind(
            "log of a negative", f"The smallest element of {given.name} is {low:.6g}.", "Clamp it before."
        )
    if low == edge:
        text = f"The smallest element of {given.name} is −1" if edge else zeros(given)
        return AccidentKind("log of zero", f"{text}: {case.flushed}" if case.flushed else f"{text}.", _USE_LOGITS)
    return None


def _root(case: OriginCase) -> AccidentKind | None:
    given = case.input("0")
    if given is None or given.statistics.min is None:
        return None
    if given.statistics.min < 0:
        text = f"The smallest element of {given.name} is {given.statistics.min:.6g}."
        return AccidentKind(
            "sqrt of a negative", text, "Clamp it at zero; rounding alone can bring a small number below it."
        )
    if case.function == "rsqrt" and given.statistics.zeros:
        return AccidentKind("division by zero", f"{zeros(given)}, and it divides by their root.", _ADD_EPSILON)
    return None


def _power(case: OriginCase) -> AccidentKind | None:
    base, exponent = case.input("0"), case.constant(1)
    if base is None or exponent is None or base.statistics.min is None:
        return None
    if exponent != round(exponent) and base.statistics.min < 0:
        text = f"The smallest element of {base.name} is {base.statistics.min:.6g}, and the exponent {exponent:g}."
        return AccidentKind("sqrt of a negative", text, "Clamp it at zero.")
    if exponent < 0 and base.statistics.zeros:
        return AccidentKind("division by zero", f"{zeros(base)}, and the exponent is {exponent:g}.", _ADD_EPSILON)
    return None


def _spread(case: OriginCase) -> AccidentKind | None:
    given = case.input("0")
    if given is None or given.statistics.count != case.result.statistics.count:
        return None
    text = "It is taken over a single element, and divides by one less than that."
    return AccidentKind("division by zero", text, "Use correction=0, or more elements.")


def _eps(dtype: str) -> float:
    return dtypes.find(dtype).eps if dtype in dtypes.DTYPES else 0.0


def _exponential(case: OriginCase) -> AccidentKind | None:
    given = case.input("0")
    largest = None if given is None else given.statistics.max
    if given is not None and case.function in ("sinh", "cosh"):
        largest = given.statistics.absmax
    edge = math.log(case.limit) / (math.log(2) if case.function == "exp2" else 1)
    if given is None or largest is None or largest <= edge * (1 - _eps(given.dtype)):
        return None
    return AccidentKind(
        "overflow",
        f"{case.function} of {largest:.6g} is beyond {case.limit:.6g}, the largest {case.result.dtype}: its argument"
        f" may not exceed {edge:.4g}.",
        "Subtract the largest element first, or use the stable form (softplus, logsumexp).",
    )


FORWARD: dict[str, AccidentRule] = {
    **dict.fromkeys(("div", "rdiv", "reciprocal", "fmod", "remainder"), _division),
    **dict.fromkeys(("log", "log2", "log10", "log1p"), _logarithm),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    "pow": _power,
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), _spread),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh"), _exponential),
}
"""By the name of the function, also for ops of the backward pass."""


def _derivative(word: str, why: str, advice: str = _FIX_ZEROS) -> AccidentRule:
    """A rule for a derivative that is infinite or undefined at zero, where the function itself is finite."""

    def rule(case: OriginCase) -> AccidentKind | None:
        tensor = next((tensor for tensor in case.inputs if tensor.statistics.zeros), None)
        return None if tensor is None else AccidentKind(word, f"{zeros(tensor)}. {why}", advice)

    return rule


def _deviation(case: OriginCase) -> AccidentKind | None:
    """The deviation of a row is zero when all its elements are the same."""
    result = next((tensor for tensor in case.forward if tensor.role == "output" and tensor.statistics.zeros), None)
    why = "The derivative divides by the deviation."
    return None if result is None else AccidentKind("std of a constant", f"{zeros(result)}. {why}", _FIX_ZEROS)


BACKWARD: dict[str, AccidentRule] = {
    "sqrt": _derivative("sqrt at zero", "Its derivative 1/(2·sqrt(x)) is infinite, or NaN where the gradient is zero."),
    "rsqrt": _derivative("sqrt at zero", "Its derivative is infinite there."),
    "pow": _derivative("power at zero", "The derivative of a power below one is infinite there."),
    "log": _derivative("log of zero", "Its derivative is 1/x.", _USE_LOGITS),
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


def cast(case: OriginCase) -> AccidentKind | None:
    """A number that fits its own dtype, but not the dtype it is converted to."""
    for tensor in case.given:
        size = tensor.statistics.absmax
        if tensor.dtype != case.result.dtype and is_float(tensor) and size is not None and size > case.limit:
            largest = f"the largest {case.result.dtype} is {case.limit:.6g}"
            return AccidentKind(
                "overflow", f"Its {tensor.name} reaches {size:.6g} in {tensor.dtype}, and {largest}.", _advice(case)
            )
    return None


_PRODUCTS = ("mul", "square", "prod", "pow", "matmul", "linear", "einsum", "addcmul", "conv1d", "conv2d", "conv3d")
_SUMS = ("add", "sub", "sum", "cumsum", "mean", "norm", "mse_loss", "all_reduce", "reduce", "reduce_scatter")
_GROWING = frozenset((*_PRODUCTS, *_SUMS))
"""Functions whose results are sums or products of what they are given."""


def overflow(case: OriginCase) -> AccidentKind | None:
    """A result beyond the range of its dtype, if the sizes of the inputs allow one."""
    floats = [tensor for tensor in [*case.given, *case.forward] if is_float(tensor) and tensor.statistics.absmax]
    sizes = sorted((tensor.statistics.absmax or 0.0 for tensor in floats), reverse=True)
    if not sizes:
        return None
    terms = max(tensor.statistics.count for tensor in floats)
    factors = [abs(value) for value in (case.constant(0), case.constant(1)) if value is not None]
    most = sizes[0] * max(*factors, *sizes[1:2], *sizes[:1], 2.0) * terms
    if most < case.limit:
        return None
    sure = case.phase == "backward" or case.function in _GROWING
    doubt = "" if sure else " The sizes allow it; they do not prove it."
    inputs = " and ".join(f"{size:.4g}" for size in sizes[:2])
    return AccidentKind(
        "overflow",
        f"The largest {case.result.dtype} is {case.limit:.6g}. What it is given reaches {inputs}, and what it makes of"
        f" that does not fit: {counts(case.result)}.{doubt}",
        _advice(case),
    )


def _advice(case: OriginCase) -> str:
    return _RUNAWAY if case.result.dtype in _WIDE else _SCALE_DOWN
