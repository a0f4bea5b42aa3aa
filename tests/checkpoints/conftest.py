"""What the tests save and read back."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """One of each kind: dtypes that numpy has and has not, no dimension, no element."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "weight": weight,
        "half.weight": weight.half(),
        "bfloat": weight[:3].to(torch.bfloat16),
        "double": weight[0].double(),
        "eight": weight.to(torch.float8_e4m3fn),
        "counts": torch.arange(5),
        "small": torch.tensor([1, 2, 255], dtype=torch.uint8),
        "wide": torch.tensor([1, 65535], dtype=torch.uint16),
        "mask": torch.tensor([True, False, True]),
        "complex": torch.complex(weight[0], weight[1]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),
    }


@pytest.fixture
def trained() -> dict[str, Any]:
    """What people save: a model, its optimizer, and this and that."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "name": "run"}
