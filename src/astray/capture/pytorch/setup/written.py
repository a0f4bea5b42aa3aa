"""Which gradients somebody has written to between the backward pass and the optimizer, unlike the others.

Clipping and unscaling write to all of them alike. One that was written to more often than the others, or replaced, was
singled out by the program; Adam makes nearly the same update of it, so that the weights of a few steps hardly show it.
Version counters tell: no tensor is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

NAME = "written_gradients"


def singled_out(parameters: Sequence[torch.Tensor], writes: Callable[[torch.Tensor], int | None]) -> list[torch.Tensor]:
    """Those of some parameters whose gradients were written to more or less often than most of theirs were."""
    found = [(parameter, writes(parameter)) for parameter in parameters]
    counts = Counter(number for _, number in found if number is not None)
    if len(counts) < 2:
        return []
    usual = min(counts, key=lambda number: (-counts[number], number))
    return [parameter for parameter, number in found if number not in (None, usual)]
