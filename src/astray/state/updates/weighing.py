"""The update that was made against the one that was due, element by element and stretch by stretch.

What is found stays on the tensor's device, as a few float64 numbers, until somebody asks for all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from astray.state.updates.rules import ROUNDINGS, Before, Expected, Rule

STRETCH = 1 << 22
"""So many elements are taken at a time: a few hundred megabytes in float64, however large the parameter is."""

MEASURES = (
    "made",  # sums over the parameter: of (weight after − before)²
    "due",  # of the change that was due, squared
    "both",  # of the product of the two
    "error",  # of their difference, squared
    "weight",  # of the weight before, squared
    "beyond",  # elements further off than rounding explains
    "lost",  # elements that should have moved, and that rounding has held in place
    "owed",  # elements that should have moved
    "moved",  # elements that have moved
    "states",  # elements of states further off than rounding explains
)


class Held(NamedTuple):
    """One parameter as a step finds it, copied."""

    weight: Tensor
    gradient: Tensor | None
    states: Mapping[str, Tensor]


def weigh(
    held: Held, weight: Tensor, gradient: Tensor, after: Mapping[str, Any], group: Mapping[str, Any], rule: Rule
) -> Tensor:
    """The `MEASURES` of one parameter: `held` before the step, `weight` and `after` behind it."""
    exact = torch.finfo(weight.dtype)
    rough = max([exact.eps, *(torch.finfo(one.dtype).eps for one in group.values() if _is_real(one))])
    pieces = {name: value for name, value in after.items() if is_like(weight, value)}
    scalars = {name: value for name, value in after.items() if name not in pieces}
    fineness = {name: torch.finfo(value.dtype) for name, value in pieces.items() if _is_real(value)}
    total = torch.zeros(len(MEASURES), dtype=torch.float64, device=weight.device)
    for part in _stretches(weight.numel()):
        states = {name: _piece(value, part) for name, value in held.states.items()}
        later = {name: _piece(value, part) for name, value in pieces.items()}
        before = Before(
            weight=_piece(held.weight, part),
            gradient=_piece(gradient, part),
            states=states,
            after={**later, **scalars},
            group=group,
            eps=exact.eps,
            rough=rough,
            least=exact.eps * exact.tiny,
        )
        total += _weighed(before, _piece(weight, part), rule, fineness)
    return total


def weigh_untouched(held: Held, weight: Tensor) -> Tensor:
    """The same of a parameter that should not have moved at all."""
    total = torch.zeros(len(MEASURES), dtype=torch.float64, device=weight.device)
    for part in _stretches(weight.numel()):
        before, now = _piece(held.weight, part), _piece(weight, part)
        moved = _differ(before, now)
        numbers = {"made": _squared(now - before), "weight": _squared(before), "beyond": moved, "moved": moved}
        total += _stacked({name: numbers.get(name, torch.zeros_like(moved)) for name in MEASURES})
    return total


def _weighed(before: Before, now: Tensor, rule: Rule, fineness: Mapping[str, torch.finfo]) -> Tensor:
    expected = rule(before)
    due, wrong = expected.change, _is_off(before, now, expected)
    states = torch.zeros_like(wrong)
    for name, term in expected.states.items():
        off = (before.after[name] - term.value).abs()
        states |= off > ROUNDINGS * fineness[name].eps * (term.size + fineness[name].tiny)
    # A step that keeps its new states in registers moves a weight by what they were before they were rounded.
    unrounded = before._replace(after={**before.after, **{name: term.value for name, term in expected.states.items()}})
    other = rule(unrounded)
    right_so = wrong & ~states & ~_is_off(before, now, other)
    due, wrong = torch.where(right_so, other.change, due), wrong & ~right_so
    made, owed, moved = now - before.weight, due != 0, before.weight != now
    return _stacked(
        {
            "made": _squared(made),
            "due": _squared(due),
            "both": (made * due).sum(),
            "error": _squared(made - due),
            "weight": _squared(before.weight),
            "beyond": wrong.sum(),
            "lost": (owed & ~moved & ~wrong).sum(),
            "owed": owed.sum(),
            "moved": _differ(before.weight, now),
            "states": states.sum(),
        }
    )


def _is_off(before: Before, now: Tensor, expected: Expected) -> Tensor:
    """Where a weight is further from what is expected than rounding explains, or is not finite and should be."""
    due = before.weight + expected.change
    return ((now - due).abs() > expected.slack) | (now.isfinite() != due.isfinite())


def _stretches(count: int) -> Iterator[slice]:
    return (slice(start, start + STRETCH) for start in range(0, count, STRETCH))


def _piece(tensor: Tensor, part: slice) -> Tensor:
    return tensor.reshape(-1)[part].double()


def _squared(values: Tensor) -> Tensor:
    return (values * values).sum()


def _differ(one: Tensor, other: Tensor) -> Tensor:
    return ((one != other) & ~(one.isnan() & other.isnan())).sum()


def _stacked(numbers: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([numbers[name].double() for name in MEASURES])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_like(weight: Tensor, value: Any) -> bool:
    """Whether a state belongs to a parameter element by element."""
    return isinstance(value, Tensor) and value.shape == weight.shape
