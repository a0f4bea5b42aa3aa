"""Losses and weights with and without recording, bit by bit.

torch's own backward kernels add up in any order unless told otherwise, so deterministic ones are asked for; the bare
training is run twice to show that they are. cuBLAS wants an environment variable for that before it starts, so gpu.py
runs this in a process of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpu_sections.work import BOTH, Report, Work, recording

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

LEVELS: dict[str, dict[str, Any] | None] = {
    "nothing, again": None,
    "statistics, modules": {"level": "module"},
    "statistics, functions": {"level": "function"},
    "statistics, both": {"level": BOTH},
    "fingerprints, ops": {"level": "op", "keep": "fingerprint"},
    "statistics, all levels, updates": {
        "level": [*BOTH, "op"], "optimizer": ["gradient", "weight", "state", "update"],
    },
    "samples, both": {"level": BOTH, "keep": "sample"},
    "tensors, both": {"level": BOTH, "keep": "tensors", "max_bytes": "1 GB"},
}  # fmt: skip


class Trained(NamedTuple):
    losses: torch.Tensor
    weights: list[torch.Tensor]

    def differing(self, other: Trained) -> tuple[int, int]:
        """How many losses and how many weights have other bits."""
        losses = int((self.losses.view(torch.int32) != other.losses.view(torch.int32)).sum())
        pairs = zip(self.weights, other.weights, strict=True)
        return losses, sum(int((one.view(torch.int32) != two.view(torch.int32)).sum()) for one, two in pairs)


def run(work: Work, report: Report) -> None:
    torch.use_deterministic_algorithms(True)
    steps = work.times(5, 2)
    bare = train(work, steps, None)
    rows = []
    for name, settings in LEVELS.items():
        losses, weights = bare.differing(train(work, steps, settings))
        same = "**yes**" if not losses + weights else "**NO**"
        rows.append([name, f"{losses} of {steps}", f"{weights:,} of {sum(w.numel() for w in bare.weights):,}", same])
    report.write(f"### Bits\n\nLosses and weights after {steps} steps that differ from the bare training's in any bit.")
    report.table(["recorded", "losses", "weights", "identical"], rows)


def train(work: Work, steps: int, settings: dict[str, Any] | None) -> Trained:
    training = work.training()
    if settings is None:
        losses = [training.step() for _ in range(steps)]
    else:
        with recording(work, training, settings) as recorded:
            losses = [recorded.step() for _ in range(steps)]
    return Trained(torch.stack(losses).float(), [weight.detach() for weight in training.model.parameters()])
