"""Two ranks add up float16 numbers: `summing.py RUN both` overflows in the sum, `one` on rank 1 before it."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import astray


class Summing(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.size
        dist.all_reduce(x)  # origin
        return x * 1


def run(path: str, which: str) -> None:
    sizes = {"both": (40_000.0, 40_000.0), "one": (1.0, 400_000.0)}[which]
    model = Summing(sizes[dist.get_rank()])
    with astray.record(path, model, level=["module", "function"]) as recorder:
        model(torch.ones(4).half())
        recorder.step()


dist.init_process_group("gloo")
run(*sys.argv[1:])
dist.destroy_process_group()
