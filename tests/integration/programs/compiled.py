"""torch.compile in the ways people use it: on a model, in place, around a function, and on one block of a model.

Each program also yields how many graphs were compiled and how often they broke: a recorder that makes torch compile
something else has changed the program, even where the numbers happen to agree.
"""

from __future__ import annotations

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from integration.programs.program import STEPS, Setup, Steps, program

BACKENDS = ("aot_eager", "inductor")
WARNINGS = (  # of torch, about what torch does
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.jit\.script_method` is deprecated",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block()
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))


def _trained(model: nn.Module, recorded: nn.Module, loss_of: object = None) -> Steps:
    torch._dynamo.reset()
    counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(recorded, optimizer)
    for _ in range(STEPS):
        x = torch.randn(3, 6)
        loss = loss_of(x) if callable(loss_of) else model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach(), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    assert counters["stats"]["unique_graphs"]


def compiled_model(backend: str) -> Steps:
    model = Small()
    compiled = torch.compile(model, backend=backend)
    yield from _trained(compiled, compiled)


def compiled_after_all(backend: str) -> Steps:
    """What is recorded is the model, what is called is the compiled one."""
    model = Small()
    yield from _trained(torch.compile(model, backend=backend), model)


def compiled_in_place(backend: str) -> Steps:
    model = Small()
    model.compile(backend=backend)
    yield from _trained(model, model)


def compiled_function(backend: str) -> Steps:
    model = Small()

    @torch.compile(backend=backend)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + 1

    yield from _trained(model, model, loss_of)


def compiled_block(backend: str) -> Steps:
    model = Small()
    model.block.compile(backend=backend)
    yield from _trained(model, model)


def compiled_block_as_a_wrapper(backend: str) -> Steps:
    model = Small()
    model.block = torch.compile(model.block, backend=backend)
    yield from _trained(model, model)


def _add(build: object, backend: str) -> None:
    assert callable(build)
    add = program(name=f"{build.__name__}_by_{backend}", slow=backend == "inductor", warns=WARNINGS)
    add(lambda: build(backend))


for _build in (
    compiled_model,
    compiled_after_all,
    compiled_in_place,
    compiled_function,
    compiled_block,
    compiled_block_as_a_wrapper,
):
    for _backend in BACKENDS:
        _add(_build, _backend)
