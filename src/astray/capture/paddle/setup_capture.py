"""Notes what the program is set to: Paddle, layers and their configurations, auto_cast, optimizers, gradient scalers.

Everything is read at the start, at the first outermost call of a step, and at each update. Nothing is done for a
tensor, and for a call only at its layer's first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from astray.capture.engine import Engine
from astray.capture.module_settings import (
    MOST_ATTRIBUTES,
    WatchedObject,
    config_of,
    configured,
    fields_of,
    plain_attributes,
)
from astray.capture.paddle import paddle_flags as flags
from astray.capture.paddle.calls.wrappers import Chain, type_name
from astray.capture.paddle.native.core import Site
from astray.capture.paddle.patches import Clipping
from astray.capture.paddle.tensors import DTYPE
from astray.capture.setup_log import MOST_CHANGES, NOT_PLAIN, environment, plain
from astray.records import ROOT

_SUBJECT = "what the program is set to"
_BY_NAME = (DTYPE,)
_SCALER_SETTINGS = ("_enable", "_init_loss_scaling", "_incr_ratio", "_decr_ratio", "_incr_every_n_steps",
                    "_decr_every_n_nan_or_inf", "_use_dynamic_loss_scaling")  # fmt: skip


class SetupCapture:
    """Notes in the engine's `SetupLog` what the program is set to.

    `chains` returns every layer that is recorded, `site` the site of one.
    """

    def __init__(
        self, engine: Engine, chains: Callable[[], list[Chain]], site: Callable[[nn.Layer], Site | None]
    ) -> None:
        self._engine = engine
        self._chains = chains
        self._site = site
        self._step = -1  # the last one in which everything was read
        self._is_stale = False  # whether layers were added or replaced since
        self._layers: list[WatchedObject] = []
        self._configs: list[WatchedObject] = []
        self._optimizers: dict[str, dict[str, Any]] = {}
        self._autocast: dict[str, str] = {}
        self._state: tuple[Any, ...] | None = None  # the flags of Paddle, when they were last read
        self._clipping = Clipping(engine)

    def start(self, *, seeded: bool) -> None:
        """The recording begins. `seeded`: the program has already set its seed."""
        try:
            self._note("environment", "", environment(os.environ))
            self._note_paddle(seeds=seeded)
            if self._is_stale:
                self._describe_all()
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(_SUBJECT, error)

    def stop(self) -> None:
        self._clipping.remove()

    def modules_changed(self) -> None:
        """Layers were added or replaced: all are read again before the next call."""
        self._is_stale = True

    def outermost(self, root: str) -> None:
        """An outermost layer is about to run."""
        try:
            if self._step != self._engine.step or self._is_stale:
                self._step = self._engine.step
                if flags.state() != self._state:
                    self._note_paddle()
                self._note_changed()
            state = flags.autocast()
            if self._autocast.get(root) != state:
                self._autocast[root] = state
                self._note("autocast", root or ROOT, {"autocast": state})
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(_SUBJECT, error)

    def first_call(self, site: Site) -> None:
        """A layer is called for the first time: auto_cast may have been switched inside the outermost one."""
        outer, state = self._autocast.get(site.root), flags.autocast()
        if outer is not None and state != outer:
            self._note("autocast", site.name, {"autocast": state})

    def optimizer(self, optimizer: Any, label: str, name: Callable[[paddle.Tensor], str | None]) -> None:
        """An optimizer is about to step. `name` returns the name of a parameter."""
        for number, (settings, parameters) in enumerate(groups(optimizer)):
            site = f"{label}/param_groups.{number}"
            noted = {"class": type(optimizer).__name__, **settings, **self._clipping.of(parameters)}
            noted["parameters"] = [name(parameter) or f"{site}.{at}" for at, parameter in enumerate(parameters)]
            if self._optimizers.get(site) != noted:
                self._optimizers[site] = noted
                self._note("optimizer", site, noted)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _note_paddle(self, *, seeds: bool = True) -> None:
        self._state = flags.state() if seeds else None
        self._note("paddle", "", flags.paddle_flags())
        if seeds:
            self._note("seed", "", flags.seeds())
        self._note("version", "", flags.versions())
        self._note("device", "", flags.devices())
        self._note("process", "", flags.process())

    def _note_changed(self) -> None:
        if self._is_stale:
            self._describe_all()
            return
        for at, watched in enumerate(self._layers):
            layer = watched.changed()
            if layer is not None:
                noted = attributes(layer)
                self._layers[at] = WatchedObject(layer, watched.site, _sources(layer))
                self._note("module", watched.site, {"class": type_name(layer), **noted}, MOST_CHANGES)
        for at, watched in enumerate(self._configs):
            config = watched.changed()
            if config is not None:
                self._configs[at] = WatchedObject(config, watched.site, fields_of(config))
                self._note("config", watched.site, configured(config, _BY_NAME), MOST_CHANGES)

    def _describe_all(self) -> None:
        """Describes every layer, and watches them all from now on."""
        self._is_stale = False
        self._layers.clear()
        self._configs.clear()
        configs: set[int] = set()
        for chain in self._chains():
            site = self._site(chain.inner)
            if site is not None:
                self._describe(chain, site.name, configs)

    def _describe(self, chain: Chain, site: str, configs: set[int]) -> None:
        self._note("module", site, described(chain), MOST_CHANGES)
        self._layers.append(WatchedObject(chain.inner, site, _sources(chain.inner)))
        config = config_of(chain.inner, nn.Layer)
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            self._note("config", site, configured(config, _BY_NAME), MOST_CHANGES)
            if hasattr(config, "__weakref__"):
                self._configs.append(WatchedObject(config, site, fields_of(config)))

    def _note(self, subject: str, site: str, values: dict[str, Any], most_changes: int | None = None) -> None:
        self._engine.setup.note(self._engine.step, subject, site, values, most_changes)


def note_scaler(engine: Engine, scaler: Any) -> None:
    """A GradScaler scales a loss. Its initial scale is noted: reading the current one would wait for the device."""
    own = vars(scaler)
    noted = {name.lstrip("_"): plain(own[name]) for name in _SCALER_SETTINGS if name in own}
    engine.setup.note(
        engine.step, "scaler", "", {name: value for name, value in noted.items() if value is not NOT_PLAIN}
    )


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
    common["grad_clip"] = _clipping(optimizer)
    listed = optimizer._param_groups or []
    if not listed or not isinstance(listed[0], dict):
        return [(common, list(listed))]
    return [({**common, **_plain_of(group)}, list(group["params"])) for group in listed]


def _plain_of(group: dict[str, Any]) -> dict[str, Any]:
    noted = {name: plain(value, _BY_NAME) for name, value in group.items() if name != "params"}
    return {name: value for name, value in noted.items() if value is not NOT_PLAIN}


def _regularization(optimizer: Any) -> Any:
    """The decay that is added to gradients: its class and coefficient."""
    decay = getattr(optimizer, "regularization", None)
    if decay is None:
        return None
    return f"{type(decay).__name__}({plain(getattr(decay, '_coeff', getattr(decay, '_regularization_coeff', None)))})"


def _clipping(optimizer: Any) -> Any:
    """How gradients are clipped inside the step: the class and its limits."""
    clip = getattr(optimizer, "_grad_clip", None)
    if clip is None:
        return "off"
    limits = {name: value for name, value in vars(clip).items() if type(value) in (int, float)}
    shown = ", ".join(f"{name}={value}" for name, value in limits.items())
    return f"{type(clip).__name__}({shown})"
