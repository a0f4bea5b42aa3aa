"""What a module is set to: its plain attributes, its class, the dtypes of its tensors, and how it is wrapped.

Read from `vars` and the names in `__constants__`; no property of the user's is asked, so nothing of the program runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from astray.capture.pytorch.calls.wrappers import Chain, type_name
from astray.capture.pytorch.shards import is_distributed
from astray.capture.setup_log import NOT_PLAIN, plain

MOST_ATTRIBUTES = 64
MOST_FIELDS = 256
"""How many attributes of a module, and fields of a configuration, are told."""

_BY_NAME = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_UNTOLD = frozenset({"name_or_path", "layer_idx", "layer_id", "layer_number"})
"""Attributes that only say where a module is."""

_CONFIGS = ("config", "cfg")
_TOLD_PRIVATELY = ("_implementation", "_implementation_internal")
"""What transformers keeps behind an underscore though it decides which kernels run."""

_NO_FIELDS = frozenset({"transformers_version", "architectures", "name_or_path"})


def attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module by their names."""
    found: dict[str, Any] = {}
    own = vars(module)
    for name, value in own.items():
        if name.startswith("_") or name in _UNTOLD:
            continue
        told = plain(value, _BY_NAME)
        if told is not NOT_PLAIN:
            found[name] = told
    constants = inspect.getattr_static(type(module), "__constants__", ())
    for name in constants if isinstance(constants, list | tuple | set | frozenset) else ():
        if isinstance(name, str) and name not in own and not name.startswith("_"):
            told = plain(inspect.getattr_static(type(module), name, NOT_PLAIN), _BY_NAME)
            if told is not NOT_PLAIN:
                found.setdefault(name, told)
    return dict(list(found.items())[:MOST_ATTRIBUTES])


def described(chain: Chain) -> dict[str, Any]:
    """All that is told of a module: its class, its attributes, its own tensors, and what is around it."""
    module = chain.inner
    found = {"class": type_name(module), **attributes(module)}
    around = [type(wrapper).__name__ for wrapper in chain.modules[:-1]]
    if type(module).__name__ != found["class"]:  # torch has put a class of its own in place of it, as fully_shard does
        around.append(type(module).__name__.removesuffix(found["class"]))
    if around:
        found["wrapped in"] = around
    places = set()
    for group in (module._parameters, module._buffers):
        for name, tensor in group.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            found[f"{name}.dtype"] = str(tensor.dtype).removeprefix("torch.")
            places.add(str(tensor.device))
            if group is module._parameters:
                found[f"{name}.requires_grad"] = tensor.requires_grad
            if is_distributed(tensor):
                found[f"{name}.placement"] = _placement(tensor)
    if places:
        found["device"] = ", ".join(sorted(places))
    return found


def _placement(tensor: Any) -> str:
    mesh = tensor.device_mesh
    sizes = "×".join(map(str, mesh.shape))
    return f"{', '.join(map(str, tensor.placements))} over {sizes} ranks"


def config_of(module: nn.Module) -> Any:
    """The object that a module keeps its configuration in; None when it has none."""
    own = vars(module)
    for name in _CONFIGS:
        config = own.get(name)
        if isinstance(config, Mapping) or hasattr(config, "__dict__"):
            return None if isinstance(config, type | nn.Module) else config
    return None


def fields_of(config: Any) -> Mapping[str, Any]:
    """The fields of a configuration, as they lie in it."""
    return config if type(config) is dict else vars(config) if hasattr(config, "__dict__") else {}


def configured(config: Any) -> dict[str, Any]:
    """The plain fields of a configuration; those of dicts and configurations in it have their names in front."""
    found: dict[str, Any] = {}
    _gather(fields_of(config), "", found, 2)
    return dict(list(found.items())[:MOST_FIELDS])


def _gather(fields: Mapping[str, Any], prefix: str, found: dict[str, Any], depth: int) -> None:
    for name, value in fields.items():
        if not isinstance(name, str) or name in _NO_FIELDS:
            continue
        if name.startswith("_"):
            if not name.endswith(_TOLD_PRIVATELY):
                continue
            name = name.removesuffix("_internal")
        told = plain(value, _BY_NAME)
        if told is not NOT_PLAIN:
            found[prefix + name] = told
        elif depth and (type(value) is dict or type(value).__name__.endswith("Config")):
            _gather(fields_of(value), f"{prefix}{name}.", found, depth - 1)
