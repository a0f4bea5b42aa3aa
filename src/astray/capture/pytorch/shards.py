"""Where the local part of a distributed tensor sits in the whole: the text of its `placement`, and its `ShardPosition`.

`tensors` asks for it when it meets a DTensor. Everything is computed from what this process knows, and nothing is ever
communicated: a recording on one rank alone must not wait for ranks that do not record.
"""

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
"""The indices that a shard holds along one dimension, in order: stretches of (first index, how many)."""


class Location(NamedTuple):
    """Which part of a whole tensor this process holds.

    `runs` has the indices held along each dimension; None when they cannot be told.
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

    def place(self, memory: Strided) -> tuple[Strided, ShardPosition] | None:
        """The local part as a box within the whole tensor; None when it is not one, or its place is not known.

        Stretches that repeat at equal distances are a box too, once their dimension is seen as two: indices 0, 1, 4
        and 5 of 8 are columns 0 and 1 of a 2 × 4 matrix. So the memory may come back with more dimensions than it had.
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


def is_awaited(tensor: torch.Tensor) -> bool:
    """Whether it is the result of a collective that may still be under way."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


def arrived(tensor: Any) -> torch.Tensor:
    """The plain tensor behind an awaited one, when its numbers are there.

    The program will wait for it too, and finds it done; it is not marked as waited for, so that the program still runs
    every operation that it would have.
    """
    with torch.no_grad():
        tensor.wait()
    return tensor.elem  # type: ignore[no-any-return]


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether it is of a class that has its numbers elsewhere, and no memory of its own to compute with."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    return is_traceable_wrapper_subclass(tensor) or (tensor.numel() > 0 and tensor.data_ptr() == 0)


def signature(tensor: Any) -> Hashable:
    """What besides its memory makes a DTensor what it is: one local part may belong to several of them."""
    return tensor.device_mesh, tuple(map(_name, tensor.placements)), tuple(tensor.shape)


def add_up(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The sum of two tensors, out of sight of every mode; None when that would take communication."""
    if is_distributed(one) or is_distributed(other):
        return _add_up_parts(one, other)
    one, other = (arrived(term) if is_awaited(term) else term for term in (one, other))
    if wraps_others(one) or wraps_others(other):
        return one  # to add them is to run code of the program's, and the numbers of the sum cannot be read either
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return one + other


def _add_up_parts(one: Any, other: Any) -> torch.Tensor | None:
    if not (is_distributed(one) and is_distributed(other)) or signature(one) != signature(other):
        return None
    local = add_up(one._local_tensor, other._local_tensor)
    return None if local is None else type(one)(local, one._spec, requires_grad=False)


def locate(tensor: Any) -> Location:
    """Where the local part of a DTensor sits."""
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, local = tuple(tensor.shape), tuple(tensor._local_tensor.shape)
    sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    runs = None
    if coordinate is not None:  # otherwise this process is not in the mesh, and holds nothing
        found = [_held(size, _cuts(dim, tensor._spec, sizes), sizes, coordinate) for dim, size in enumerate(shape)]
        # A program may put tensors of any size together; then only it knows which indices they are.
        if tuple(sum(length for _, length in one) for one in found) == local:
            runs = tuple(found)
    return Location(
        sizes,
        mesh.mesh_dim_names and tuple(mesh.mesh_dim_names),
        coordinate and tuple(coordinate),
        tuple(map(_name, placements)),
        shape,
        runs,
    )


class _Cut(NamedTuple):
    """A mesh dimension shares out the indices of a tensor dimension.

    With a `factor` above 1 it does so after others that come later: those cut into `factor` parts, this one each part.
    """

    mesh_dim: int
    factor: int


def _cuts(dim: int, spec: Any, sizes: Sequence[int]) -> list[_Cut]:
    """The cuts through a tensor dimension, in the order they are made."""
    cuts = [
        _Cut(mesh_dim, getattr(placement, "split_factor", 1))
        for mesh_dim, placement in enumerate(spec.placements)
        if _is_shard(placement) and placement.dim == dim
    ]
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            return [_Cut(mesh_dim, 1) for mesh_dim in entry.mesh_dims]
    return _in_order(cuts, sizes) or cuts


def _in_order(cuts: list[_Cut], sizes: Sequence[int]) -> list[_Cut] | None:
    """The same cuts as plain ones, one after the other: a factor says how many parts there were before its turn.

    So FSDP cuts what tensor parallelism has left, though its mesh dimension comes first. None when no order gives these
    factors, as after one of the mesh dimensions has gathered its parts again.
    """
    order: list[_Cut] = []
    for cut in reversed(cuts):
        parts = 1
        for position in range(len(order) + 1):
            if parts == cut.factor:
                order.insert(position, _Cut(cut.mesh_dim, 1))
                break
            if position < len(order):
                parts *= sizes[order[position].mesh_dim]
        else:
            return None
    return order


def _held(size: int, cuts: list[_Cut], sizes: Sequence[int], coordinate: Sequence[int]) -> Runs:
    """The indices of a dimension that are left after every cut."""
    runs = [(0, size)] if size else []
    for mesh_dim, factor in cuts:
        parts, number = sizes[mesh_dim], coordinate[mesh_dim]
        pieces = [_chunk(_chunk(runs, factor, piece), parts, number) for piece in range(factor)]
        runs = _joined([run for piece in pieces for run in piece])
    return runs


def _chunk(runs: Runs, parts: int, number: int) -> Runs:
    """One of `parts` as `torch.chunk` cuts them: equal ones, then a smaller, then empty ones."""
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
    """The same indices, with stretches that follow each other made one."""
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
    """As torch writes it in programs: its own words for it have changed between versions."""
    kind = type(placement).__name__
    if hasattr(placement, "split_factor"):
        return f"{kind}({placement.dim}, {placement.split_factor})"
    if placement.is_shard():
        return f"{kind}({placement.dim})"
    if placement.is_partial():
        return f"{kind}({placement.reduce_op})"
    return f"{kind}()"
