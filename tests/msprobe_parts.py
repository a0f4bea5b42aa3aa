"""What the tests of msprobe's front door share: the network of its document, and readers of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from astray.compat.msprobe import PrecisionDebugger


class ModuleOP(nn.Module):
    """The network of the document's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=8, out_features=4)
        self.linear_2 = nn.Linear(in_features=4, out_features=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.linear_1(x)
        x2 = self.linear_2(x1)
        return F.relu(x2)


def network(scale: float = 1.0) -> ModuleOP:
    torch.manual_seed(0)
    model = ModuleOP()
    with torch.no_grad():
        model.linear_1.weight *= scale
    return model


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 8, generator=generator) for _ in range(count)]


def configured(folder: Path, **keys: Any) -> Path:
    """A config.json, with a dump_path beside it unless another is given."""
    path = folder / "config.json"
    path.write_text(json.dumps({"dump_path": str(folder / "dump"), **keys}))
    return path


@contextmanager
def debugging(*args: Any, **kwargs: Any) -> Iterator[PrecisionDebugger]:
    """A debugger that is closed at the end, so that the next test has none."""
    debugger = PrecisionDebugger(*args, **kwargs)
    try:
        yield debugger
    finally:
        debugger.close()


def train(debugger: PrecisionDebugger, model: nn.Module, steps: int = 1, at: Any = None) -> None:
    for x in batches(steps):
        debugger.start(at)
        loss = model(x).sum()
        loss.backward()
        debugger.stop()
        debugger.step()


def read(folder: Path, name: str = "dump.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def names(folder: Path) -> list[str]:
    return list(read(folder)["data"])


def tensors(folder: Path) -> list[str]:
    data = folder / "dump_tensor_data"
    return sorted(path.name for path in data.iterdir()) if data.is_dir() else []
