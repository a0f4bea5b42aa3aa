"""The training that the faults are planted in: five steps of AdamW with warm-up and clipping, the same bits each time.

A fault gets the `Training` before it runs, and changes its parts: attributes, `override` for one method of one module,
`at` for something that happens at one step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from faults.model import GPT, LENGTH, VOCABULARY
from faults.planting import Plantable

STEPS, BATCH, WARMUP = 5, 4, 3
EVALUATED = 4
"""The model is evaluated at the end of this step, after its update."""


@dataclass(frozen=True)
class Program:
    """What the reference and the candidate have in common."""

    dropout: float = 0.1
    checkpointing: bool = False
    accumulate: int = 1  # so many micro steps for each step
    ranks: int = 1  # so many processes, each with its own data, average their gradients


class Batch(NamedTuple):
    ids: Tensor
    targets: Tensor


class Training(Plantable):
    """A model, its optimizer and its data, and the loop over them."""

    def __init__(self, program: Program, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.model = GPT(dropout=program.dropout, checkpointing=program.checkpointing)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.groups(), **SETTINGS)
        self.data = [_batches(program, rank) for _ in range(STEPS)]
        self.held_out = _batch()
        self.unreduced: tuple[int, str] | None = None  # the step and parameter whose gradient no all-reduce averages
        self.warmed_at = WARMUP  # the step before which the learning rate grows
        self.largest_norm: float | None = 0.5  # of the gradients of all parameters; None leaves them as they are
        self.divisor = program.accumulate  # of the loss of each micro step
        self.kept_gradients: int | None = None  # the step after which gradients are not cleared
        self.eval_mode = True  # whether evaluation switches dropout off
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext  # around each forward pass
        self.threads = 1
        self.micro = 0

    def run(self, end_step: Callable[[], object]) -> None:
        """Train; `end_step` is called after each step."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.manual_seed(1)  # whatever building and planting have drawn
        try:
            for self.now in range(STEPS):
                self.step()
                end_step()
        finally:
            torch.set_num_threads(threads)

    def step(self) -> None:
        self._happens("begin")
        for micro, batch in enumerate(self.data[self.now]):
            self.micro = micro
            self.backward(batch)
        if self.program.ranks > 1:
            self.reduce()
        self._happens("gradients")
        if self.largest_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_norm)
        self._happens("update")
        self.update()
        if self.now != self.kept_gradients:
            self.optimizer.zero_grad()
        if self.now == EVALUATED:
            self.evaluate()

    def backward(self, batch: Batch) -> None:
        with self.context():
            loss = self.loss(self.model(batch.ids), batch.targets) / self.divisor
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if (self.now, name) != self.unreduced:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.program.ranks)

    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = SETTINGS["lr"] * min(1.0, (self.now + 1) / self.warmed_at)
        self.optimizer.step()

    def evaluate(self) -> None:
        self.model.train(not self.eval_mode)
        with torch.no_grad(), self.context():
            self.loss(self.model(self.held_out.ids), self.held_out.targets)
        self.model.train()

    def groups(self) -> list[dict[str, Any]]:
        """Matrices, which decay, and norms and biases, which do not."""
        parameters = list(self.model.parameters())
        return [
            {"params": [one for one in parameters if one.dim() > 1]},
            {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
        ]

    def optimize_with(self, kind: type[torch.optim.Optimizer], **changed: Any) -> None:
        """Take another optimizer, or the same with other settings."""
        self.optimizer = kind(self.groups(), **(SETTINGS | changed))


SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "foreach": False}


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def _batch() -> Batch:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return Batch(ids[:, :-1], ids[:, 1:])


def _batches(program: Program, rank: int) -> list[Batch]:
    """The micro steps of one step of one rank. All ranks draw those of all, and so go on drawing the same."""
    return [[_batch() for _ in range(program.accumulate)] for _ in range(program.ranks)][rank]
