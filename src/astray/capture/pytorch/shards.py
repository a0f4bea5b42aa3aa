"""Which part of a distributed tensor this process holds: the text of its `placement`, and its `ShardPosition`."""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from astray.part import period_of
from astray.stats import ShardPosition, Strided

Runs = list[tuple[int, int]]
"""The indices that a shard holds along one dimension, in order: ranges of (first index, length)."""


class Location(NamedTuple):
    """Which part of a whole tensor this process holds.

    `runs` has the indices held along each dimension; None when they are not known.
    """

    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    runs: tuple[Runs, ...] | None

    def text(self) -> str:
        """The `placement` of a row: compact JSON, described in docs/reference/format.md."""
        fields: dict[str, Any] = {"mesh": self.mesh}
        if self.names is not None:
            fields["names"] = self.names
        fields |= {"coordinate": self.coordinate, "placements": self.placements, "shape": self.shape, "offset": None}
        if self.runs is not None:
            fields["offset"] = [_first(runs, size) for runs, size in zip(self.runs, self.shape, strict=True)]
            interleaved = {dim: runs for dim, runs in enumerate(self.runs) if len(runs) > 1}
            if interleaved:
                fields["runs"] = interleaved
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    def as_box(self, memory: Strided) -> tuple[Strided, ShardPosition] | None:
        """The local part as a box within the whole tensor; None when it is not one, or its position is not known.

        Ranges that repeat at equal distances are a box too, if their dimension is split into two: indices 0, 1, 4 and 5
        of 8 are columns 0 and 1 of a 2 × 4 matrix. So the returned memory may have more dimensions than the given one.
        """
        if self.runs is None:
            return None
        shape: list[int] = []
        stride: list[int] = []
        offset: list[int] = []
        whole: list[int] = []
        for runs, size, step in zip(self.runs, self.shape, memory.stride, strict=True):
            if len(runs) < 2:
                shape.append(sum(length for _, length in runs))
                stride.append(step)
                offset.append(_first(runs, size))
                whole.append(size)
                continue
            first, length = runs[0]
            period = period_of(runs, size)
            if period is None:
                return None
            shape += [len(runs), length]
            stride += [length * step, step]
            offset += [first // period, first % period]
            whole += [size // period, period]
        return memory._replace(shape=tuple(shape), stride=tuple(stride)), ShardPosition(tuple(offset), tuple(whole))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. There is none before its module has been imported, which astray never does itself."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether it is the result of a collective that may still be running."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def waited_for(tensor: Any) -> torch.Tensor:
    """The plain tensor behind a pending one, after waiting for its collective.

    The tensor is not marked as waited for, so that the program still runs every operation that it would have.
    """
    with torch.no_grad():
        tensor.wait()
    return tensor.elem  # type: ignore[no-any-return]


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether its class wraps other tensors, which have the numbers, and has no memory of its own."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    return is_traceable_wrapper_subclass(tensor) or (tensor.numel() > 0 and tensor.data_ptr() == 0)


def signature(tensor: Any) -> Hashable:
    """What identifies a DTensor besides its local memory, which several DTensors may share."""
    return tensor.device_mesh, tuple(map(_name, tensor.placements)), tuple(tensor.shape)


def add_up(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The sum of two tensors, with every mode off; None when that would take communication."""
    if is_distributed(first) or is_distributed(second):
        return _add_up_parts(first, second)
    first, second = (waited_for(term) if is_pending(term) else term for term in (first, second))
    if wraps_others(first) or wraps_others(second):
        return first  # to add them is to run code of the program's, and the numbers of the sum cannot be read either
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return first + second


def _add_up_parts(first: Any, second: Any) -> torch.Tensor | None:
    if not (is_distributed(first) and is_distributed(second)) or signature(first) != signature(second):
        return None
    local = add_up(first._local_tensor, second._local_tensor)
    return None if local is None else type(first)(local, first._spec, requires_grad=False)


def locate(tensor: Any) -> Location:
    """The part of the whole that this process holds of a DTensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, local = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    runs = None
    if coordinate is not None:  # otherwise this process is not in the mesh, and holds nothing
        held = [_held(size, _splits(dim, tensor._spec, sizes), sizes, coordinate) for dim, size in enumerate(shape)]
        # A program may assemble tensors of any size; then only it knows which indices they are.
        if tuple(sum(length for _, length in held_runs) for held_runs in held) == local:
            runs = tuple(held)
    return Location(
        sizes,
        mesh.mesh_dim_names and tuple(mesh.mesh_dim_names),
        coordinate and tuple(coordinate),
        tuple(map(_name, placements)),
        shape,
        runs,
    )


class _Split(NamedTuple):
    """A mesh dimension splits the indices of a tensor dimension.

    With a `factor` above 1 it does so after others that come later: those split it into `factor` parts, this one splits
    each part.
    """

    mesh_dim: int
    factor: int


def _splits(dim: int, spec: Any, sizes: Sequence[int]) -> list[_Split]:
    """The splits of a tensor dimension, in the order they are made."""
    splits = [
        _Split(mesh_dim, getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(spec.placements)
        if _is_shard(placement) and placement.dim == dim
    ]
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            return [_Split(mesh_dim, 1) for mesh_dim in entry.mesh_dims]
    return _in_order(splits, sizes) or splits


def _in_order(splits: list[_Split], sizes: Sequence[int]) -> list[_Split] | None:
    """The same splits as plain ones, one after the other: a factor says how many parts there were before its turn.

    So FSDP splits what tensor parallelism has left, though its mesh dimension comes first. None when no order gives
    these factors, as after one of the mesh dimensions has gathered its parts again.
    """
    order: list[_Split] = []
    for split in reversed(splits):
        parts = 1
        for position in range(len(order) + 1):
            if parts == split.factor:
                order.insert(position, _Split(split.mesh_dim, 1))
                break
            if position < len(order):
                parts *= sizes[order[position].mesh_dim]
        else:
            return None
    return order


def _held(size: int, splits: list[_Split], sizes: Sequence[int], coordinate: Sequence[int]) -> Runs:
    """The indices of a dimension that are left after every split."""
    runs = [(0, size)] if size else []
    for mesh_dim, factor in splits:
        parts, number = sizes[mesh_dim], coordinate[mesh_dim]
        pieces = [_chunk(_chunk(runs, factor, piece), parts, number) for piece in range(factor)]
        runs = _joined([run for piece in pieces for run in piece])
    return runs


def _chunk(runs: Runs, parts: int, number: int) -> Runs:
    """Part `number` of `parts`, as `torch.chunk` makes them: equal ones, then a smaller one, then empty ones."""
    size = -(-sum(length for _, length in runs) // parts)
    start, stop = number * size, (number + 1) * size
    kept: Runs = []
    for first, length in runs:
        low, high = max(start, 0), min(stop, length)
        if low < high:
            kept.append((first + low, high - low))
        start, stop = start - length, stop - length
    return kept


def _joined(runs: Runs) -> Runs:
    """The same indices, with adjacent ranges joined."""
    joined: Runs = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return joined


def _first(runs: Runs, size: int) -> int:
    return runs[0][0] if runs else size


def _is_shard(placement: Any) -> bool:
    return placement.is_shard() or hasattr(placement, "split_factor")


def _name(placement: Any) -> str:
    """A placement as programs write it: torch's own `repr` has changed between versions."""
    kind = type(placement).__name__
    if hasattr(placement, "split_factor"):
        return f"{kind}({placement.dim}, {placement.split_factor})"
    if placement.is_shard():
        return f"{kind}({placement.dim})"
    if placement.is_partial():
        return f"{kind}({placement.reduce_op})"
    return f"{kind}()"
