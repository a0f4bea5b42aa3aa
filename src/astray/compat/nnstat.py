"""For programs written for NNstat: `from astray.compat import nnstat`, and leave the rest as it is.

    weight = nnstat.from_weight(model, clone=True)
    nnstat.trust_ratio(update, weight, pattern=".*mlp.*").describe(lw=True)

Everything is `astray.state`; `astray help state` explains where results differ.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from torch import nn

from astray import state as core
from astray.state import (
    StateDict,
    from_grad,
    from_optimizer_state,
    from_state_dict,
    from_together,
    from_weight,
    load_state,
    trust_ratio,
)
from astray.state.naming import Pattern
from astray.state.sources import ActivationGradients, Activations

__all__ = [
    "StateDict",
    "core",
    "from_activation",
    "from_activation_grad",
    "from_grad",
    "from_optimizer_state",
    "from_state_dict",
    "from_together",
    "from_weight",
    "functional",
    "load",
    "ones_like",
    "trust_ratio",
    "zeros_like",
]

functional = SimpleNamespace(trust_ratio=trust_ratio)
zeros_like = torch.zeros_like
ones_like = torch.ones_like


ROOT = ""
"""NNstat's name of the model itself, which is torch's; in `astray.state` it is `<root>`."""


def from_activation(
    model: nn.Module, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> Activations:
    """The outputs of a model's modules, filled by each forward pass; the model's own output has the key `''`."""
    return Activations(model, pattern, clone, name, ROOT)


def from_activation_grad(
    model: nn.Module, pattern: Pattern | None = None, *, clone: bool = False, name: str | None = None
) -> ActivationGradients:
    """The gradients of these outputs, filled by each backward pass."""
    return ActivationGradients(model, pattern, clone, name, ROOT)


def load(path: str | os.PathLike[str], name: str | None = None) -> StateDict:
    """Load what `StateDict.save` wrote, all of it into memory."""
    return load_state(path, name).clone()
