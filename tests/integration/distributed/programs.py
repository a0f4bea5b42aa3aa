"""Programs that run on several processes: data parallel, fully sharded, tensor parallel, and plain collectives.

Each is a generator, as those in `integration.programs`: it yields its model and optimizer, then the result of each
step. Widths are odd where the way of distributing allows it, so that parts are uneven and some are empty.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from integration.programs.program import STEPS, Setup, Steps

# Newer versions of torch have other names for these, and warn of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PROGRAMS: dict[str, Callable[[], Steps]] = {}


def program(build: Callable[[], Steps]) -> Callable[[], Steps]:
    PROGRAMS[build.__name__] = build
    return build


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head of one output, whose bias has a single element for all ranks."""

    def __init__(self, width: int = 6, inner: int = 7) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Choosing(nn.Module):
    """Uses one of its two layers, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[self.calls % 2](x)


def training(
    model: nn.Module, *, micro_steps: int = 1, rank: int | None = None, shape: tuple[int, ...] = (4, 6), **how: Any
) -> Steps:
    """Trains on batches of this rank.

    `how` may have `synchronise`, called with whether a micro step is the last, and `foreach` for the optimizer.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=how.get("foreach"))
    yield Setup(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    synchronise = how.get("synchronise", lambda last: contextlib.nullcontext())
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for micro in range(micro_steps):
            with synchronise(micro == micro_steps - 1):
                loss = model(torch.randn(shape, generator=generator)).square().mean()
                loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        yield losses


@program
def plain() -> Steps:
    """The model by itself, on the batches of rank 0 in every process."""
    yield from training(Net(), rank=0)


# -- data parallel ---------------------------------------------------------------------------------------------------


@program
def ddp() -> Steps:
    yield from training(DistributedDataParallel(Net()))


@program
def ddp_accumulating() -> Steps:
    model = DistributedDataParallel(Net())
    together = contextlib.nullcontext
    yield from training(model, micro_steps=3, synchronise=lambda last: together() if last else model.no_sync())


@program
def ddp_unused() -> Steps:
    yield from training(DistributedDataParallel(Choosing(), find_unused_parameters=True))


@program
def ddp_static() -> Steps:
    yield from training(DistributedDataParallel(Net(), static_graph=True))


@program
def ddp_bucket_views() -> Steps:
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    yield Setup(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)  # the gradients stay where DDP sums them, and are overwritten there
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


# -- fully sharded ---------------------------------------------------------------------------------------------------


def sharded(model: nn.Module | None = None, outermost: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    model = Net() if model is None else model
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **(options | (outermost or {})))
    return model


@program
def fsdp() -> Steps:
    yield from training(sharded())


@program
def fsdp_keeping() -> Steps:
    """Parameters stay gathered between the forward and the backward pass."""
    yield from training(sharded(reshard_after_forward=False))


@program
def fsdp_bfloat16() -> Steps:
    inside = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    outside = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    yield from training(sharded(mp_policy=inside, outermost={"mp_policy": outside}))


@program
def fsdp_accumulating() -> Steps:
    model: Any = sharded()

    @contextlib.contextmanager
    def synchronise(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        yield

    yield from training(model, micro_steps=2, synchronise=synchronise)


@program
def fsdp_late() -> Steps:
    """The model is sharded only after recording may have started."""
    torch.manual_seed(0)
    model = Net()
    setup = Setup(model)
    yield setup
    steps = training(sharded(model))
    setup.optimizers = next(steps).optimizers
    yield from steps


@program
def fsdp_stepping_twice() -> Steps:
    """Two updates in one step of the recording: the same memory is filled with other weights."""
    inner = training(sharded())
    yield next(inner)
    for first, second in zip(inner, inner, strict=False):
        yield [first, second]


@program
def fsdp_refilling() -> Steps:
    """Several updates in one step of the recording, of a weight so large that it gets the same memory each time."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 3))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)  # which leaves no trace on a shard
    yield Setup(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 512, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
        yield loss.detach().clone()


# -- tensor parallel -------------------------------------------------------------------------------------------------


def parallel(plan: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(Net(6, 8), mesh, plan)


@program
def tensor_parallel() -> Steps:
    """Modules take and give plain tensors; what is distributed stays inside."""
    plan = {}
    for number in range(2):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    yield from training(parallel(plan), rank=0)


@program
def tensor_parallel_stepping_twice() -> Steps:
    """Two updates in one step of the recording, which leave no trace on the weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(nn.Linear(6, 8), mesh, ColwiseParallel())
    inner = training(model, rank=0, foreach=True)
    yield next(inner)
    for first, second in zip(inner, inner, strict=False):
        yield [first, second]


@program
def tensor_parallel_uneven() -> Steps:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(Net(6, 7), mesh, {"blocks.*.up": ColwiseParallel(use_local_output=False)})
    for block in model.blocks:
        parallelize_module(block.down, mesh, RowwiseParallel(input_layouts=Shard(-1)))
    yield from training(model, rank=0)


@program
def sequence_parallel() -> Steps:
    """Activations are DTensors between the modules, sharded along the sequence."""
    plan: dict[str, Any] = {}
    for number in range(2):
        plan |= {
            f"blocks.{number}": PrepareModuleInput(
                input_layouts=Replicate() if number == 0 else Shard(1),
                desired_input_layouts=Shard(1),
                use_local_output=False,
            ),
            f"blocks.{number}.norm": SequenceParallel(),
            f"blocks.{number}.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            f"blocks.{number}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    plan["blocks.1"] = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    yield from training(parallel(plan), rank=0, shape=(2, 4, 6))


@program
def embedding_parallel() -> Steps:
    """An embedding sharded by rows: each process has some of the words, and the results are still to be summed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4))
    parallelize_module(model[0], mesh, RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model[1], mesh, ColwiseParallel(output_layouts=Replicate()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Setup(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(9, (3, 5), generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach().clone()


@program
def sharded_and_parallel() -> Steps:
    """FSDP on top of tensor parallelism: one dimension is split twice. For four processes."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = Net(6, 9)
    plan: dict[str, Any] = {"blocks.*.up": ColwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        parallelize_module(block.down, mesh["tp"], RowwiseParallel(input_layouts=Shard(-1)))
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    yield from training(model, rank=mesh["dp"].get_local_rank())


# -- collectives by hand ---------------------------------------------------------------------------------------------


class Talking(nn.Module):
    """Every collective there is, in one forward pass; `async_op` for those that give something to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.talk(y.detach().clone())
        return y

    def talk(self, x: torch.Tensor) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        empty = functools.partial(torch.full, fill_value=float("nan"))
        dist.all_reduce(x.clone())
        dist.all_reduce(x.clone(), op=dist.ReduceOp.MAX)
        dist.broadcast(x.clone() if rank == 1 else empty(x.shape), src=1)
        dist.reduce(x.clone(), dst=0)
        dist.all_gather([empty(x.shape) for _ in range(world)], x)
        all_gather_single(empty((world * x.shape[0], x.shape[1])), x)
        reduce_scatter_single(empty((x.shape[0] // world, x.shape[1])), x)
        dist.reduce_scatter(empty((x.shape[0] // world, x.shape[1])), list(x.chunk(world)))
        dist.all_to_all_single(empty(x.shape), x)
        dist.gather(x, [empty(x.shape) for _ in range(world)] if rank == 0 else None, dst=0)
        dist.scatter(empty(x.shape), [x + i for i in range(world)] if rank == 0 else None, src=0)
        if rank == 0:
            dist.send(x, dst=1)
        else:
            dist.recv(empty(x.shape), src=0)
        self.talk_later(x)

    def talk_later(self, x: torch.Tensor) -> None:
        """The program goes on while they are under way, waits for each, and uses what it got at once."""
        summed = x.clone()
        work = dist.all_reduce(summed, async_op=True)
        torch.sin(x)
        work.wait()
        summed.add_(1000)
        gathered = torch.full((dist.get_world_size() * x.shape[0], x.shape[1]), float("nan"))
        work = all_gather_single(gathered, x, async_op=True)
        work.wait()
        torch.sin(gathered)
        peer = 1 - dist.get_rank()
        received = torch.full(x.shape, float("nan"))
        works = [dist.isend(x, dst=peer), dist.irecv(received, src=peer)]
        for work in works:
            work.wait()
        torch.sin(received)


@program
def collectives() -> Steps:
    yield from training(Talking(), shape=(2, 4))
