"""Two processes save tensors that are sharded by rows and by columns, and one that both have."""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def save(rank: int, folder: str, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "bfloat": distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(0)]),
    }
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(save, (sys.argv[1], f"{folder}/store"), nprocs=2)
