"""Small programs in which NaN or infinity comes up, each with a comment at the line that is to blame.

`lin` is a Linear of 4 by 4, `x` a batch of 4; what a program gives back is summed up to the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

Program = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """A model that does what a function says."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.lin, x)


def fully_masked_row(lin: nn.Module, x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    scores = lin(x).masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1)  # origin


def causal_mask(lin: nn.Module, x: Tensor) -> Tensor:
    scores = lin(x).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    return torch.softmax(scores, -1)


def added_mask(lin: nn.Module, x: Tensor) -> Tensor:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    return torch.softmax(lin(x) + mask, -1)


def logarithm_of_a_mask(lin: nn.Module, x: Tensor) -> Tensor:
    return torch.softmax(lin(x) + torch.ones(4, 4).tril().log(), -1)


def where_and_sqrt(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0
    root = torch.sqrt(h)  # origin
    return torch.where(h > 0, root, torch.zeros_like(h))


def half_scores(lin: nn.Module, x: Tensor) -> Tensor:
    q, k = (lin(x) * 300).half(), (lin(x) * 300).half()
    scores = q @ k.T  # origin
    return torch.softmax(scores, -1).float()


def half_underflow(lin: nn.Module, x: Tensor) -> Tensor:
    h = (lin(x) * 1e-5).half()
    square = h * h
    return (1 / square).float()  # origin


def norm_by_hand(lin: nn.Module, x: Tensor) -> Tensor:
    squares = (lin(x) * 0).square().sum(-1)
    return squares.sqrt()  # origin


def std_by_hand(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0 + 1
    variance = (h - h.mean(-1, keepdim=True)).square().mean(-1)
    return variance.sqrt()  # origin


def length_of_nothing(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0
    return torch.hypot(h, h)  # origin


def angle_by_hand(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0
    ratio = h / h  # origin
    return torch.atan(ratio)


def torchs_own_norm(lin: nn.Module, x: Tensor) -> Tensor:
    return (lin(x) * 0).norm(dim=-1)


def torchs_own_std(lin: nn.Module, x: Tensor) -> Tensor:
    return (lin(x) * 0 + 1).std(-1)


def torchs_own_atan2(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0
    return torch.atan2(h, h)


def cross_entropy_by_hand(lin: nn.Module, x: Tensor) -> Tensor:
    p = torch.sigmoid(lin(x) * 1e4)
    y = torch.zeros_like(p)
    log_p = torch.log(p)  # origin
    return -(y * log_p + (1 - y) * torch.log(1 - p * 0.5))


def naive_softplus(lin: nn.Module, x: Tensor) -> Tensor:
    powers = torch.exp(lin(x) * 1000)  # origin
    return torch.log(1 + powers)


def unfilled_memory(lin: nn.Module, x: Tensor) -> Tensor:
    memory = torch.empty(4, 4)
    memory.numpy().fill(float("nan"))
    return lin(x) * memory  # origin


def used_twice(lin: nn.Module, x: Tensor) -> Tensor:
    h = lin(x) * 0
    root = (h * 1).sqrt()  # origin
    return root + h + h.tanh()


def origin_line(program: Program) -> int:
    """The line of a program with the comment."""
    lines, start = inspect.getsourcelines(program)
    return start + next(at for at, line in enumerate(lines) if line.rstrip().endswith("# origin"))


ACCIDENTS = {
    fully_masked_row: ("softmax", "forward", "fully masked"),
    where_and_sqrt: ("sqrt", "backward", "sqrt at zero"),
    half_scores: ("matmul", "forward", "overflow"),
    half_underflow: ("rdiv", "forward", "underflow then reciprocal"),
    norm_by_hand: ("sqrt", "backward", "sqrt at zero"),
    std_by_hand: ("sqrt", "backward", "sqrt at zero"),
    length_of_nothing: ("hypot", "backward", "norm at zero"),
    angle_by_hand: ("div", "forward", "division by zero"),
    cross_entropy_by_hand: ("log", "forward", "log of zero"),
    naive_softplus: ("exp", "forward", "overflow"),
    used_twice: ("sqrt", "backward", "sqrt at zero"),
}

PEACEFUL = (
    causal_mask,
    added_mask,
    logarithm_of_a_mask,
    torchs_own_norm,
    torchs_own_std,
    torchs_own_atan2,
)
