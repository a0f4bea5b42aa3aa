"""Runs torch operations of our own inside the user's program, hidden from a recording and from autograd.

Modes and autograd do not see them, and the tensors made are ordinary ones even under inference mode, where they could
not be written to later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DisableTorchFunction


@contextmanager
def unobserved() -> Iterator[None]:
    with (
        DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield
