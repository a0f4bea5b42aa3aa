"""How a program is run, and the honest differences between two such ways: what must give no alarm by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

Half = Literal["seen", "unseen"]
Kernels = Literal["attention", "convolution"]
"""What a model has another implementation of: SDPA for eager attention, or channels_last for its convolutions."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the same program."""

    dtype: str = "float32"  # of the weights
    other_kernels: bool = False  # SDPA, or channels_last where a model has convolutions
    threads: int = 1
    split: bool = False  # each linear layer and convolution computes its batch in two halves
    autocast: bool = False  # to bfloat16
    device: str = "cpu"
    tf32: bool = False

    @property
    def name(self) -> str:
        """For folders."""
        parts = [self.dtype]
        parts += ["kernels"] if self.other_kernels else []
        parts += [f"threads{self.threads}"] if self.threads != 1 else []
        parts += [name for name in ("split", "autocast", "tf32") if getattr(self, name)]
        return "-".join([*parts, *([] if self.device == "cpu" else [self.device])])


@dataclass(frozen=True)
class Difference:
    """What differs between reference and candidate besides a fault, and is not a fault."""

    name: str
    what: str
    reference: Variant
    candidate: Variant
    kernels: Kernels | None = None  # only for models that have another implementation of this
    half: Half = "seen"  # an unseen one is unseen on every model

    @property
    def available(self) -> bool:
        return torch.cuda.is_available() or "cuda" not in (self.reference.device, self.candidate.device)


PLAIN = Variant()
BFLOAT16 = Variant(dtype="bfloat16")
GPU = Variant(device="cuda")
GPU_BFLOAT16 = replace(BFLOAT16, device="cuda")


def _other(variant: Variant) -> Variant:
    return replace(variant, other_kernels=True)


DIFFERENCES = {
    one.name: one
    for one in (
        Difference("none", "none: the same kernels", PLAIN, PLAIN),
        Difference("sdpa", "eager → SDPA attention", PLAIN, _other(PLAIN), "attention"),
        Difference("channels-last", "channels_last", PLAIN, _other(PLAIN), "convolution"),
        Difference("threads", "one thread → two", PLAIN, replace(PLAIN, threads=2)),
        Difference("batch-split", "the batch in two halves", PLAIN, replace(PLAIN, split=True), half="unseen"),
        Difference("bf16-weights", "float32 → bfloat16 weights", PLAIN, BFLOAT16),
        Difference("autocast", "float32 → autocast to bfloat16", PLAIN, replace(PLAIN, autocast=True)),
        Difference("bf16-same", "bfloat16, the same kernels", BFLOAT16, BFLOAT16, half="unseen"),
        Difference("bf16-sdpa", "bfloat16, eager → SDPA attention", BFLOAT16, _other(BFLOAT16), "attention"),
        Difference("bf16-channels-last", "bfloat16, channels_last", BFLOAT16, _other(BFLOAT16), "convolution"),
        Difference("gpu", "CPU → GPU, float32", PLAIN, GPU),
        Difference("gpu-tf32", "CPU → GPU, TF32", PLAIN, replace(GPU, tf32=True)),
        Difference("gpu-bf16", "CPU → GPU, bfloat16", BFLOAT16, GPU_BFLOAT16),
        Difference("gpu-bf16-same", "GPU, bfloat16, the same kernels", GPU_BFLOAT16, GPU_BFLOAT16),
        Difference(
            "gpu-bf16-sdpa", "GPU, bfloat16, eager → SDPA attention", GPU_BFLOAT16, _other(GPU_BFLOAT16), "attention"
        ),
        Difference(
            "gpu-channels-last", "GPU, TF32, channels_last", replace(GPU, tf32=True),
            replace(GPU, tf32=True, other_kernels=True), "convolution",
        ),
    )
}  # fmt: skip
OTHER_BFLOAT16_KERNELS = ("bf16-sdpa", "bf16-channels-last")
"""The main case: both sides in bfloat16, with other kernels."""
