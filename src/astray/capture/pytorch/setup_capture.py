"""Notes what a program of torch is set to: torch, modules and their configurations, optimizers, gradient scalers.

Everything is read as `setup_notes` says, and optimizers at each update. Of a module only `vars` and the names in
`__constants__` are read, never a property, so no code of the program runs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from astray.capture import setup_notes
from astray.capture.engine import Engine
from astray.capture.module_settings import MOST_ATTRIBUTES, plain_attributes
from astray.capture.pytorch import torch_flags
from astray.capture.pytorch.calls.wrappers import Chain, type_name
from astray.capture.pytorch.experiments import active_swaps
from astray.capture.pytorch.native.core import Site
from astray.capture.pytorch.patches import Clipping
from astray.capture.pytorch.shards import is_distributed
from astray.capture.setup_log import NOT_PLAIN, plain
from astray.capture.setup_notes import ModuleDescriber, SetupNotes

_NOT_SETTINGS = frozenset({"params", "param_names"})
_SCALER_SETTINGS = ("_enabled", "_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
_TENSOR = torch.Tensor
_WRITTEN_GRADIENTS = "written_gradients"
"""The setting that lists the parameters of `_unusually_written`."""


class SetupCapture(SetupNotes[Chain]):
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
        describer = ModuleDescriber(nn.Module, type_name, attributes, attributes, described, _BY_NAME)
        super().__init__(engine, "torch", torch_flags, describer, chains, site, DisableTorchFunction)
        self._groups: dict[tuple[str, int], _ParameterGroup] = {}
        self._clipping = Clipping(engine)
        self._ended_swaps: dict[str, int] = {}  # sites that are as the program has them again, from a step on
        self._writes = writes

    def start(self, *, seeded: bool) -> None:
        super().start(seeded=seeded)
        active_swaps.listen(self)

    def stop(self) -> None:
        active_swaps.stop_listening(self)
        for site, step in self._ended_swaps.items():
            if step <= self._engine.step:
                self._engine.setup.note(step, "swap", site, {"to": None})
        self._clipping.remove()

    def swapped(self, site: str, to: str | None) -> None:
        """A part of the program runs elsewhere from now on; None: as the program has it.

        A step that had begun counts as swapped: the next one may have swapped it again before it calls anything.
        """
        step = self._engine.step
        ended = self._ended_swaps.pop(site, None)
        if to is None:
            self._ended_swaps[site] = step + 1 if self._step == step else step
            return
        if ended is not None and ended < step:
            self._engine.setup.note(ended, "swap", site, {"to": None})
        self._engine.setup.note(step, "swap", site, {"to": to})

    def swap_unused(self, what: str, why: str) -> None:
        self._engine.missed(what, why)

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


def note_scaler(engine: Engine, scaler: Any) -> None:
    """A GradScaler scales a loss."""
    with DisableTorchFunction():
        setup_notes.note_scaler(engine, scaler, _SCALER_SETTINGS)


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
