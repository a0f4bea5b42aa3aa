"""Notes what the program is set to: torch, modules and their configurations, autocast, optimizers, gradient scalers.

Everything is read at the start, at the first outermost call of a step, and at each update. Nothing is done for a
tensor, and for a call only at its module's first. Checking a module that has not changed is one comparison of the
objects in its `__dict__`: 0.4 µs, once a step. Only `vars` and the names in `__constants__` are read, never a property,
so no code of the program runs.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from astray.capture.engine import Engine
from astray.capture.module_settings import (
    MOST_ATTRIBUTES,
    WatchedObject,
    config_of,
    configured,
    fields_of,
    plain_attributes,
)
from astray.capture.pytorch import torch_flags as flags
from astray.capture.pytorch.calls.wrappers import Chain, type_name
from astray.capture.pytorch.native.core import Site
from astray.capture.pytorch.patches import Clipping
from astray.capture.pytorch.shards import is_distributed
from astray.capture.setup_log import MOST_CHANGES, NOT_PLAIN, environment, plain
from astray.records import ROOT

_NOT_SETTINGS = frozenset({"params", "param_names"})
_SCALER_SETTINGS = ("_enabled", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
_TENSOR = torch.Tensor
_SUBJECT = "what the program is set to"
_WRITTEN_GRADIENTS = "written_gradients"
"""The setting that lists the parameters of `_unusually_written`."""


class SetupCapture:
    """Notes in the engine's `SetupLog` what the program is set to.

    `chains` returns every module that is recorded, `site` the site of one, `writes` how often the gradient of a
    parameter was written to since the backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        chains: Callable[[], list[Chain]],
        site: Callable[[nn.Module], Site | None],
        writes: Callable[[torch.Tensor], int | None],
    ) -> None:
        self._engine = engine
        self._chains = chains
        self._site = site
        self._step = -1  # the last one in which everything was read
        self._is_stale = False  # whether modules were added or replaced since
        self._modules: list[WatchedObject] = []
        self._configs: list[WatchedObject] = []
        self._groups: dict[tuple[str, int], _ParameterGroup] = {}
        self._autocast: dict[str, str] = {}
        self._state: tuple[Any, ...] | None = None  # the flags of torch, when they were last read
        self._clipping = Clipping(engine)
        self._writes = writes

    def start(self, *, seeded: bool) -> None:
        """The recording begins. `seeded`: the program has already set its seed."""
        with _ReportedFailures(self._engine):
            self._note("environment", "", environment(os.environ))
            self._note_torch(seeds=seeded)
            if self._is_stale:
                self._describe_all()

    def stop(self) -> None:
        self._clipping.remove()

    def modules_changed(self) -> None:
        """Modules were added or replaced: all are read again before the next call."""
        self._is_stale = True

    def outermost(self, root: str) -> None:
        """An outermost module is about to run."""
        try:  # not `_ReportedFailures`: the hook that calls this has disabled torch functions
            if self._step != self._engine.step or self._is_stale:
                self._step = self._engine.step
                if flags.state() != self._state:
                    self._note_torch()
                self._note_changed_modules()
            state = flags.autocast()
            if self._autocast.get(root) != state:
                self._autocast[root] = state
                self._note("autocast", root or ROOT, {"autocast": state})
        except Exception as error:  # noqa: BLE001 - the user's training must not fail because we did
            self._engine.failed(_SUBJECT, error)

    def first_call(self, site: Site) -> None:
        """A module is called for the first time: autocast may have been switched inside the outermost one."""
        outer, state = self._autocast.get(site.root), flags.autocast()
        if outer is not None and state != outer:
            self._note("autocast", site.name, {"autocast": state})

    def optimizer(self, optimizer: Any, label: str, name: Callable[[torch.Tensor], str | None]) -> None:
        """An optimizer is about to step. `name` returns the name of a parameter."""
        for number, group in enumerate(optimizer.param_groups):
            known = self._groups.get((label, number))
            if known is None:
                known = self._groups[label, number] = _ParameterGroup()
            site, parameters = f"{label}/param_groups.{number}", group["params"]
            written = {name(parameter) for parameter in _unusually_written(parameters, self._writes)}
            treatment = self._clipping.of(parameters)
            treatment[_WRITTEN_GRADIENTS] = sorted(each for each in written if each is not None)
            changed, changed_treatment = known.changed(group), known.changed_treatment(treatment)
            if changed or changed_treatment:
                noted = _settings(group, changed) | changed_treatment
                if "params" in changed:
                    names = [name(tensor) or f"{site}.{at}" for at, tensor in enumerate(parameters)]
                    noted = {"class": type(optimizer).__name__, **noted, "parameters": names}
                self._note("optimizer", site, noted)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _note_torch(self, *, seeds: bool = True) -> None:
        self._state = flags.state() if seeds else None
        self._note("torch", "", flags.torch_flags())
        if seeds:
            self._note("seed", "", flags.seeds())
        self._note("version", "", flags.versions())
        self._note("device", "", flags.devices())
        self._note("process", "", flags.process())

    def _note_changed_modules(self) -> None:
        if self._is_stale:
            self._describe_all()
            return
        for at, watched in enumerate(self._modules):
            module = watched.changed()
            if module is not None:
                noted = attributes(module)
                self._modules[at] = WatchedObject(module, watched.site, noted)
                self._note("module", watched.site, {"class": type_name(module), **noted}, MOST_CHANGES)
        for at, watched in enumerate(self._configs):
            config = watched.changed()
            if config is not None:
                self._configs[at] = WatchedObject(config, watched.site, fields_of(config))
                self._note("config", watched.site, configured(config, _BY_NAME), MOST_CHANGES)

    def _describe_all(self) -> None:
        """Describes every module, and watches them all from now on."""
        self._is_stale = False
        self._modules.clear()
        self._configs.clear()
        configs: set[int] = set()
        for chain in self._chains():
            site = self._site(chain.inner)
            if site is not None:
                with _ReportedFailures(self._engine, f"what {site.name} is set to"):
                    self._describe(chain, site.name, configs)

    def _describe(self, chain: Chain, site: str, configs: set[int]) -> None:
        """Describes a module, and its configuration unless that is one of those that were already."""
        self._note("module", site, described(chain), MOST_CHANGES)
        self._modules.append(WatchedObject(chain.inner, site, attributes(chain.inner)))
        config = config_of(chain.inner, nn.Module)
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            self._note("config", site, configured(config, _BY_NAME), MOST_CHANGES)
            if hasattr(config, "__weakref__"):
                self._configs.append(WatchedObject(config, site, fields_of(config)))

    def _note(self, subject: str, site: str, values: dict[str, Any], most_changes: int | None = None) -> None:
        self._engine.setup.note(self._engine.step, subject, site, values, most_changes)


