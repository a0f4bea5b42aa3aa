"""Checkpoints as the libraries write them that people use, and how tensors are compared."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch


def save_distributed(state: dict[str, Any], folder: Path) -> Path:
    """A distributed checkpoint, written by one process."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only one process
        dcp.save(state, checkpoint_id=str(folder))
    return folder


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and bits are the same."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.contiguous().reshape(-1).view(torch.uint8).equal(other.contiguous().reshape(-1).view(torch.uint8))


def write_index(path: Path, weight_map: dict[str, Any]) -> None:
    """The index of a folder with several files."""
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
