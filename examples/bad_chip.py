"""Stands in for a chip with a bad kernel: `cumsum` of float32 forgets what it has added up after every fourth element.

In any other dtype the kernel is right. It is a kernel that is replaced here, below all that a program or a tool sees of
torch: as on a real chip, the call is the same, and its result is not.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TILE = 4


class BadChip(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten.cumsum.default and result.dtype == torch.float32:
            for start in range(TILE, result.shape[-1], TILE):
                result[..., start:] -= args[0][..., start - 1 : start]
        return result


def use():
    """Computes on this chip from now on."""
    BadChip().__enter__()
