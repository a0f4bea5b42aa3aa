"""Reads a torch tensor for the engine: the name of its dtype, its memory, and a key that changes when its numbers do.

Tensors on devices are measured there. Of a distributed tensor the local part is read. A tensor without plain memory
(sparse, quantized, nested, meta, a subclass that wraps other tensors) gets a row that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from astray.capture.adapters import NativeObserver, SlowPath, TensorIdentity, TensorReading
from astray.capture.pytorch.native.core import _torch
from astray.capture.pytorch.shards import (
    Location,
    is_distributed,
    is_pending,
    locate,
    signature,
    waited_for,
    wraps_others,
)
from astray.device.devices import DeviceMeasurer
from astray.device.launcher import unobserved
from astray.interrupts import pass_interrupt
from astray.stats import Strided, kernels
from astray.stats.dtypes import DTYPES
from astray.store import DeferredBytes, DeferredMeasurements

logger = logging.getLogger("astray")

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
"""The dtypes that can be measured, by their torch object."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Plain tensor classes: a subclass may change what operations do."""

_STRIDED = torch.strided


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class TorchReader:
    """Reads torch tensors for the engine. Called for every tensor of every call, so each attribute is read once."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, str] = {}
        self._device_measurer = DeviceMeasurer()

    def native_observer(self, slow_path: SlowPath) -> NativeObserver:
        with unobserved():
            examples = [
                (torch.empty(0, dtype=dtype, device="cpu"), name)
                for dtype, name in NAMES.items()
                if dtype is not torch.complex32  # torch warns about making one
            ]
        _, row_buffer, batch = slow_path.writer.row_buffers or (None, None, 0)
        observer: NativeObserver = _torch.TensorObserver(
            examples,
            torch.nn.Parameter,
            self._devices,
            self._device_measurer.cuda_measurers,
            getattr(torch._C, "_cuda_getCurrentRawStream", None),
            self._device_measurer.measure_together,
            kernels.measuring if type(self) is TorchReader else None,
            TensorIdentity,
            slow_path.unfilled.by_owner,
            slow_path.writer,
            row_buffer,
            batch,
            slow_path.observe,
            slow_path.observe_unread,
            slow_path.written,
            slow_path.changed,
            slow_path.measure,
        )
        return observer

    def identity(self, tensor: torch.Tensor) -> TensorIdentity | None:
        if type(tensor) not in PLAIN:  # a subclass may hide what it does
            return self._identity_of_shard(tensor) if is_distributed(tensor) else None
        if tensor.layout is not _STRIDED or tensor.is_inference():  # inference tensors keep no version
            return None
        dtype = NAMES.get(tensor.dtype)
        if dtype is None or tensor.is_neg() or tensor.is_conj():  # a sign that is only a flag yet
            return None
        try:
            address, version = tensor.data_ptr(), tensor._version
            shape, stride, owner = tuple(tensor.shape), tensor.stride(), tensor.untyped_storage()
        except RuntimeError as error:  # nested, or inside a functorch transform: there is no one address or shape
            pass_interrupt(error)
            return None
        if not address and tensor.numel():  # it has no memory
            return None
        # Views of contiguous memory hold the same numbers in the same order, whatever their shape.
        key = (address, version, dtype, tensor.numel() if tensor.is_contiguous() else (shape, stride))
        return TensorIdentity(owner, key, address, dtype, shape, stride, version)

    def _identity_of_shard(self, tensor: Any) -> TensorIdentity | None:
        """The identity of the local part, with address 0: reading it needs its position in the whole."""
        local = self.identity(tensor._local_tensor)
        if local is None:
            return None
        # Writes to the whole tensor increase its own version and not that of the part.
        version = local.version + (tensor._version << 32)
        return local._replace(key=(local.key, tensor._version, signature(tensor)), address=0, version=version)

    def owner(self, tensor: Any) -> Any:
        if is_distributed(tensor):
            tensor = tensor._local_tensor
        try:
            return tensor.untyped_storage()
        except RuntimeError as error:  # it has none, or several
            pass_interrupt(error)
            return None

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def device(self, tensor: torch.Tensor) -> str:
        device = tensor.device
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = str(device)
        return name

    @property
    def deferred(self) -> DeferredMeasurements:
        return self._device_measurer.tickets

    def start(self, forget: Callable[[], None], waited: Callable[[float], None], queue_bytes: int) -> None:
        self._device_measurer.start(forget, waited, queue_bytes)

    def stop(self) -> None:
        self._device_measurer.stop()

    def read(self, tensor: torch.Tensor, identity: TensorIdentity | None, statistics: bool) -> TensorReading:
        if identity is not None and identity.address:
            _, _, address, dtype, shape, stride, _ = identity
            memory = Strided(address, dtype, shape, stride)
            if tensor.is_cpu:
                return TensorReading(dtype, shape, stride, memory)
            return self._measured(TensorReading(dtype, shape, stride, memory), tensor, statistics)
        # Copying is an operation: no mode, ours or another, should take it for one of the program's.
        with torch._C._DisableTorchDispatch():
            return self._read_unusual(tensor, statistics)

    def _read_unusual(self, tensor: torch.Tensor, statistics: bool) -> TensorReading:
        plain = _plain(tensor)
        dtype = NAMES.get(plain.dtype) or str(plain.dtype).removeprefix("torch.")
        reason = _unreadable(plain)
        if reason is not None:
            reading = TensorReading(dtype, _shape(plain), (), None, note=reason)
            return reading._replace(placement=locate(tensor).text()) if is_distributed(tensor) else reading
        shape, stride = tuple(plain.shape), plain.stride()
        plain = plain.detach().resolve_conj().resolve_neg()
        memory = Strided(plain.data_ptr(), dtype, shape, plain.stride())
        if memory.address == 0 and plain.numel():
            return TensorReading(dtype, shape, (), None, note="it has no memory (freed, or never filled)")
        reading = TensorReading(dtype, shape, stride, memory, owner=plain)
        if is_distributed(tensor):
            reading = _located(reading, memory, locate(tensor))
        return reading if plain.is_cpu or not plain.numel() else self._measured(reading, plain, statistics)

    def _measured(self, reading: TensorReading, tensor: torch.Tensor, statistics: bool) -> TensorReading:
        """Has a tensor measured on its device: the reading has a ticket instead of the memory."""
        memory = reading.memory if reading.box is None else reading.box
        assert memory is not None
        ticket = self._device_measurer.measure(tensor, memory, reading.shard, statistics)
        if isinstance(ticket, str):
            return reading._replace(memory=None, box=None, note=ticket)
        return reading._replace(memory=None, box=None, ticket=ticket)

    def fetch(
        self, tensor: torch.Tensor, memory: Strided, positions: npt.NDArray[np.int64] | None
    ) -> DeferredBytes | str:
        plain = _plain(tensor)
        if memory.shape != plain.shape:  # a part of it
            first = plain.storage_offset() + memory.address // plain.element_size()
            plain = plain.as_strided(memory.shape, memory.stride, first)
        return self._device_measurer.fetch(plain, positions)


def _plain(tensor: Any) -> torch.Tensor:
    """The tensor that holds the numbers: the local part of a distributed one, the awaited result of a pending one."""
    if is_distributed(tensor):
        tensor = tensor._local_tensor
    return waited_for(tensor) if is_pending(tensor) else tensor


def _located(reading: TensorReading, memory: Strided, location: Location) -> TensorReading:
    """The reading of a DTensor's local part, with its position in the whole."""
    placed = location.as_box(memory)
    if placed is None:
        note = "its place in the whole tensor is unknown, so the fingerprint is of itself alone"
        return reading._replace(placement=location.text(), note=note)
    box, shard = placed
    return reading._replace(placement=location.text(), box=box, shard=shard)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError as error:  # a nested tensor has several
        pass_interrupt(error)
        return ()


def _unreadable(tensor: torch.Tensor) -> str | None:
    """The reason why a tensor's numbers cannot be read; None when they can."""
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
    if wraps_others(tensor):
        return f"a {type(tensor).__name__} wraps other tensors"
    if is_functorch_wrapped_tensor(tensor):
        return "it is inside a functorch transform"
    return None
