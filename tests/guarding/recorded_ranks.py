"""`recorded_ranks.py PATH`: two ranks are recorded into one run under a guard, and rank 1 makes NaN in step 3."""

import sys

import torch
import torch.distributed as dist

import astray
from guarding.training import Net, batch, loss_of

dist.init_process_group("gloo")
rank = dist.get_rank()
model = Net(bad=[3] if rank == 1 else [])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rec = astray.record(sys.argv[1], model, guard="raise", level="function")
assert rec.guard is not None
try:
    with rec:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            rec.step()
except astray.Tripped as tripped:
    trip = tripped.trip
    print(f"rank {trip.rank} tripped in step {trip.step}: {trip.what} in {trip.path}", flush=True)
else:
    print(f"rank {rank} {rec.guard.summary}", flush=True)
dist.barrier()
dist.destroy_process_group()
