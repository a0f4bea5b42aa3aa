"""Values as tensors of torch: the only module of this package that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from astray.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Tensor", "to_torch"]


def to_torch(values: npt.NDArray[Any], dtype: str) -> Tensor:
    """The values as a tensor that shares their memory; `dtype` is the true one, where numpy has no such type."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "Tensors need torch, which is not installed. Without it, read() gives numpy arrays."
        ) from None

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no {dtype}. read() gives it as a numpy array.")
    if not values.size:
        return torch.empty(values.shape, dtype=kind)
    flat: Any = values.reshape(-1)
    return torch.frombuffer(flat.view("u1"), dtype=kind).reshape(values.shape)
