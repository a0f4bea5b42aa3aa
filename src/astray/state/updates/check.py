"""Copies the inputs of an optimizer's step, and compares the update that it made with the one due.

Measurements stay on the tensor's device, as a few float64 numbers, until `updates` fetches all of them at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from astray.errors import StateError, UsageError
from astray.state.updates.optimizer_steps import OptimizerSteps, steps_of
from astray.state.updates.rules import ROUNDINGS, ExpectedUpdate, NoRuleError, ParameterState, Rule, SummingRule
from astray.state.updates.table import Updates, judged

_Row = tuple[dict[str, Any], str | None, Tensor | None]  # its facts, why it is not checked, its measures


def check_updates(
    optimizer: Any,
    model: Any = None,
    *,
    pattern: str | None = None,
    rules: Mapping[Any, Rule] | None = None,
) -> UpdateChecker:
    """Checks every step of an optimizer, from here to the end of the block, against its own formula in float64.

    >>> with astray.state.check_updates(optimizer, model) as checked:
    ...     loss.backward()
    ...     optimizer.step()
    >>> print(checked.updates)

    optimizer: of torch or Paddle.
    model: gives the parameters their names; without it they are numbered by group.
    pattern: a regular expression, matched at the start of names: check only these. A step's weights, gradients and
        states are copied, so that the whole takes as much memory again as the model and its optimizer.
    rules: formulas for other optimizers, by class or by its name: see `astray.state.updates.rules`.
    """
    return UpdateChecker(optimizer, model, pattern=pattern, rules=rules)


class UpdateChecker:
    """The result of `check_updates`. `close` ends it; so does the end of its block."""

    def __init__(
        self,
        optimizer: Any,
        model: Any = None,
        *,
        pattern: str | None = None,
        rules: Mapping[Any, Rule] | None = None,
    ) -> None:
        self._steps = steps_of(optimizer)
        self._rules = rules or {}
        self._names = _names(self._steps, model, pattern)
        self._before: dict[Any, ParameterBefore] = {}
        self._unread: dict[Any, str] = {}  # why the numbers of a parameter cannot be read
        self._step = 0
        self._rows: list[_Row] = []
        self._handles = self._steps.watch(self._copy_inputs, self._check_step)

    @property
    def updates(self) -> Updates:
        """The rows so far. Their measures are fetched from each device at once."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for _, _, measures in self._rows:
            if measures is not None:
                by_device.setdefault(measures.device, []).append(measures)
        fetched = {device: iter(torch.stack(tensors).tolist()) for device, tensors in by_device.items()}
        rows = []
        for facts, why, measures in self._rows:
            numbers = None if measures is None else dict(zip(MEASURES, next(fetched[measures.device]), strict=True))
            rows.append(judged(facts, why, numbers))
        return Updates(rows)

    def close(self) -> None:
        """Removes the hooks: no further step is checked."""
        for handle in self._handles:
            handle.remove()
        self._before.clear()

    def __enter__(self) -> UpdateChecker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- around a step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _copy_inputs(self) -> None:
        steps = self._steps
        self._before.clear()
        self._unread.clear()
        for parameter in self._names:
            try:
                weight, gradient = steps.weight(parameter), steps.begun_with(parameter)
            except StateError as error:
                self._unread[parameter] = str(error)
                continue
            states = {name: value for name, value in steps.states(parameter).items() if is_like(weight, value)}
            self._before[parameter] = ParameterBefore(
                weight.clone(),
                None if gradient is None else gradient.clone(),
                {name: value.clone() for name, value in states.items()},
            )

    @torch.no_grad()
    def _check_step(self) -> None:
        for unnamed, parameter in self._steps.parameters():
            before, name = self._before.pop(parameter, None), self._names.get(parameter) or unnamed
            if before is not None:
                self._check_parameter(name, parameter, before)
            elif parameter in self._unread:
                self._rows.append((self._facts(name, parameter, parameter), self._unread[parameter], None))
        self._step += 1

    def _check_parameter(self, name: str, parameter: Any, before: ParameterBefore) -> None:
        steps, why, measured = self._steps, self._steps.skipped(), None
        weight, rounded = steps.weight(parameter), steps.rounded(parameter)
        try:
            gradient = before.gradient if before.gradient is not None else steps.gradient(parameter)
            if gradient is None or why is not None:
                why = why or "it has no gradient"
                measured = measure_untouched(before, weight)
            else:
                measured = self._measure(parameter, before, gradient)
        except NoRuleError as error:
            why = str(error)
        facts = self._facts(name, parameter, weight if rounded is None else rounded)
        self._rows.append((facts, why, measured))

    def _facts(self, name: str, parameter: Any, tensor: Any) -> dict[str, Any]:
        return {
            "step": self._step,
            "name": name,
            "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).rpartition(".")[2],
            "optimizer": self._steps.kind,
            "lr": float(self._steps.lr(parameter)),
        }

    def _measure(self, parameter: Any, before: ParameterBefore, gradient: Tensor) -> Tensor:
        steps, weight = self._steps, self._steps.weight(parameter)
        if not weight.is_floating_point():
            raise NoRuleError(f"updates by {str(weight.dtype).removeprefix('torch.')} gradients are not recomputed")
        gradient, rule = steps.unscaled(gradient), steps.rule(self._rules)
        measured = measure_update(before, weight, gradient, steps.states(parameter), steps.settings(parameter), rule)
        rounded = steps.rounded(parameter)
        if rounded is not None:
            measured[MEASURES.index("beyond")] += _differ(weight.to(rounded.dtype), rounded)
        return measured


