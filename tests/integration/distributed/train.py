"""A training script that knows nothing of astray: `train.py (ddp | fsdp) FOLDER`, started by torchrun.

Writes into FOLDER what each rank computed, to the last bit.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def train(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3))
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    tensors = [*losses, *model.parameters(), *(parameter.grad for parameter in model.parameters())]
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    content = b"".join(tensor.detach().numpy().tobytes() for tensor in local)
    Path(folder, f"{kind}{dist.get_rank()}.bits").write_bytes(content)


dist.init_process_group("gloo")
train(*sys.argv[1:])
dist.destroy_process_group()  # when nothing holds it any more: its threads do not outlive the interpreter then
