"""Trains and records until it is killed: `endless.py FOLDER`. Says after which steps everything is on disk."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import astray

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with astray.record(sys.argv[1], model, keep="tensors") as recorder:
    for step in range(1_000_000):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step()
        if step % 3 == 0:
            recorder.flush()
            print(dist.get_rank(), os.getpid(), step, flush=True)
