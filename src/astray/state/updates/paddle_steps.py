"""Paddle's optimizers, as the check of updates needs them.

They have no hooks, so the methods that step are shadowed on the optimizer that is watched and on what wraps it, and so
is the method to which each of them hands its gradients once they are clipped. What is checked is what becomes of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from astray.capture.optimizer_sites import inner_optimizer, unwrapped
from astray.errors import StateError
from astray.state.models import Handle, is_of_paddle
from astray.state.paddle_models import MASTER, groups_of, shared, states_of
from astray.state.updates.paddle_rules import RULES
from astray.state.updates.rules import NoRuleError, Rule, rule_of

SETTINGS = {
    "momentum": "_momentum",
    "use_nesterov": "_use_nesterov",
    "rescale_grad": "_rescale_grad",
    "beta1": "_beta1",
    "beta2": "_beta2",
    "epsilon": "_epsilon",
    "rho": "_rho",
    "centered": "_centered",
    "initial_accumulator_value": "initial_accumulator_value",
    "amsgrad": "_amsgrad",
    "always_adapt": "always_adapt",
}
"""Settings of a group, or of the whole optimizer, whose attributes these are."""

_STEPS = ("step", "minimize", "_apply_optimize")
"""Each is a step, unless it runs within another. A wrapper may call the last of them alone."""

_GRADIENTS = "append_regularization_ops"


class PaddleSteps:
    """The steps of an optimizer of Paddle."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._wrappers = [one for one in unwrapped(optimizer) if one is not self._optimizer]
        self.kind = type(self._optimizer).__name__
        self._within = False
        self._gradients: dict[int, Any] = {}  # by the id of the parameter
        self._numbers: dict[int, dict[str, float]] = {}  # states without dimensions, before the step
        self._handed_over = False  # whether the step that runs or has just ended has handed over its gradients
        self._fused = False

    def parameters(self) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(groups_of(self._optimizer)):
            for place, parameter in enumerate(group["params"]):
                yield f"group{number}.{place}", parameter

    def names(self, model: Any) -> dict[Any, str]:
        return {parameter: name for name, parameter in model.named_parameters()}

    def watch(self, begin: Callable[[], None], end: Callable[[], None]) -> list[Handle]:
        def around(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._within:
                return step(*args, **kwargs)
            self._gradients, self._handed_over, self._fused = {}, False, False
            self._numbers = {id(parameter): self._without_dimensions(parameter) for _, parameter in self.parameters()}
            begin()
            self._within = True
            try:
                result = step(*args, **kwargs)
            finally:
                self._within = False
            end()
            self._gradients = {}
            return result

        def clipped(regularise: Callable[..., Any], pairs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._within:
                self._handed_over = True
                self._gradients |= {id(parameter): gradient for parameter, gradient in pairs}
                known = {id(parameter) for _, parameter in self.parameters()}
                self._fused |= any(id(parameter) not in known for parameter, _ in pairs)
            return regularise(pairs, *args, **kwargs)

        return [
            *(_Shadow(one, name, around) for one in self._wrappers for name in _STEPS if hasattr(type(one), name)),
            *(_Shadow(self._optimizer, name, around) for name in _STEPS),
            _Shadow(self._optimizer, _GRADIENTS, clipped),
        ]

    def weight(self, parameter: Any) -> Tensor:
        """The parameter, or the float32 copy that `multi_precision` makes of it in the first step."""
        plain = shared(parameter.name, parameter)
        if not self._has_copy(parameter):
            return plain
        copy = self._optimizer._master_weights.get(parameter.name)
        return plain.float() if copy is None else shared(parameter.name, copy)

    def states(self, parameter: Any) -> Mapping[str, Any]:
        found = states_of(self._optimizer, parameter)
        return {name: shared(name, value) for name, value in found.items() if name != MASTER}

    def begun_with(self, parameter: Any) -> Tensor | None:  # noqa: ARG002
        """None: gradients are known once they are clipped, during the step."""
        return None

    def gradient(self, parameter: Any) -> Tensor | None:
        gradient = self._gradients.get(id(parameter))
        if not self._handed_over:
            raise NoRuleError(f"there is no rule for {self.kind}")
        if self._fused:
            raise NoRuleError("the step has updated other tensors in place of the parameters, which it has fused")
        try:
            return None if gradient is None else shared("gradient", gradient)
        except StateError as error:
            sparse = gradient is not None and gradient.is_selected_rows()
            raise NoRuleError("updates by sparse gradients are not recomputed" if sparse else str(error)) from None

    def unscaled(self, gradient: Tensor) -> Tensor:
        return gradient

    def lr(self, parameter: Any) -> Tensor:
        """The learning rate that the step has used, in the precision that it has."""
        used = self._optimizer._global_learning_rate()
        if used is None:  # before the first step, and of optimizers that make no tensor of it
            return torch.tensor(float(self._optimizer.get_lr()), dtype=torch.float64)
        rate = shared("learning rate", used)
        own = (getattr(parameter, "optimize_attr", None) or {}).get("learning_rate", 1.0)
        number = _number(own) if is_of_paddle(own, "Tensor") else rate.item() * own
        return torch.tensor(number, dtype=rate.dtype)

    def settings(self, parameter: Any) -> Mapping[str, Any]:
        optimizer = self._optimizer
        group = self._group_of(parameter)
        found = {name: self._setting(group, name, attribute) for name, attribute in SETTINGS.items()}
        gradient = self._gradients.get(id(parameter))
        precision = {} if gradient is None else {"gradient_eps": torch.finfo(shared("gradient", gradient).dtype).eps}
        return {
            **{name: value for name, value in found.items() if value is not None},
            **self._numbers[id(parameter)],
            **self._regularisation(parameter, group),
            **precision,
            "lr": self.lr(parameter),
            "lr_ratio": 1.0 if (ratio := getattr(optimizer, "_lr_ratio", None)) is None else float(ratio(parameter)),
            "decay": self._decay(parameter, group),
        }

    def rounded(self, parameter: Any) -> Tensor | None:
        """The parameter in its own dtype, where the step is made to a float32 copy of it."""
        return shared(parameter.name, parameter) if self._has_copy(parameter) else None

    def skipped(self) -> str | None:
        found_inf = self._optimizer._auxiliary_vars.get("found_inf")
        return "its GradScaler has left the step out" if found_inf is not None and _number(found_inf) else None

    def rule(self, own: Mapping[Any, Rule]) -> Rule:
        if getattr(self._optimizer, "_lazy_mode", False):
            raise NoRuleError("lazy_mode is not recomputed")
        return rule_of(self._optimizer, own, RULES)

    # -- settings ----------------------------------------------------------------------------------------------------

    def _group_of(self, parameter: Any) -> Mapping[str, Any]:
        return next(group for group in groups_of(self._optimizer) if any(each is parameter for each in group["params"]))

    def _setting(self, group: Mapping[str, Any], name: str, attribute: str) -> Any:
        """A setting of a group; without groups, of the optimizer. Its attributes are those of the last group."""
        value = getattr(self._optimizer, attribute, None)
        if len(group) > 1:
            value = group.get(name, self._optimizer._default_dict.get(name, value))
        return value if value is None or isinstance(value, bool) else _number(value)

    def _decay(self, parameter: Any, group: Mapping[str, Any]) -> float:
        """The share of the weight that the optimizer itself takes away: AdamW's and Lamb's."""
        optimizer = self._optimizer
        chosen = getattr(optimizer, "_apply_decay_param_fun", None)
        if chosen is not None and not chosen(parameter.name):
            return 0.0
        left_out = group.get("exclude_from_weight_decay_fn", getattr(optimizer, "_exclude_from_weight_decay_fn", None))
        if left_out is not None and left_out(parameter):
            return 0.0
        for name in ("lamb_weight_decay", "weight_decay"):
            if hasattr(optimizer, f"_{name}"):
                return self._setting(group, name, f"_{name}") or 0.0
        return 0.0

    def _regularisation(self, parameter: Any, group: Mapping[str, Any]) -> dict[str, float]:
        """The coefficients of what is added to the gradient: beforehand, or by the kernel itself as Momentum's does."""
        own, of_all = getattr(parameter, "regularizer", None), self._optimizer.regularization
        coefficients = {"l1": 0.0, "l2": 0.0, "fused_l2": 0.0}
        fuses = hasattr(self._optimizer, "_regularization_coeff")
        if fuses and own is None:
            coefficients["fused_l2"] = self._setting(group, "regularization_coeff", "_regularization_coeff")
        regularizer = own if own is not None else of_all
        if regularizer is not None:
            kind = {"L1Decay": "l1", "L2Decay": "fused_l2" if fuses else "l2"}.get(type(regularizer).__name__)
            if kind is None:
                raise NoRuleError(f"regularisation by {type(regularizer).__name__} is not recomputed")
            coefficients[kind] = float(regularizer._coeff)
        return coefficients

    # -- states ------------------------------------------------------------------------------------------------------

    def _has_copy(self, parameter: Any) -> bool:
        is_rounded = shared(parameter.name, parameter).dtype in (torch.float16, torch.bfloat16)
        return is_rounded and bool(getattr(self._optimizer, "_multi_precision", False))

    def _without_dimensions(self, parameter: Any) -> dict[str, float]:
        found = states_of(self._optimizer, parameter)
        return {name: _number(value) for name, value in found.items() if name.endswith("_pow_acc")}


def _number(value: Any) -> float:
    """A number, or the only one of a tensor."""
    return float(shared("a number", value).item() if is_of_paddle(value, "Tensor") else value)


class _Shadow:
    """A method of one object, called by way of another function until it is removed.

    The class is asked for the method at each call: a recording may have replaced it there since.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)
        self._on = True

        @functools.wraps(getattr(owner, name))
        def shadow(*args: Any, **kwargs: Any) -> Any:
            own = self._before or getattr(type(owner), name).__get__(owner)
            return around(own, *args, **kwargs) if self._on else own(*args, **kwargs)

        self._shadow = shadow
        setattr(owner, name, shadow)

    def remove(self) -> None:
        """Puts the method back; what another has put over this one since then stays, and passes calls through."""
        self._on = False
        if vars(self._owner).get(self._name) is not self._shadow:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