def _names(steps: OptimizerSteps, model: Any, pattern: str | None) -> dict[Any, str | None]:
    """The parameters to check, with their names; None for a parameter without one."""
    known = {} if model is None else steps.names(model)
    parameters = [parameter for _, parameter in steps.parameters()]
    if model is not None and parameters and not any(parameter in known for parameter in parameters):
        raise UsageError(
            f"None of the {len(parameters)} parameters of this {steps.kind} belongs to this {type(model).__name__}. "
            "Give the model that the optimizer was made for."
        )
    chosen = {parameter: known.get(parameter) for parameter in parameters}
    if pattern is None:
        return chosen
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}.") from None
    matching = {parameter: name for parameter, name in chosen.items() if wanted.match(name or "")}
    if not matching:
        raise UsageError(
            f"No parameter's name matches {pattern!r}. Names are those of the model, matched from their start: "
            f"try '.*{pattern}'."
        )
    return matching


# -- the update made against the one due, a block of elements at a time ------------------------------------------------


BLOCK = 1 << 22
"""Elements of a block: a few hundred megabytes in float64 for all its copies, however large the parameter is."""

MEASURES = (
    "made",  # sums over the parameter: of (weight after − before)²
    "due",  # of the change that was due, squared
    "both",  # of the product of the two
    "error",  # of their difference, squared
    "weight",  # of the weight before, squared
    "beyond",  # elements further off than rounding explains
    "lost",  # elements that should have moved, and did not because of rounding
    "owed",  # elements that should have moved
    "moved",  # elements that have moved
    "states",  # elements of states further off than rounding explains
)


class ParameterBefore(NamedTuple):
    """Copies of one parameter, its gradient and its states before a step."""

    weight: Tensor
    gradient: Tensor | None
    states: Mapping[str, Tensor]


def measure_update(
    copied: ParameterBefore,
    weight: Tensor,
    gradient: Tensor,
    after: Mapping[str, Any],
    group: Mapping[str, Any],
    rule: Rule,
) -> Tensor:
    """The `MEASURES` of one parameter: `copied` before the step, `weight` and the states `after` it."""
    exact = torch.finfo(weight.dtype)
    rough = max([exact.eps, *(torch.finfo(value.dtype).eps for value in group.values() if _is_real(value))])
    elementwise = {name: value for name, value in after.items() if is_like(weight, value)}
    scalars = {name: value for name, value in after.items() if name not in elementwise}
    precision = {name: torch.finfo(value.dtype) for name, value in elementwise.items() if _is_real(value)}

    def block(part: slice) -> ParameterState:
        states = {name: _piece(value, part) for name, value in copied.states.items()}
        later = {name: _piece(value, part) for name, value in elementwise.items()}
        return ParameterState(
            weight=_piece(copied.weight, part),
            gradient=_piece(gradient, part),
            states=states,
            after={**later, **scalars},
            group=group,
            eps=exact.eps,
            rough=rough,
            least=exact.eps * exact.tiny,
        )

    if isinstance(rule, SummingRule) and weight.numel():
        parts = [rule.sums(block(part)) for part in _blocks(weight.numel())]
        group = {**group, **{name: sum(each[name] for each in parts) for name in parts[0]}}
    total = torch.zeros(len(MEASURES), dtype=torch.float64, device=weight.device)
    for part in _blocks(weight.numel()):
        total += _measured(block(part), _piece(weight, part), rule, precision)
    return total


def measure_untouched(copied: ParameterBefore, weight: Tensor) -> Tensor:
    """The `MEASURES` of a parameter that should not have moved at all."""
    total = torch.zeros(len(MEASURES), dtype=torch.float64, device=weight.device)
    for part in _blocks(weight.numel()):
        before, now = _piece(copied.weight, part), _piece(weight, part)
        moved = _differ(before, now)
        numbers = {"made": _squared(now - before), "weight": _squared(before), "beyond": moved, "moved": moved}
        total += _stacked({name: numbers.get(name, torch.zeros_like(moved)) for name in MEASURES})
    return total


def _measured(before: ParameterState, now: Tensor, rule: Rule, precision: Mapping[str, torch.finfo]) -> Tensor:
    expected = rule(before)
    due, wrong = expected.change, _is_off(before, now, expected)
    states = torch.zeros_like(wrong)
    for name, term in expected.states.items():
        off = (before.after[name] - term.value).abs()
        states |= off > ROUNDINGS * precision[name].eps * (term.size + precision[name].tiny)
    # A step that keeps its new states in registers moves a weight by what they were before they were rounded.
    unrounded = before._replace(after={**before.after, **{name: term.value for name, term in expected.states.items()}})
    by_unrounded = rule(unrounded)
    explained = wrong & ~states & ~_is_off(before, now, by_unrounded)
    due, wrong = torch.where(explained, by_unrounded.change, due), wrong & ~explained
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


def _is_off(before: ParameterState, now: Tensor, expected: ExpectedUpdate) -> Tensor:
    """Where a weight is further from what is expected than rounding explains, or is not finite and should be."""
    due = before.weight + expected.change
    return ((now - due).abs() > expected.slack) | (now.isfinite() != due.isfinite())


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def _piece(tensor: Tensor, part: slice) -> Tensor:
    return tensor.reshape(-1)[part].double()


def _squared(values: Tensor) -> Tensor:
    return (values * values).sum()


def _differ(before: Tensor, after: Tensor) -> Tensor:
    return ((before != after) & ~(before.isnan() & after.isnan())).sum()


def _stacked(numbers: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([numbers[name].double() for name in MEASURES])


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_like(weight: Tensor, value: Any) -> bool:
    """Whether a state belongs to a parameter element by element."""
    return isinstance(value, Tensor) and value.shape == weight.shape
