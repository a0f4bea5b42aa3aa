"""Programs that do something to the autograd graph: in place, views, their own functions, transforms, exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import ModelOutput

from integration.programs.program import STEPS, Setup, Steps, program


def _trained(model: nn.Module, width: int = 6) -> Steps:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randn(3, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class InPlace(nn.Module):
    """Writes into its activations, into slices of them, through `out=`, and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.scratch: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[:, 0] += 1.0
        y = self.second(self.act(y))
        y.mul_(2)[1:].sub_(y[:1].detach())
        with torch.no_grad():
            self.seen += y.sum(0)
            self.scratch = torch.add(x, 1, out=torch.empty_like(x))
        return y.masked_fill_(y > 3, 0.0) + self.scratch


@program
def in_place() -> Steps:
    yield from _trained(InPlace())


class Views(nn.Module):
    """Modules that return views: of their input, of one tensor several, and the input itself."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.chunk(2, dim=1)

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.t().unsqueeze(0).expand(2, -1, -1)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.halves, self.turned, self.nothing = self.Halves(), self.Turned(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.halves(self.linear(x))
        turned = self.turned(self.nothing(left))
        same = self.nothing(right)
        same = same * 1  # views that came out of one call together may not be written to
        same.add_(left)
        return turned.sum(0).t() * same


@program
def view_outputs() -> Steps:
    yield from _trained(Views())


class Raising(nn.Module):
    """An optional part fails now and then; the model does without it."""

    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if bool(x[0, 0] > 0):
                raise ValueError("too fragile")
            return y

    def __init__(self) -> None:
        super().__init__()
        self.fragile = self.Fragile()
        self.sound = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.fragile(x)
        except ValueError:
            x = x + 1
        if x.shape[0] == 1:
            raise RuntimeError("too small")
        return self.sound(x)


@program
def exceptions_in_forward() -> Steps:
    """One kind is caught in the model, the other by the training loop, which skips the batch."""
    model = Raising()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for step in range(STEPS):
        skipped = 0
        optimizer.zero_grad()
        for rows in (3, 1, 2):
            x = torch.randn(rows, 6)
            x[0, 0] = 1.0 if step % 2 else -1.0
            try:
                model(x).square().mean().backward()
            except RuntimeError:
                skipped += 1
        optimizer.step()
        yield skipped


class Straight(torch.autograd.Function):
    """Rounds, and lets the gradient through as if it had not; marks one output as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.scale = scale
        rounded = (x * scale).round()
        signs = rounded.sign().to(torch.int8)
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(x)
        return rounded / scale, signs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.scale), None


class Overwriting(torch.autograd.Function):
    """Changes its input in place, and marks it as dirty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, signs = Straight.apply(self.linear(x), 4.0)
        return Overwriting.apply(y * 2) + signs


@program
def functions_of_their_own() -> Steps:
    yield from _trained(nn.Sequential(Quantized(), nn.Linear(6, 2)))


@program(warns=("`torch.jit.script` is deprecated",))  # which torch itself uses for forward-mode derivatives
def transforms_of_functions() -> Steps:
    """torch.func: gradients of each sample by vmap over grad, a Jacobian, a forward-mode derivative."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Setup(model, optimizer)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    for _ in range(STEPS):
        x, tangent = torch.randn(5, 6), torch.randn(5, 6)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x)
        jacobian = torch.func.jacrev(model)(x[0])
        value, slope = torch.func.jvp(model, (x,), (tangent,))
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        optimizer.step()
        yield each, jacobian.detach(), value.detach(), slope.detach()


@program
def double_backward() -> Steps:
    """A penalty on the gradient of the loss, through create_graph; then the same graph walked twice."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        x = torch.randn(3, 6, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        yield loss.detach(), slope.detach(), x.grad


@program
def gradients_of_some() -> Steps:
    """autograd.grad for a part of the model, without touching `.grad`, and hooks that change gradients on the way."""
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[1].register_full_backward_hook(lambda module, sent, arrived: (sent[0] * 0.5,))
    model[2].register_forward_hook(lambda module, args, output: output + 1)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randn(3, 6)).square().mean()
        (some,) = torch.autograd.grad(loss, model[2].bias, retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach(), some


@program
def sparse_gradients() -> Steps:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 6, sparse=True)
            self.bag = nn.EmbeddingBag(20, 6, mode="sum", sparse=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding(ids).mean(1) + self.bag(ids)

    model = Words()
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(torch.randint(20, (3, 4))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


@dataclass
class Bag:
    logits: torch.Tensor
    parts: dict[str, Any]


@dataclass
class Answer(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Bag:
        y = self.linear(x)
        return Bag(y, {"halves": [y[:1], y[1:]], "count": 3, "none": None})


class FunctionCalls(nn.Module):
    def forward(self, bag: Bag, *, scale: float, rest: dict[str, Any]) -> Answer:
        logits = bag.logits * scale + torch.cat(rest["halves"])
        return Answer(loss=logits.square().mean(), logits=logits)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.give, self.take = Giving(), FunctionCalls()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        bag = self.give(x)
        return {"answer": self.take(bag, scale=2.0, rest=bag.parts), "x": x}


@program
def structured_outputs() -> Steps:
    """Dataclasses, dicts and model outputs, given and taken."""
    model = Structured()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        found = model(torch.randn(3, 6))
        optimizer.zero_grad()
        found["answer"].loss.backward()
        optimizer.step()
        yield found["answer"].loss.detach(), F.softmax(found["answer"].logits.detach(), 1)
