"""Reads a Paddle tensor for the engine: the name of its dtype, its memory, and a key that changes when its numbers do.

Tensors in memory of this process are read where they lie. Those on a device are copied here first, which waits for the
device. A tensor without plain memory (sparse, not initialised) gets a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle.base.framework import EagerParamBase

from astray.capture.adapters import NativeObserver, SlowPath, TensorIdentity, TensorReading
from astray.capture.paddle.native.core import _paddle
from astray.interrupts import pass_interrupt
from astray.stats import Strided, kernels
from astray.stats.dtypes import DTYPES
from astray.store import DeferredBytes

DTYPE = type(paddle.float32)

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(paddle, name, None), DTYPE)}
"""The dtypes that can be measured, by their Paddle object."""

PLAIN = frozenset({paddle.Tensor, EagerParamBase})

_ON_DEVICE = "it is on a device, which is read by copying: that failed"


def is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor)


def parts_of(path: str, tensor: paddle.Tensor) -> list[tuple[str, paddle.Tensor]]:
    """A tensor under its path; of one that holds only some of its rows, such as an embedding's gradient, both parts."""
    if not tensor.is_selected_rows():
        return [(path, tensor)]
    numbers = paddle.to_tensor(tensor.rows(), dtype="int64", place=paddle.CPUPlace())
    return [(f"{path}.rows", numbers), (f"{path}.values", tensor._get_tensor_from_selected_rows())]


class _Allocation:
    """Stands for an allocation of Paddle, which has no object in Python."""

    __slots__ = ("__weakref__",)


_paddle.set_handle_type(_Allocation)


class PaddleReader:
    """Reads Paddle tensors for the engine. Native code reads those in memory of this process; this reads the others."""

    def __init__(self) -> None:
        self._devices: dict[str, str] = {}

    def native_observer(self, slow_path: SlowPath) -> NativeObserver:
        _, row_buffer, batch = slow_path.writer.row_buffers or (None, None, 0)
        observer: NativeObserver = _paddle.TensorObserver(
            kernels.measuring if type(self) is PaddleReader else None,
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

    def identity(self, tensor: paddle.Tensor) -> TensorIdentity | None:
        dtype = NAMES.get(tensor.dtype)
        address = _paddle.address(tensor)
        if dtype is None or not address:
            return None
        shape, stride, version = tuple(tensor.shape), tuple(tensor.strides), tensor.inplace_version
        # Views of contiguous memory hold the same numbers in the same order, whatever their shape.
        key = (address, version, dtype, tensor.size if tensor.is_contiguous() else (shape, stride))
        return TensorIdentity(_paddle.owner(tensor), key, address, dtype, shape, stride, version)

    def owner(self, tensor: paddle.Tensor) -> Any:
        return _paddle.owner(tensor)

    def is_whole(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.size * tensor.element_size() >= _paddle.capacity(tensor))

    def requires_grad(self, tensor: paddle.Tensor) -> bool:
        return not tensor.stop_gradient

    def device(self, tensor: paddle.Tensor) -> str:
        place = str(tensor.place)
        name = self._devices.get(place)
        if name is None:
            name = self._devices[place] = place.removeprefix("Place(").removesuffix(")")
        return name

    @property
    def deferred(self) -> None:
        return None

    def start(self, forget: Callable[[], None], waited: Callable[[float], None], queue_bytes: int) -> None:
        """Nothing is deferred here."""

    def stop(self) -> None:
        """Nothing is held here."""

    def read(self, tensor: paddle.Tensor, identity: TensorIdentity | None, _statistics: bool) -> TensorReading:
        if identity is not None and identity.address:
            _, _, address, dtype, shape, stride, _ = identity
            return TensorReading(dtype, shape, stride, Strided(address, dtype, shape, stride))
        dtype = NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("paddle.")
        reason = _unreadable(tensor)
        if reason is not None:
            return TensorReading(dtype, tuple(tensor.shape), (), None, note=reason)
        shape = tuple(tensor.shape)
        if not tensor.size:
            return TensorReading(dtype, shape, tuple(tensor.strides), Strided(0, dtype, shape, tuple(tensor.strides)))
        try:
            here = _copied_here(tensor)
        except Exception as error:  # noqa: BLE001 - the row says why
            pass_interrupt(error)
            return TensorReading(dtype, shape, (), None, note=f"{_ON_DEVICE} ({type(error).__name__}: {error})")
        memory = Strided(_paddle.address(here), dtype, shape, tuple(here.strides))
        return TensorReading(dtype, shape, tuple(tensor.strides), memory, owner=here)

    def fetch(
        self, _tensor: paddle.Tensor, _memory: Strided, _positions: npt.NDArray[np.int64] | None
    ) -> DeferredBytes | str:
        return "no reading of Paddle has a ticket"


def _copied_here(tensor: paddle.Tensor) -> paddle.Tensor:
    """The numbers of a tensor in memory of this process, in the layout that they have."""
    with paddle.no_grad():
        if tensor.is_dist():
            tensor = tensor._local_value()
        return tensor if tensor.place.is_cpu_place() else tensor.detach().cpu()


def _unreadable(tensor: paddle.Tensor) -> str | None:
    """The reason why a tensor's numbers cannot be read; None when they can."""
    if not tensor._is_initialized():
        return "it has no memory (freed, or never filled)"
    if tensor.is_sparse():
        return "its layout is sparse"
    if tensor.is_selected_rows():
        return "it holds selected rows"
    if tensor.dtype not in NAMES:
        return f"the dtype {str(tensor.dtype).removeprefix('paddle.')} is not known"
    return None
