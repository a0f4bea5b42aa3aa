"""The gradients of calls in graphs of many shapes are those that plain Python hooks read; no hooks remain."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
import gradient_oracle
from astray.capture.pytorch.gradients import InputEdges, LiveGradients, living
from astray.capture.pytorch.native.build import load
from astray.capture.pytorch.native.core import Site
from recorded_rows import outline, rows

Calls, StackWalk = load().Calls, load().StackWalk

WIDTH = 4
LEVELS = ["module", "function", "module,function"]


class Inner(nn.Module):
    """Exposes an inner value, and may use one that is not an argument."""

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


def train(model: nn.Module, rec: Any = None, steps: int = 2) -> list[Tensor]:
    """Backward passes of all kinds: twice through a graph, into a leaf, to chosen inputs, on another thread."""
    results: list[Tensor] = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(2, WIDTH)
        leaf = torch.ones(2, WIDTH, requires_grad=True)
        loss = model(x).square().sum() + model.outer(leaf)[0].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        inputs = torch.randn(2, WIDTH, requires_grad=True)
        middle = inputs * 2
        results += torch.autograd.grad(model.outer(middle)[0].sum(), [middle, model.outer.one.first.weight])
        elsewhere = threading.Thread(target=model(x).sum().backward)
        elsewhere.start()
        elsewhere.join()
        results += [loss.detach(), leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        if rec is not None:
            rec.step()
    return results


def record(path: Path, levels: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Program()
    with astray.record(path, model, level=levels.split(",")) as rec:
        return train(model, rec)


@pytest.mark.parametrize("levels", LEVELS)
def test_rows_are_those_of_plain_hooks(levels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "native", levels)
    with monkeypatch.context() as patched:
        gradient_oracle.use(patched)
        record(tmp_path / "oracle", levels)
    found, expected = (rows(astray.open(tmp_path / name)) for name in ("native", "oracle"))
    for row in found + expected:
        del row["stack"]  # they were recorded from two lines
    assert len(found) > 700
    assert found == expected


@pytest.mark.parametrize("levels", LEVELS)
def test_no_bit_changes(levels: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bare = train(Program())
    recorded = record(tmp_path / "run", levels)
    assert len(bare) == len(recorded)
    assert all(map(torch.equal, bare, recorded))


def test_nothing_grows_over_steps_and_nothing_is_left(tmp_path: Path) -> None:
    gc.collect()
    before = living()
    model, counts = Program(), []
    cached = model.linear(torch.ones(2, WIDTH)) * 1.0  # outlives the calls that are given it
    with astray.record(tmp_path / "run", model, level=["module", "function"]) as rec:
        for _ in range(6):
            train(model, rec, steps=1)
            model.outer.one(cached).sum().backward(retain_graph=True)
            model.outer.one.given = model.outer.two.given = None
            gc.collect()
            counts.append(living() - before)
    assert counts[2:] == counts[2:3] * 4
    del cached
    model.outer.one.middle = model.outer.two.middle = None  # type: ignore[assignment]
    gc.collect()
    assert living() == before


def test_a_graph_that_outlives_the_recording_runs_without_it(tmp_path: Path) -> None:
    model, x = Program(), torch.ones(2, WIDTH, requires_grad=True)
    with astray.record(tmp_path / "run", model, level=["module", "function"]):
        kept = model.outer(x)[0].sum()
        kept.backward(retain_graph=True)
        first = x.grad
    written = len(rows(astray.open(tmp_path / "run")))
    assert not x._backward_hooks
    x.grad = None
    kept.backward()
    assert torch.equal(x.grad, first)  # type: ignore[arg-type]
    assert len(rows(astray.open(tmp_path / "run"))) == written


def test_two_threads_go_back_through_a_graph_that_they_share(tmp_path: Path) -> None:
    model = Program()
    with astray.record(tmp_path / "run", model, level=["module", "function"]) as rec:
        for _ in range(5):
            trunk = model.linear(torch.ones(2, WIDTH))
            start = threading.Barrier(2)

            def work(trunk: Tensor = trunk, start: threading.Barrier = start) -> None:
                start.wait()
                for _ in range(5):
                    model.outer(trunk)[0].sum().backward(retain_graph=True)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rec.step()
    run = astray.open(tmp_path / "run")
    assert run.ranks[0].end is not None
    assert not run.ranks[0].end.missed
    assert outline(run, site="outer.several", phase="backward").count("outer.several backward output 0") >= 45


def test_a_failure_of_ours_is_said_and_an_interrupt_goes_on_its_way() -> None:
    failures: list[Any] = []

    class Failing(Calls):
        def failed(self, what: str, error: Exception) -> None:
            failures.append((what, error))

    class TensorObserver:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def observe(self, *_: Any) -> None:
            raise self.error

    def go(error: BaseException, function: Callable[[Tensor], Tensor]) -> None:
        engine = Failing(SimpleNamespace(row_buffers=None), StackWalk(lambda _: True, lambda *_: 0))
        engine._set_observer(TensorObserver(error))
        call = engine.enter(Site("here", "Here", "", "custom"), None, row=False)
        x = torch.ones(2, requires_grad=True) * 1.0
        edges, live = InputEdges([("0", x)]), LiveGradients()
        y = function(x)
        live.watch(engine, call, edges, [("out", y)])
        y.sum().backward()
        live.remove()

    for function in (torch.sigmoid, lambda x: torch.sigmoid(x) * x):
        go(ours := ValueError("ours"), function)
        assert failures[-1] == ("a gradient of here", ours)
        with pytest.raises(KeyboardInterrupt):
            go(KeyboardInterrupt(), function)


def test_many_inputs_and_outputs(tmp_path: Path) -> None:
    x = [torch.full((2,), float(i), requires_grad=True) for i in range(100)]
    y = [one * 1.0 for one in x]
    with astray.record(tmp_path / "run", nn.Identity(), level="function", keep="tensors"):
        parts = torch.stack(y + y[:1]).unbind()
        sum(part * (i + 1.0) for i, part in enumerate(parts)).sum().backward()  # type: ignore[union-attr]
    run = astray.open(tmp_path / "run")
    sent = rows(run, site="/stack", phase="backward", role="output")
    found = {row["path"]: float(run.values(0, row["row"])[0]) for row in sent}
    assert found == {"0.0": 1.0 + 101.0} | {f"0.{i}": i + 1.0 for i in range(1, 100)}
