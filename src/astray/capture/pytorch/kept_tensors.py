"""Kept values of a run as tensors of torch.

Reads one rank, feeds `grafting` and `astray.replay`. What cannot be read is a `NotKeptError` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from astray.stats import dtypes
from astray.store import RankRun


class NotKeptError(Exception):
    """A tensor whose values a run does not have; its text says what it is, in words for every tensor of its kind."""


def kept_tensor(rank: RankRun, index: int, row: Mapping[str, Any]) -> torch.Tensor:
    """The values of a row of tensors, on this processor, laid out in the order of the recorded strides.

    Raises RunError where the file does not have what was recorded.
    """
    if row["placement"] is not None:
        raise NotKeptError("a part of a distributed tensor")
    if row["part"] is not None:
        raise NotKeptError("a slice alone was kept of a tensor: record with keep=tensors and without slice")
    if row["sampled"] is not None and row["sampled"] >= 0:
        raise NotKeptError("a sample alone was kept of a tensor: record with keep=tensors")
    values = rank.verified(index)
    if values is None:
        raise NotKeptError("the values of a tensor were not kept: record with keep=tensors")
    return as_torch(values, row["dtype"], row["stride"])


_VIEWED = {
    "bfloat16": torch.bfloat16,
    **{name: getattr(torch, name) for name in dtypes.DTYPES if name.startswith("float8") and hasattr(torch, name)},
}
"""Dtypes that numpy lacks; their values are stored as unsigned integers."""


def as_torch(values: npt.NDArray[Any], dtype: str, strides: tuple[int, ...] = ()) -> torch.Tensor:
    """Stored values as a tensor, whose dimensions lie in memory in the order of `strides`, without gaps.

    Dimensions of stride 0 are expanded ones again.
    """
    if dtype == "complex32" or dtype not in dtypes.DTYPES:
        raise NotKeptError(f"a tensor of {dtype}")
    plain = torch.from_numpy(np.array(values, order="C"))
    if dtype in _VIEWED:
        plain = (
            plain.view(torch.uint8).view(_VIEWED[dtype]) if plain.dtype == torch.uint8 else plain.view(_VIEWED[dtype])
        )
    if len(strides) != plain.dim() or not plain.numel() or min(strides, default=0) < 0:
        return plain
    order = sorted(range(plain.dim()), key=lambda dim: -strides[dim])
    if order != list(range(plain.dim())):
        plain = plain.permute(order).contiguous().permute([order.index(dim) for dim in range(plain.dim())])
    if not any(stride == 0 and size > 1 for stride, size in zip(strides, plain.shape, strict=True)):
        return plain
    shape = plain.shape
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim] > 1:
            plain = plain.narrow(dim, 0, 1)
    return plain.contiguous().expand(shape)
