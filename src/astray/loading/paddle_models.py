"""Layers of Paddle, and tensors of Paddle as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from astray.comparison.pair.framework_names import PADDLE
from astray.comparison.pair.own_tensors import OwnTensor
from astray.errors import StateError
from astray.loading.models import class_within

_WIDENED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that numpy does not have."""


class PaddleModel:
    """The parameters and persistable buffers of a layer."""

    framework = PADDLE

    def __init__(self, model: Any) -> None:
        layers = model.named_sublayers(include_self=True)
        self._types = {name: class_within(type(layer), "paddle.nn") for name, layer in layers}
        self._parameters = {name for name, _ in model.named_parameters()}
        self._state = {name: value for name, value in model.state_dict().items() if isinstance(value, paddle.Tensor)}

    def tensors(self) -> dict[str, OwnTensor]:
        return {name: self._tensor(name, tensor) for name, tensor in self._state.items()}

    def _tensor(self, name: str, tensor: Any) -> OwnTensor:
        module = name.rpartition(".")[0]
        role = "parameter" if name in self._parameters else "state"
        return OwnTensor(name, role, _dtype(tensor), tuple(tensor.shape), module, self._types.get(module, ""), 0, -1)

    def state(self) -> Mapping[str, Any]:
        return self._state

    def why_not(self, name: str) -> str:
        return _why_not(self._state[name])

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        tensor = self._state[name]
        with paddle.no_grad():
            given = paddle.to_tensor(np.array(values, order="C"), place=tensor.place)
            tensor.set_value(given.astype(tensor.dtype))


def array(tensor: Any) -> npt.NDArray[Any]:
    """The values of a tensor, widened where numpy lacks its dtype."""
    if why := _why_not(tensor):
        raise StateError(f"A tensor of {_dtype(tensor)} and shape {list(tensor.shape)} cannot be read: {why}.")
    here = tensor.detach()
    found: npt.NDArray[Any] = (here.astype("float32") if _dtype(here) in _WIDENED else here).numpy()
    return found


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")


def _why_not(tensor: Any) -> str:
    if not tensor._is_initialized():
        return "it has no memory"
    if tensor.is_sparse() or tensor.is_selected_rows():
        return "it is sparse"
    return "it is distributed over processes" if tensor.is_dist() else ""
