"""`ranks.py PATH HOW`: two ranks train under a guard, and rank 1 makes NaN in step 3.

HOW is "alone": they have nothing to do with each other; "ddp": gradients are averaged; "backward": the same, with NaN
that is born in the backward pass and modules alone; "waiting": rank 0 waits for rank 1 in a collective when that one
trips; "warn": both go on.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import astray
from guarding.training import Net, batch, loss_of

path, how = sys.argv[1:]
LEVEL = ["module"] if how == "backward" else ["module", "function"]


class Rooted(Net):
    """Takes the root of zeros between its layers, which has no derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = torch.sqrt(h * 0) if self.forwards in self.bad else h
        self.forwards += 1
        result: torch.Tensor = self.second(h)
        return result


def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.01)


def train(model: nn.Module) -> None:
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        if how in ("alone", "warn") and (rank, step) == (1, 3):
            wait_for(f"{path}-rank0")
        optimizer.step()
        if how == "waiting":
            dist.all_reduce(torch.ones(1))
        elif how in ("alone", "warn") and (rank, step) == (0, 3):  # rank 1 trips behind this step, and before the next
            Path(f"{path}-rank0").touch()
            wait_for(f"{path}/step3-non-finite/rank1/end.json")
    print(f"rank {rank} over", flush=True)


dist.init_process_group("gloo", timeout=timedelta(seconds=30))
net: nn.Module = (Rooted if how == "backward" else Net)(bad=[3] if dist.get_rank() == 1 else [])
if how in ("ddp", "backward"):
    net = DistributedDataParallel(net)
seen = None if how == "backward" else "calls"  # by default the gradients that an optimizer is given
guard = astray.Guard(net, path=path, on="warn" if how == "warn" else "raise", level=LEVEL, optimizer=seen)
try:
    with guard:
        train(net)
except astray.Tripped as tripped:
    trip = tripped.trip
    print(f"rank {trip.rank} tripped in step {trip.step}: {trip.what}", flush=True)
except Exception as error:  # noqa: BLE001 - of gloo's, when the other rank has gone
    trip = guard.trips[-1]
    print(f"rank {trip.rank} ended by {type(error).__name__}: {trip.what} {trip.path}", flush=True)
else:
    print(f"rank {dist.get_rank()} {guard.summary}", flush=True)
if how in ("warn", "alone"):
    dist.barrier()
dist.destroy_process_group()
