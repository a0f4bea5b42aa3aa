"""What sort of accident made NaN or infinity: by where it came from, or by the name of the call and its numbers.

The first rule that speaks is believed. Where none does, the kind is "unknown", with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from astray.nonfinite.alarm import Kind
from astray.nonfinite.case import Case, counts, reach
from astray.nonfinite.rules import BACKWARD, FORWARD, Rule, cast, overflow

_MEANT = "The infinities were put there on purpose: use a large finite number, or keep them away from this call."
_MOST_INPUTS = 4


def kind_of(case: Case) -> Kind:
    """The kind of an origin."""
    if case.event in _ELSEWHERE:
        return _ELSEWHERE[case.event](case)
    if case.event == "converted":
        return _converted(case)
    spoken = (rule(case) for rule in _rules(case))
    return next((kind for kind in spoken if kind is not None), None) or _unknown(case)


def _rules(case: Case) -> Iterator[Rule]:
    yield _constant
    named = (BACKWARD if case.forward else FORWARD).get(case.function)
    if named is not None:
        yield named
    yield cast
    yield overflow


def _bad_input(case: Case) -> Kind:
    return Kind(
        "bad input",
        f"It was given {counts(case.result)} in {case.result.name}, and no recorded call has made them.",
        "Look at the data of this step and at what prepares it; or at memory that nobody filled (torch.empty).",
    )


def _bad_weight(case: Case) -> Kind:
    return Kind(
        "bad weight",
        f"{case.weight or 'A weight'}, its {case.result.name}, already holds {counts(case.result)} on entry.",
        "Look at the checkpoint it was loaded from, or at what wrote to it last.",
    )


def _memory(case: Case) -> Kind:
    return Kind(
        "uninitialised memory",
        f"Its {case.result.name} holds {counts(case.result)}. No recorded call has made it, nor was the module around"
        " given it: it is memory that nobody filled (torch.empty), or was written past torch (by numpy, say).",
        "Look at where that tensor is created.",
    )


def _inside(case: Case) -> Kind:
    return Kind(
        "unknown",
        f"Its own code made {counts(case.result)}, between the modules it calls: what these gave is finite.",
        "Record the same step with level='function' to see which line.",
    )


def _outside(case: Case) -> Kind:
    return Kind(
        "unknown",
        f"The gradient that arrives at it holds {counts(case.result)}, and comes from code that was not recorded.",
        "Record with level='function' to see the backward of the loss, too.",
    )


def _unread(case: Case) -> Kind:
    before = f"that of {case.before}, which came before it, is finite"
    if not case.before:
        before = "none came before it, so that the loss may have brought it"
    return Kind(
        "unknown",
        f"It is the first gradient of this backward pass that is bad, with {counts(case.result)}; {before}. The "
        "gradients of calls were not read in this step, so that it is the backward of one of these calls, or of code "
        "between them; where a model branches, of any call from there on.",
        "Read the gradients of all calls to see which: gradients='all' of a guard, or level='function' for the line.",
    )


_ELSEWHERE: dict[str, Callable[[Case], Kind]] = {
    "input": _bad_input,
    "weight": _bad_weight,
    "memory": _memory,
    "inside": _inside,
    "outside": _outside,
    "unread": _unread,
}
"""Events in which the call itself did nothing wrong."""


def _converted(case: Case) -> Kind:
    """What a call made of infinities that were meant to be there."""
    eaten = next((one for one in [*case.given, *case.forward] if one.statistics.inf), None)
    given = "It was given infinities" if eaten is None else f"Its {eaten.name} holds {counts(eaten)}"
    made = counts(case.result)
    if not case.result.statistics.nan:
        return Kind(
            "infinity in a result",
            f"{given}, put there on purpose, and they reach its {case.result.name}: {made}.",
            "A masked place is counted: leave masked places out, or mask with a large finite number.",
        )
    if any(word in case.function for word in ("softmax", "logsumexp", "attention")):
        if eaten is not None and eaten.statistics.first_bad_value == math.inf:
            return Kind(
                "inf−inf",
                f"{given}, the first of them +inf: it takes the largest entry of a row from each, and gives {made}.",
                "Mask with −inf, not +inf; or clamp these entries before.",
            )
        return Kind(
            "fully masked",
            f"{given}: where every entry of a row is −inf there is nothing to divide by, and it gives {made}.",
            "Leave an entry of each row unmasked, or replace the rows that are all masked behind it.",
        )
    if case.function in ("add", "sub", "sum", "mean", "cumsum", "all_reduce"):
        met = "infinities of one sign, subtracted," if _has_one_sign(case) else "infinities of both signs"
        return Kind("inf−inf", f"{given}; {met} add up to {made}.", _MEANT)
    if case.function in ("mul", "matmul", "linear", "einsum", "addcmul"):
        zeros = sum(one.statistics.zeros for one in case.given)
        return Kind("0·inf", f"{given}, and zeros ({zeros:,} in its inputs) meet them: {made}.", _MEANT)
    return Kind("NaN from infinity", f"{given}, and it made {made} of them.", _MEANT)


def _has_one_sign(case: Case) -> bool:
    """Whether a difference is of infinities that have the same sign, as far as the first of each side tells."""
    signs = [one.statistics.first_bad_value for one in case.given if one.statistics.inf]
    return case.function == "sub" and len(signs) > 1 and None not in signs and len({*signs}) == 1


def _constant(case: Case) -> Kind | None:
    if '"nan"' not in (case.args or ""):
        return None
    return Kind("constant", "NaN stands in its arguments.", "Look at what should have replaced it.")


def _unknown(case: Case) -> Kind:
    shown = [*case.given, *case.forward][:_MOST_INPUTS]
    given = "; ".join(f"{one.name} {reach(one)}" for one in shown) or "none were recorded"
    return Kind(
        "unknown",
        f"It made {counts(case.result)} of finite inputs: {given}.",
        "Record this step with level='function' to look inside, and keep='tensors' to see which elements met.",
    )
