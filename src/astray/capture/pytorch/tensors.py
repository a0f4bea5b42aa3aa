"""Reads a torch tensor for the engine: name of its dtype, where its memory lies, and whether it is still the same.

Tensors on other devices are copied to the host first. What has no plain memory to read (sparse, quantized, nested,
meta, a subclass that wraps other tensors) gets a row that says so.
"""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from astray.capture.engine import Identity, Reading
from astray.stats import Strided
from astray.stats.dtypes import DTYPES

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
"""The dtypes that can be measured, by their torch object."""

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


class TorchReader:
    """The engine's eyes on torch tensors. Called for every tensor of every call, so each attribute is read once."""

    def identity(self, tensor: torch.Tensor) -> Identity | None:
        if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED or tensor.is_inference():
            return None  # a subclass may hide what it does; inference tensors keep no version
        try:
            return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()
        except RuntimeError:  # nested, or inside a functorch transform: there is no one address or shape
            return None

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def read(self, tensor: torch.Tensor, identity: Identity | None) -> Reading:
        dtype = NAMES.get(tensor.dtype)
        if identity is not None and identity[1] and dtype is not None and tensor.is_cpu and _lies_as_it_is(tensor):
            _, address, shape, stride = identity
            return Reading(dtype, shape, stride, "cpu", Strided(address, dtype, shape, stride))
        return _read_carefully(tensor)


def _lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether the numbers are those in memory, with no sign that is only a flag yet."""
    return not (tensor.is_neg() or tensor.is_conj())


def _read_carefully(tensor: torch.Tensor) -> Reading:
    dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    device = str(tensor.device)
    reason = _unreadable(tensor)
    if reason is not None:
        return Reading(dtype, _shape(tensor), (), device, None, note=reason)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.data_ptr() == 0 and plain.numel():
        return Reading(dtype, _shape(tensor), (), device, None, note="it has no memory (freed, or never filled)")
    memory = Strided(plain.data_ptr(), dtype, tuple(plain.shape), plain.stride())
    return Reading(dtype, tuple(tensor.shape), tensor.stride(), device, memory, owner=plain)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a nested tensor has several
        return ()


def _unreadable(tensor: torch.Tensor) -> str | None:
    """Why a tensor's numbers cannot be read, if they cannot."""
    if tensor.is_nested:
        return "nested tensors have no single memory to read"
    if tensor.layout is not torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type == "meta":
        return "a meta tensor has no numbers"
    if isinstance(tensor, FakeTensor):
        return "a fake tensor has no numbers"
    if tensor._is_zerotensor():
        return "it stands for zeros and has no memory"
    if tensor.dtype not in NAMES:
        return f"the dtype {str(tensor.dtype).removeprefix('torch.')} is not known"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__} wraps other tensors"
    if is_functorch_wrapped_tensor(tensor):
        return "it is inside a functorch transform"
    return None
