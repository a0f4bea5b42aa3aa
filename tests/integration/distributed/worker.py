"""Started by torchrun: runs programs bare and recorded, and compares what they computed to the last bit.

    worker.py FOLDER LEVELS PROGRAM...

LEVELS are the levels to record at, such as `module,module+op`; each program is recorded at each of them into
FOLDER/PROGRAM-LEVEL, and at all of them on rank 0 alone into FOLDER/PROGRAM-rank0. What the whole weights and gradients
were is written beside it. Many checks are made in one start, since each start takes seconds.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import astray
from astray.capture.settings import LEVELS, OPTIMIZER
from integration.distributed.programs import PROGRAMS
from integration.programs.program import Setup, bits
from integration.programs.recorded import _classes, _complaints, _differences, _on_everything, _on_models

LARGE = ("fsdp_refilling",)
"""Programs whose tensors are too large to keep every value of."""


def main(folder: Path, levels: list[str], names: list[str]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for name in names:
            compare(folder, levels, name)
    finally:
        dist.destroy_process_group()


def compare(folder: Path, levels: list[str], name: str) -> None:
    """Runs one program again and again."""
    run_bare(name)  # the first run may load and cache what later ones then have
    expected, left, whole = run_bare(name)
    if dist.get_rank() == 0:
        np.savez(folder / f"{name}.npz", **whole)
    keep = "stats" if name in LARGE else "tensors"
    for level in levels:
        run_recorded(
            folder / f"{name}-{level}",
            name,
            expected,
            left,
            level=level.split("+"),
            keep=keep,
            optimizer=OPTIMIZER,
        )
    run_recorded(folder / f"{name}-rank0", name, expected, left, level=LEVELS, ranks=0)


def run_bare(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """The results of a program without a recorder, the hooks on its model, and its whole tensors at each step."""
    torch.manual_seed(0)
    steps = PROGRAMS[name]()
    setup: Setup = next(steps)
    (model,) = setup.by_name.values()
    model = unwrapped(model)
    whole = {f"weight {path}": full(tensor) for path, tensor in model.named_parameters()}
    results = []
    for number, result in enumerate(steps):
        results.append(result)
        for path, tensor in model.named_parameters():
            if tensor.grad is not None:
                whole[f"gradient {number} {path}"] = full(tensor.grad)
    return state_after(setup, results), _on_models(setup), whole


def run_recorded(path: Path, name: str, expected: dict[str, Any], left: dict[str, Any], **settings: Any) -> None:
    torch.manual_seed(0)
    steps = PROGRAMS[name]()
    setup: Setup = next(steps)
    results = []
    classes = _classes(setup)
    before = _on_everything(classes)
    with _complaints() as complaints, astray.record(path, setup.models, **settings) as recorder:
        for result in steps:
            results.append(result)
            recorder.step()
    assert complaints == [], complaints
    remains = _differences(before, _on_everything(classes)) + _differences(left, _on_models(setup))
    assert remains == [], remains
    changed = _differences(expected, state_after(setup, results))
    assert changed == [], [text[:200] for text in changed]


def state_after(setup: Setup, results: list[Any]) -> dict[str, Any]:
    """Every bit that this process holds of what the program computed."""
    (model,) = setup.by_name.values()
    found = bits("result", results)
    for path, tensor in model.named_parameters():
        found |= bits(f"weight {path}", local(tensor)) | bits(f"gradient {path}", local(tensor.grad))
    (optimizer,) = setup.optimizers
    for number, state in optimizer.state_dict()["state"].items():
        found |= {
            key: value for name, one in state.items() for key, value in bits(f"{number} {name}", local(one)).items()
        }
    return found | bits("randomness", torch.get_rng_state())


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return plain.detach().clone().numpy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
