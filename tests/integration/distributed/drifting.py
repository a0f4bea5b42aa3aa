"""Three data-parallel ranks, of which one writes into a weight at step 2: `drifting.py RUN`, started by torchrun."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import astray


def train(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    torch.manual_seed(dist.get_rank())
    with astray.record(path, model) as rec:
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    model[2].weight[0, 0] += 1e-3
            optimizer.zero_grad()
            parallel(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            rec.step()


dist.init_process_group("gloo")
train(*sys.argv[1:])
dist.destroy_process_group()