def note_scaler(engine: Engine, scaler: Any) -> None:
    """A GradScaler scales a loss. Its initial scale is noted: reading the current one would wait for the device."""
    with _ReportedFailures(engine):
        own = vars(scaler)
        noted = {name.lstrip("_"): plain(own[name]) for name in _SCALER_SETTINGS if name in own}
        engine.setup.note(
            engine.step, "scaler", "", {name: value for name, value in noted.items() if value is not NOT_PLAIN}
        )


class _ReportedFailures:
    """Keeps exceptions of its block out of the program, and torch functions called in it out of the recording."""

    __slots__ = ("_engine", "_torch_function_off", "_what")

    def __init__(self, engine: Engine, what: str = _SUBJECT) -> None:
        self._engine = engine
        self._what = what
        self._torch_function_off = DisableTorchFunction()

    def __enter__(self) -> None:
        self._torch_function_off.__enter__()

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        self._torch_function_off.__exit__(None, None, None)
        if isinstance(error, Exception):
            self._engine.failed(self._what, error)
            return True
        return False


class _ParameterGroup:
    """The settings of a parameter group when it was last read."""

    __slots__ = ("_known", "_size", "_treatment")

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._treatment: dict[str, Any] = {}
        self._size = 0

    def changed(self, group: dict[str, Any]) -> list[str]:
        """The names of settings that have changed, or may have: a learning rate that is a tensor changes in place."""
        known, size = self._known, len(group["params"])
        names = [
            name for name, value in group.items() if known.get(name, known) is not value or isinstance(value, _TENSOR)
        ]
        if size != self._size and "params" not in names:
            names.append("params")
        if names:
            self._known, self._size = dict(group), size
        return names

    def changed_treatment(self, now: dict[str, Any]) -> dict[str, Any]:
        """What was done to its gradients before the step, where that has changed."""
        new = {name: value for name, value in now.items() if self._treatment.get(name) != value}
        self._treatment = now
        return new


