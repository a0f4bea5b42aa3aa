"""Distributed tensors: every process measures the part it holds, and the parts become the moments of the whole.

So a reduction of a state with DTensors is a collective: every process of their mesh must ask for it, as for an
all-reduce. One exchange carries the numbers of all tensors; along mesh dimensions that replicate, nothing is added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from astray.capture.pytorch.shards import is_distributed
from astray.errors import StateError
from astray.state.measurement import Measurement, unite
from astray.state.values import Value


def is_shared_out(value: Value) -> bool:
    """Whether it is a DTensor, which processes hold together."""
    return isinstance(value, torch.Tensor) and is_distributed(value)


def local_part(tensor: Any) -> torch.Tensor:
    """What this process holds of a DTensor. Sums that are still to be made are made first, by communicating."""
    with torch.no_grad():
        tensor = tensor.detach()
        if any(placement.is_partial() for placement in tensor.placements):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=whole)
        local: torch.Tensor = tensor.to_local()
        return local


class Shards:
    """The distributed tensors among those that are measured."""

    def __init__(self) -> None:
        self._expected: dict[Any, dict[str, tuple[bool, ...]]] = {}

    def expect(self, name: str, tensor: Any) -> None:
        """Note a DTensor, and along which dimensions of its mesh it is cut."""
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            raise StateError(f"This process holds no part of {name!r}: it is not in the mesh {mesh}.")
        cut = tuple(not (placement.is_replicate() or placement.is_partial()) for placement in tensor.placements)
        self._expected.setdefault(mesh, {})[name] = cut

    def gather(self, found: Mapping[str, Measurement]) -> dict[str, Measurement]:
        """What is known of the whole tensors, when every process of their meshes has measured its parts."""
        gathered: dict[str, Measurement] = {}
        for mesh, cuts in self._expected.items():
            rows = torch.tensor([found[name].numbers() for name in cuts], dtype=torch.float64, device=mesh.device_type)
            parts = {name: rows[number : number + 1] for number, name in enumerate(cuts)}
            for dim in range(mesh.ndim):
                concerned = [name for name, cut in cuts.items() if cut[dim]]
                if not concerned or mesh.size(dim) == 1:
                    continue
                sizes = [len(parts[name]) for name in concerned]
                everyone = _exchanged(torch.cat([parts[name] for name in concerned]), mesh.get_group(dim))
                shares = [torch.split(share, sizes) for share in everyone]
                for number, name in enumerate(concerned):
                    parts[name] = torch.cat([share[number] for share in shares])
            for name, part in parts.items():
                gathered[name] = unite([found[name].from_numbers(row) for row in part.tolist()])
        return gathered


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The rows of every process of a group."""
    everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, rows, group=group)
    return everyone
