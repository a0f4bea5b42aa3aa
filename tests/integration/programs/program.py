"""What a program is to these tests: a generator that first yields its models and then the result of each step.

It is an ordinary training program, and knows nothing of astray: its caller may record between the yields, or
not. Everything comes from fixed seeds, so two runs of a program agree to the last bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

STEPS = 5

Steps = Iterator[Any]


class Setup:
    """What a program yields first: the model or the models by name, and the optimizers whose state counts."""

    def __init__(self, models: nn.Module | dict[str, nn.Module], *optimizers: torch.optim.Optimizer) -> None:
        self.models = models
        self.optimizers = optimizers

    @property
    def by_name(self) -> dict[str, nn.Module]:
        return self.models if isinstance(self.models, dict) else {"": self.models}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and what the tests have to know of it."""

    name: str
    build: Callable[[], Steps]
    slow: bool = False  # seconds rather than a fraction of one
    racy: bool = False  # which call comes first is left to the threads; the numbers are the same all the same
    warns: tuple[str, ...] = ()  # warnings of its own libraries, as regular expressions

    def start(self) -> tuple[Setup, Steps]:
        """Builds everything from the same seeds; the steps are still to be run."""
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        steps = self.build()
        return next(steps), steps


PROGRAMS: dict[str, Program] = {}


def program(
    build: Callable[[], Steps] | None = None, *, name: str = "", **facts: Any
) -> Callable[[Callable[[], Steps]], Callable[[], Steps]] | Callable[[], Steps]:
    """Adds a program to PROGRAMS, under the name of its function."""

    def add(build: Callable[[], Steps]) -> Callable[[], Steps]:
        called = name or build.__name__
        assert called not in PROGRAMS, called
        PROGRAMS[called] = Program(called, build, **facts)
        return build

    return add(build) if build is not None else add


def bits(prefix: str, value: Any) -> dict[str, Any]:
    """A nested value as its tensors' bits by path, with everything else as it is."""
    if isinstance(value, torch.Tensor):
        return {prefix: _bits(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        return {path: part for key in value for path, part in bits(f"{prefix}.{key}", value[key]).items()}
    if isinstance(value, list | tuple):
        return {path: part for i, item in enumerate(value) for path, part in bits(f"{prefix}.{i}", item).items()}
    return {prefix: repr(value)}


def _bits(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), tuple(tensor.shape), _bits(tensor._indices()), _bits(tensor._values())
    plain = tensor.detach().resolve_conj().resolve_neg()
    content = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), plain.stride(), content


def state_after(setup: Setup, results: list[Any]) -> dict[str, Any]:
    """Everything that recording must not have changed, once the program has ended."""
    found = bits("result", results)
    for label, model in setup.by_name.items():
        # Shared tensors are asked for under every name that they have.
        parameters = dict(model.named_parameters(remove_duplicate=False))
        found |= bits(f"{label} weight", parameters)
        found |= bits(f"{label} gradient", {name: tensor.grad for name, tensor in parameters.items()})
        found |= bits(f"{label} buffer", dict(model.named_buffers(remove_duplicate=False)))
        found[f"{label} training"] = [module.training for module in model.modules()]
    for number, optimizer in enumerate(setup.optimizers):
        found |= bits(f"optimizer {number}", optimizer.state_dict())
    found |= bits("torch's randomness", torch.get_rng_state())
    found["Python's randomness"] = random.getstate()
    kind, words, *place = np.random.get_state(legacy=True)
    found["numpy's randomness"] = kind, words.tobytes(), place
    return found