def _settings(group: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Those of the named settings of a parameter group that are plain values."""
    settings = {}
    for name in names:
        value = group[name]
        if name in _NOT_SETTINGS:
            continue
        if isinstance(value, torch.Tensor):
            is_here = value.device.type == "cpu" and value.numel() == 1
            value = value.item() if is_here else f"<a tensor on {value.device}>"  # reading it would wait for the device
        noted = plain(value, (torch.dtype,))
        if noted is not NOT_PLAIN:
            settings[name] = noted
    return settings


def _unusually_written(
    parameters: Sequence[torch.Tensor], writes: Callable[[torch.Tensor], int | None]
) -> list[torch.Tensor]:
    """Those of some parameters whose gradients were written to more or less often than most, or replaced.

    Clipping and unscaling write to all of them alike; the others were written to by the program itself. Version
    counters count the writes, so no gradient is read.
    """
    counted = [(parameter, writes(parameter)) for parameter in parameters]
    counts = Counter(number for _, number in counted if number is not None)
    if len(counts) < 2:
        return []
    usual = min(counts, key=lambda number: (-counts[number], number))
    return [parameter for parameter, number in counted if number not in (None, usual)]


# -- what a module is set to -------------------------------------------------------------------------------------------


_BY_NAME = (torch.dtype, torch.device, torch.memory_format, torch.layout)


def attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module by their names."""
    own = vars(module)
    found = plain_attributes(own, [name for name in own if not name.startswith("_")], _BY_NAME)
    constants = inspect.getattr_static(type(module), "__constants__", ())
    for name in constants if isinstance(constants, list | tuple | set | frozenset) else ():
        if isinstance(name, str) and name not in own and not name.startswith("_"):
            noted = plain(inspect.getattr_static(type(module), name, NOT_PLAIN), _BY_NAME)
            if noted is not NOT_PLAIN:
                found.setdefault(name, noted)
    return dict(list(found.items())[:MOST_ATTRIBUTES])


def described(chain: Chain) -> dict[str, Any]:
    """All that is noted of a module: its class, its plain attributes, its own tensors, and what wraps it."""
    module = chain.inner
    values = {"class": type_name(module), **attributes(module)}
    outer = [type(wrapper).__name__ for wrapper in chain.modules[:-1]]
    if type(module).__name__ != values["class"]:  # torch has replaced the module's class, as fully_shard does
        outer.append(type(module).__name__.removesuffix(values["class"]))
    if outer:
        values["wrapped in"] = outer
    devices = set()
    for group in (module._parameters, module._buffers):
        for name, tensor in group.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            values[f"{name}.dtype"] = str(tensor.dtype).removeprefix("torch.")
            devices.add(str(tensor.device))
            if group is module._parameters:
                values[f"{name}.requires_grad"] = tensor.requires_grad
            if is_distributed(tensor):
                values[f"{name}.placement"] = _placement(tensor)
    if devices:
        values["device"] = ", ".join(sorted(devices))
    return values


def _placement(tensor: Any) -> str:
    mesh = tensor.device_mesh
    sizes = "×".join(map(str, mesh.shape))
    return f"{', '.join(map(str, tensor.placements))} over {sizes} ranks"
