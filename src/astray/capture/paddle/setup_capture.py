"""Notes what a program of Paddle is set to: Paddle, layers and their configurations, optimizers, gradient scalers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from astray.capture import setup_notes
from astray.capture.clipping import CLIPPING_SETTINGS, OFF
from astray.capture.engine import Engine
from astray.capture.module_settings import MOST_ATTRIBUTES, plain_attributes
from astray.capture.paddle import paddle_flags
from astray.capture.paddle.calls.wrappers import Chain, type_name
from astray.capture.paddle.native.core import Site
from astray.capture.paddle.patches import Clipping
from astray.capture.paddle.tensors import DTYPE
from astray.capture.setup_log import NOT_PLAIN, plain
from astray.capture.setup_notes import ModuleDescriber, SetupNotes

_BY_NAME = (DTYPE,)
_SCALER_SETTINGS = ("_enable", "_init_loss_scaling", "_incr_ratio", "_decr_ratio", "_incr_every_n_steps",
                    "_decr_every_n_nan_or_inf", "_use_dynamic_loss_scaling")  # fmt: skip


class SetupCapture(SetupNotes[Chain]):
    """Notes in the engine's `SetupLog` what the program is set to.

    `chains` returns every layer that is recorded, `site` the site of one.
    """

    def __init__(
        self, engine: Engine, chains: Callable[[], list[Chain]], site: Callable[[nn.Layer], Site | None]
    ) -> None:
        describer = ModuleDescriber(nn.Layer, type_name, attributes, _sources, described, _BY_NAME)
        super().__init__(engine, "paddle", paddle_flags, describer, chains, site)
        self._optimizers: dict[str, dict[str, Any]] = {}
        self._clipping = Clipping(engine)

    def stop(self) -> None:
        self._clipping.remove()

    def optimizer(self, optimizer: Any, label: str, name: Callable[[paddle.Tensor], str | None]) -> None:
        """An optimizer is about to step. `name` returns the name of a parameter."""
        for number, (settings, parameters) in enumerate(groups(optimizer)):
            site = f"{label}/param_groups.{number}"
            limits = self._clipping.of(parameters)  # by functions before the step; in it the optimizer clips once more
            noted = {"class": type(optimizer).__name__, **limits, **settings}
            noted["parameters"] = [name(parameter) or f"{site}.{at}" for at, parameter in enumerate(parameters)]
            if self._optimizers.get(site) != noted:
                self._optimizers[site] = noted
                self._note("optimizer", site, noted)


def note_scaler(engine: Engine, scaler: Any) -> None:
    """A GradScaler scales a loss."""
    setup_notes.note_scaler(engine, scaler, _SCALER_SETTINGS)


# -- what a layer is set to --------------------------------------------------------------------------------------------

_OF_EVERY_LAYER = frozenset(vars(nn.Layer()))
_NAMES_OF_PARAMETERS = ("_attr", "_name")
"""Ends of the names of attributes that say how parameters were made, or what they are called."""


def attributes(layer: nn.Layer) -> dict[str, Any]:
    """The plain attributes of a layer, without the underscore that Paddle's own layers put before their names."""
    own = vars(layer)
    found = plain_attributes(own, _sources(layer), _BY_NAME)
    named = {name.lstrip("_"): value for name, value in found.items()}
    named["training"] = bool(layer.training)
    return dict(list(named.items())[:MOST_ATTRIBUTES])


def _sources(layer: nn.Layer) -> list[str]:
    """The names of the attributes that are noted."""
    return [
        name
        for name in vars(layer)
        if name not in _OF_EVERY_LAYER and not name.endswith(_NAMES_OF_PARAMETERS) and not name.startswith("__")
    ] + ["training"]


def described(chain: Chain) -> dict[str, Any]:
    """All that is noted of a layer: its class, its plain attributes, its own tensors, and what wraps it."""
    layer = chain.inner
    values = {"class": type_name(layer), **attributes(layer)}
    outer = [type(wrapper).__name__ for wrapper in chain.modules[:-1]]
    if outer:
        values["wrapped in"] = outer
    devices = set()
    for group in (layer._parameters, layer._buffers):
        for name, tensor in group.items():
            if not isinstance(tensor, paddle.Tensor):
                continue
            values[f"{name}.dtype"] = str(tensor.dtype).removeprefix("paddle.")
            devices.add(str(tensor.place).removeprefix("Place(").removesuffix(")"))
            if group is layer._parameters:
                values[f"{name}.requires_grad"] = not tensor.stop_gradient
    if devices:
        values["device"] = ", ".join(sorted(devices))
    return values


# -- what an optimizer is set to ---------------------------------------------------------------------------------------

_NOT_OF_OPTIMIZERS = frozenset({"_name", "_dtype", "_already_create_accumulater", "_create_master_grad_states"})


def groups(optimizer: Any) -> list[tuple[dict[str, Any], list[paddle.Tensor]]]:
    """The parameter groups of an optimizer: their settings, and their parameters."""
    common: dict[str, Any] = {"lr": float(optimizer.get_lr())}
    for name, value in vars(optimizer).items():
        noted = NOT_PLAIN if name in _NOT_OF_OPTIMIZERS else plain(value, _BY_NAME)
        if noted is not NOT_PLAIN and not isinstance(noted, list):
            common[name.strip("_")] = noted
    common["regularization"] = _regularization(optimizer)
    clip = optimizer._grad_clip
    listed = optimizer._param_groups or []
    if not listed or not isinstance(listed[0], dict):
        return [({**common, **_clipping(clip)}, list(listed))]
    return [
        ({**common, **_plain_of(group), **_clipping(group.get("grad_clip", clip))}, list(group["params"]))
        for group in listed
    ]


def _plain_of(group: dict[str, Any]) -> dict[str, Any]:
    noted = {name: plain(value, _BY_NAME) for name, value in group.items() if name != "params"}
    return {name: value for name, value in noted.items() if value is not NOT_PLAIN}


def _regularization(optimizer: Any) -> Any:
    """The decay that is added to gradients: its class and coefficient."""
    decay = getattr(optimizer, "regularization", None)
    if decay is None:
        return None
    return f"{type(decay).__name__}({plain(getattr(decay, '_coeff', getattr(decay, '_regularization_coeff', None)))})"


def _clipping(clip: Any) -> dict[str, Any]:
    """How an optimizer clips gradients in its steps: in the words of functions that clip, if one of them does the same.

    In `grad_clip` stands what none of them does.
    """
    clip = getattr(clip, "_clip", clip)  # within that of parallel programs
    norm, value = CLIPPING_SETTINGS
    if clip is None:
        return {"grad_clip": OFF}
    if isinstance(clip, nn.ClipGradByGlobalNorm):
        return {"grad_clip": OFF, norm: float(clip.clip_norm)}
    if isinstance(clip, nn.ClipGradByValue) and clip.min == -clip.max:
        return {"grad_clip": OFF, value: float(clip.max)}
    limits = {name: value for name, value in vars(clip).items() if type(value) in (int, float)}
    shown = ", ".join(f"{name}={value}" for name, value in limits.items())
    return {"grad_clip": f"{type(clip).__name__}({shown})"}
