"""The training that the grid's faults are planted in: a few steps of one model, run in one variant.

Faults are planted into the float32 model on the CPU, before the variant casts and moves it: a weight that is off by
half a percent is off as a wrong checkpoint is, and rounded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.grid.models import Batch, Layout, Model, build
from faults.grid.variants import Variant
from faults.planting import Plantable, modules

STEPS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
}


class Training(Plantable):
    """A model, its optimizer and its data, and the loop over them."""

    def __init__(self, model: Model, variant: Variant, steps: int = STEPS, seed: int = 0) -> None:
        """seed: of the weights and the data."""
        super().__init__()
        self.declared, self.variant, self.steps = model, variant, steps
        self.model = build(model, variant.other_kernels and model.kernels == "attention", seed)
        torch.manual_seed(seed + 2)
        self.data = [model.batch() for _ in range(steps)]
        self.optimizer_class: str = model.optimizer
        self.settings = dict(SETTINGS[model.optimizer])
        self.not_optimized: set[str] = set()  # names of parameters
        self.largest_norm: float | None = 0.5  # of the gradients of all parameters; None leaves them as they are
        self.label_smoothing = 0.0
        self.loss_divisor = 1.0
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.cross_entropy
        self.schedule: Callable[[int], float] = lambda _: 1.0  # factor of the learning rate in each step

    @property
    def layout(self) -> Layout:
        return self.declared.layout

    def run(self, end_step: Callable[[], object]) -> None:
        """Train; `end_step` is called after each step."""
        torch.manual_seed(3)  # whatever building and planting have drawn
        with _flags(self.variant):
            for step, batch in enumerate(self.data):
                self.now = step
                self._happens("begin")
                self.step(batch)
                end_step()

    def prepare(self) -> None:
        """Cast and move what was planted, and make the optimizer."""
        variant = self.variant
        self.model.to(device=variant.device, dtype=getattr(torch, variant.dtype))
        self.data = [self._placed(batch) for batch in self.data]
        if variant.other_kernels and self.declared.kernels == "convolution":
            self.model.to(memory_format=torch.channels_last)
        if variant.split:
            _split_batches(self)
        optimized = [one for name, one in self.model.named_parameters() if name not in self.not_optimized]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer_class)(optimized, **self.settings)

    def step(self, batch: Batch) -> None:
        with self._precision():
            result = self.model(**batch.inputs)
            logits: Tensor = getattr(result, "logits", result)
        loss = self.loss(logits, batch.targets) / self.loss_divisor
        loss.backward()
        self._happens("gradients")
        if self.largest_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.largest_norm)
        self._happens("update")
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings["lr"] * self.schedule(self.now)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2).float()
        return F.cross_entropy(flat, targets.flatten(), label_smoothing=self.label_smoothing)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.variant.device, torch.bfloat16) if self.variant.autocast else nullcontext()

    def _placed(self, batch: Batch) -> Batch:
        last = self.variant.other_kernels and self.declared.kernels == "convolution"
        inputs = {}
        for name, given in batch.inputs.items():
            tensor = given.to(self.variant.device)
            if tensor.is_floating_point():
                tensor = tensor.to(getattr(torch, self.variant.dtype))
            inputs[name] = tensor.contiguous(memory_format=torch.channels_last) if last else tensor
        return Batch(inputs, batch.targets.to(self.variant.device))


@contextmanager
def _flags(variant: Variant) -> Iterator[None]:
    """The settings of torch as a whole that a variant asks for."""
    threads, matmul, cudnn = torch.get_num_threads(), torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    torch.set_num_threads(variant.threads)
    matmul.allow_tf32 = cudnn.allow_tf32 = variant.tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _split_batches(training: Training) -> None:
    """Let each linear layer and convolution compute the halves of its batch one after the other."""
    kinds: list[type[nn.Module]] = [nn.Linear, nn.Conv2d]
    if not training.declared.plain_torch:
        from transformers.pytorch_utils import Conv1D

        kinds.append(Conv1D)
    for site in modules(training, tuple(kinds)):
        training.override(site, "forward", lambda original, x: torch.cat([original(part) for part in x.chunk(2)]))
