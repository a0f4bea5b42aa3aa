"""Two ranks under DDP, each of which saves what it computes: run by torchrun."""

from __future__ import annotations

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from astray.compat.saving_hook import register_saving_hook

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = register_saving_hook(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), path=sys.argv[1])
wrapped = DistributedDataParallel(model)
for step in range(2):
    wrapped(torch.full((2, 4), float(10 * step + distributed.get_rank()))).sum().backward()
distributed.barrier()
distributed.destroy_process_group()
