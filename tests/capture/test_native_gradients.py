"""The native part and the Python one see the same gradients: the same rows, in the same order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from astray.capture.pytorch.backward.gradients import native
from recorded_rows import rows

pytestmark = pytest.mark.skipif(native is None, reason="the native part is not built, or not wanted")

WIDTH = 4


class Inner(nn.Module):
    """Lets out a value from its middle, and may use one that it was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.given: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.middle = self.first(x)
        result: Tensor = self.second(torch.relu(self.middle)) * x
        return result if self.given is None else result + self.given


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x) * 2, self.linear(x * 3), x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.several, self.same = Inner(), Inner(), Several(), nn.Identity()
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(nn.GELU(), nn.Dropout(0.0)), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.one(x)
        self.two.given = self.one.middle
        z = self.two(y) + self.one.middle + self.same(x) + x
        a, _, c = self.several(z)
        many = torch.stack([a * i for i in range(100)]).unbind()
        return self.last(a + c.clone().mul_(2)), sum(many[1:], many[0])


class Program(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer, self.linear = Outer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        a, many = self.outer(x)
        result: Tensor = self.outer(a)[0] * x + many * 1e-3
        return result


def record(path: Path, level: Any) -> None:
    torch.manual_seed(0)
    model = Program()
    with astray.record(path, model, level=level) as rec:
        for _ in range(2):
            loss = model(torch.randn(2, WIDTH)).square().sum()
            leaf = torch.ones(2, WIDTH, requires_grad=True)
            loss = loss + model.outer(leaf)[0].sum()
            loss.backward(retain_graph=True)
            loss.backward()
            rec.step()


@pytest.mark.parametrize("levels", ["module", "function", "module,function"])
def test_both_write_the_same_rows(levels: str, tmp_path: Path) -> None:
    record(tmp_path / "native", levels.split(","))
    program = (
        "import sys, test_native_gradients as t, pathlib; t.record(pathlib.Path(sys.argv[1]), sys.argv[2].split(','))"
    )
    there = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    threads = str(torch.get_num_threads())  # how sums are rounded depends on it
    environment = os.environ | {"ASTRAY_TAPS": "python", "PYTHONPATH": there, "OMP_NUM_THREADS": threads}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "python"), levels], env=environment, check=True)
    found, expected = (rows(astray.open(tmp_path / taps)) for taps in ("native", "python"))
    for row in found + expected:
        del row["stack"]  # another process starts from other frames
    assert len(found) > 500
    assert found == expected


def test_what_waits_for_the_backward_pass_is_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    with astray.record(tmp_path / "run", nn.Sequential(nn.Linear(3, 3), nn.Softmax(0)), level="function"):
        y = torch.nn.functional.cross_entropy(x.view(1, 3) * 2.0, torch.tensor([1]))
        hooks = y._backward_hooks
        assert hooks is not None
        assert len(hooks) == 1
        assert gc.is_tracked(hooks) == (sys.version_info >= (3, 14))
        assert not gc.is_tracked(next(iter(hooks.values())))
        y.register_hook(lambda gradient: gradient)  # one of the program's own
        assert gc.is_tracked(hooks)
    assert len(hooks) == 1  # ours was taken off
