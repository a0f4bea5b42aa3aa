"""Reads a torch tensor for the engine: name of its dtype, where its memory lies, and whether it is still the same.

Tensors on other devices are copied to the host first. What has no plain memory to read (sparse, quantized, nested,
meta, a subclass that wraps other tensors) gets a row that says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from astray.capture.engine import Reading
from astray.stats import Strided
from astray.stats.dtypes import DTYPES

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
"""The dtypes that can be measured, by their torch object."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class TorchReader:
    """The engine's eyes on torch tensors."""

    def identity(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        if type(tensor) not in _PLAIN or tensor.is_inference():  # inference tensors keep no version
            return None
        if tensor.layout is not torch.strided:
            return None
        return (tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride())

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def read(self, tensor: torch.Tensor) -> Reading:
        dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
        device = str(tensor.device)
        shape = tuple(tensor.shape)
        reason = _unreadable(tensor)
        if reason is not None:
            return Reading(dtype, shape, (), device, None, note=reason)
        plain = tensor.detach()
        stride = plain.stride()
        if plain.is_conj() or plain.is_neg():  # the sign is a flag, not yet in memory
            plain = plain.resolve_conj().resolve_neg()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        memory = Strided(plain.data_ptr(), dtype, shape, plain.stride())
        return Reading(dtype, shape, stride, device, memory, owner=plain)


def _unreadable(tensor: torch.Tensor) -> str | None:
    """Why a tensor's numbers cannot be read, if they cannot."""
    if tensor.is_nested:
        return "nested tensors have no single memory to read"
    if tensor.layout is not torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type == "meta":
        return "a meta tensor has no numbers"
    if tensor.dtype not in NAMES:
        return f"the dtype {str(tensor.dtype).removeprefix('torch.')} is not known"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} wraps other tensors"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it is inside a functorch transform"
    return None
