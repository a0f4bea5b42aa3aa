"""Distributed tensors: a reduction is that of the whole tensor, wherever its parts lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from astray.state import StateDict
from astray.state import measuring as module


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_the_parts_of_all_processes_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes, of which this one holds all that there is: each of the others sends what it has found itself."""
    mesh = init_device_mesh("cpu", (1,))
    tensor = torch.tensor([[1.0, 2.0], [3.0, -10.0]])
    state = StateDict({"w": distribute_tensor(tensor, mesh, [Shard(0)]), "b": torch.tensor([1.0])})
    assert state.norm2(lw=True).state_dict() == pytest.approx({"w": tensor.double().norm().item(), "b": 1.0})
    monkeypatch.setattr(type(mesh), "size", lambda *_: 4)
    monkeypatch.setattr(module, "_all_gather", lambda rows, group: [rows] * 4)
    four = tensor.double().repeat(4, 1)
    assert state.std(lw=True)["w"] == pytest.approx(four.std().item(), rel=1e-12)
    assert state.norm(3, lw=True)["w"] == pytest.approx(four.norm(3).item(), rel=1e-12)
    assert state.norm1() == 4 * 16.0 + 1.0


@pytest.mark.slow
def test_four_processes_agree_on_the_whole(tmp_path: Path) -> None:
    program = Path(__file__).with_name("sharing.py")
    processes = [
        subprocess.Popen([sys.executable, program, str(rank), "4", tmp_path], stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        told = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, told
