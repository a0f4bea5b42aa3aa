"""Starts a backward pass in such a way that a function mode stays on while it runs.

`Tensor.backward` is a torch function itself, so while it runs the mode that was told of it is off, and with it what the
backward pass calls would go unseen. Started from the edges of the graph instead of its tensors, it asks no mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from astray.capture.pytorch.tensors import PLAIN

BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)

Roots = tuple[list[GradientEdge], list[torch.Tensor], bool | None, bool]


def backward_roots(
    tensors: Any,
    gradients: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *others: Any,
    gradient: Any = None,
    grad_tensors: Any = None,
    **more: Any,
) -> Roots | None:
    """What to give `torch.autograd.backward` in place of the arguments of one of `BACKWARDS`, to the same effect.

    None when there is anything about them that torch should say itself.
    """
    if any(other is not None for other in (*others, *more.values())):  # such as `inputs`
        return None
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = next((one for one in (gradients, gradient, grad_tensors) if one is not None), None)
    arriving = [None] * len(roots) if given is None else [given] if isinstance(given, torch.Tensor) else list(given)
    with torch._C.DisableTorchFunction():
        if len(arriving) != len(roots) or not all(map(_is_plain_root, roots, arriving)):
            return None
        edges = [get_gradient_edge(root) for root in roots]
        filled = [
            torch.ones_like(root, memory_format=torch.preserve_format) if one is None else one
            for root, one in zip(roots, arriving, strict=True)
        ]
    return edges, filled, retain_graph, create_graph


def _is_plain_root(root: Any, gradient: Any) -> bool:
    """Whether torch would take it as it is: a result, and one number where no gradient is given."""
    if type(root) not in PLAIN or root.grad_fn is None:
        return False
    if gradient is None:
        return bool(root.numel() == 1 and root.dtype.is_floating_point)
    return type(gradient) in PLAIN and gradient.shape == root.shape
