"""One of several processes that share out tensors: sharing.py RANK SIZE FOLDER. Every one checks what it computes."""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import astray
from astray.state import StateDict
from astray.state.reductions import REDUCTIONS


def main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        check_reductions(rank)
        check_trained_model()
    finally:
        dist.destroy_process_group()


def check_reductions(rank: int) -> None:
    mesh, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(0)
    whole = StateDict(
        {
            "cut twice": torch.randn(7, 5, generator=generator),
            "cut and replicated": torch.randn(6, 4, generator=generator),
            "replicated": torch.randn(3, generator=generator).bfloat16(),
            "fewer rows than ranks": torch.randn(2, 3, generator=generator),
            "summed": torch.randn(5, generator=generator, dtype=torch.float64),
            "plain": torch.randn(4, generator=generator),
        }
    )
    shared = StateDict(
        {
            "cut twice": distribute_tensor(whole["cut twice"], mesh, [Shard(0), Shard(1)]),
            "cut and replicated": distribute_tensor(whole["cut and replicated"], mesh, [Replicate(), Shard(0)]),
            "replicated": distribute_tensor(whole["replicated"], mesh, [Replicate(), Replicate()]),
            "fewer rows than ranks": distribute_tensor(whole["fewer rows than ranks"], line, [Shard(0)]),
            "summed": DTensor.from_local(whole["summed"] * (rank + 1) / 10, line, [Partial()]),
            "plain": whole["plain"],
        }
    )
    assert repr(shared).startswith("StateDict[L2=unread, Numel=")  # repr does not communicate
    for name in (*REDUCTIONS, "numel"):
        for lw in (True, False):
            same(getattr(shared, name)(lw=lw), getattr(whole, name)(lw=lw), name)
    same(shared.norm(3, lw=True), whole.norm(3, lw=True), "norm3")
    same((2 * shared).norm(3), 2 * whole.norm(3), "norm3")
    same(astray.state.trust_ratio(shared, whole), whole.ones().norm2(lw=True) / whole.ones().norm2(lw=True), "ratio")


def check_trained_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    copy = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    copy.load_state_dict(model.state_dict())
    for module in (*model, model):
        fully_shard(module)
    batch = torch.randn(4, 6)
    for each in (model, copy):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        before = astray.state.from_weight(each, clone=True)
        each(batch).square().mean().backward()
        optimizer.step()
        update = astray.state.from_weight(each) - before
        _, grad, (average,) = astray.state.from_together(each, optimizer, ["exp_avg"])
        if each is model:
            found = [update.norm2(lw=True), grad.norm2(), average.abs_max()]
    expected = [update.norm2(lw=True), grad.norm2(), average.abs_max()]
    for one, other in zip(found, expected, strict=True):
        same(one, other, "training", 1e-5)


def same(found: float | StateDict, expected: float | StateDict, what: str, tolerance: float = 1e-12) -> None:
    if isinstance(found, StateDict) and isinstance(expected, StateDict):
        assert list(found) == list(expected)
        for name in found:
            same(found[name], expected[name], f"{what} of {name}", tolerance)
        return
    one, other = float(found), float(expected)
    both_nan = math.isnan(one) and math.isnan(other)
    assert both_nan or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance), (what, one, other)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
