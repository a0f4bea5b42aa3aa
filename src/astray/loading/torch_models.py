"""Modules of torch, and tensors of torch as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from astray.comparison.pair.framework_names import TORCH
from astray.comparison.pair.own_tensors import OwnTensor
from astray.errors import StateError
from astray.loading.models import class_within

_WIDENED = tuple(
    getattr(torch, name)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
"""Dtypes that numpy does not have."""


class TorchModel:
    """The parameters and persistent buffers of a module."""

    framework = TORCH

    def __init__(self, model: torch.nn.Module) -> None:
        self._types = {name: class_within(type(module), "torch.nn") for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        state = model.state_dict(keep_vars=True)
        self._state = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}

    def tensors(self) -> dict[str, OwnTensor]:
        return {name: self._tensor(name, tensor) for name, tensor in self._state.items()}

    def _tensor(self, name: str, tensor: torch.Tensor) -> OwnTensor:
        module = name.rpartition(".")[0]
        role = "parameter" if name in self._parameters else "state"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return OwnTensor(name, role, dtype, tuple(tensor.shape), module, self._types.get(module, ""), 0, -1)

    def state(self) -> Mapping[str, Any]:
        return self._state

    def why_not(self, name: str) -> str:
        return _why_not(self._state[name])

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        with torch.no_grad():
            self._state[name].copy_(torch.from_numpy(np.array(values, order="C")))


def array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor, widened where numpy lacks its dtype."""
    if why := _why_not(tensor):
        raise StateError(f"A tensor of {tensor.dtype} and shape {list(tensor.shape)} cannot be read: {why}.")
    here = tensor.detach().cpu()
    found: npt.NDArray[Any] = (here.float() if here.dtype in _WIDENED else here).resolve_conj().resolve_neg().numpy()
    return found


def _why_not(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "it is on the meta device and has no memory"
    if tensor.layout != torch.strided:
        return "it is sparse"
    if tensor.is_quantized:
        return "it is quantized"
    return "it is distributed over ranks" if hasattr(tensor, "device_mesh") else ""
