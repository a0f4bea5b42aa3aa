"""Seeds torch's generators, and asks torch for the same bits each time. What `astray.seed_all` does of torch."""

from __future__ import annotations

import os
import warnings

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed(number: int) -> None:
    """The generators of the CPU and of every accelerator. Starts no device: one that is not in use is seeded later."""
    torch.manual_seed(number)


def make_deterministic() -> None:
    """Settings under which the same program on the same machine gives the same bits."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if WORKSPACE in os.environ:
        return
    os.environ[WORKSPACE] = ":4096:8"  # one of the two values that torch accepts: eight buffers of 4 MiB
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(
            f"{WORKSPACE} was not set when CUDA started, so cuBLAS may still sum in another order each time. Set it to "
            ":4096:8 before the program starts, or call seed_all before anything is put on the GPU.",
            stacklevel=3,
        )
