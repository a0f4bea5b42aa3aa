"""`compiled="modules"`: the calls inside compiled code are recorded as those of the same program run eagerly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as torch_dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import astray
from astray.capture.pytorch.compiled.operators import recordings
from astray.store import RunData
from pairwise import grid
from recorded_rows import hooks_of, rows
from small_models import MODELS, Residual, build, same_bits

pytestmark = pytest.mark.filterwarnings(  # of torch.compile's own doing
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.jit.script_method` is deprecated",
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch_dynamo.reset()
    counters.clear()
    yield
    torch_dynamo.reset()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Broken(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch_dynamo.graph_break()
        return self.head(self.layers[1](x))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 30).view(5, 6).requires_grad_()


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], rec: Any = None, steps: int = 2) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(steps):
        torch.manual_seed(0)
        x = batch()
        loss = call(x).square().sum()
        loss.backward()
        found += [loss.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        if rec is not None:
            rec.step()
    return found


def seen(run: RunData) -> dict[tuple[Any, ...], int | None]:
    names = ("step", "micro", "site", "type", "call", "phase", "role", "path", "kind")
    return {tuple(row[name] for name in names): row["fingerprint"] for row in rows(run)}


def missed(run: RunData) -> list[str]:
    return [item.what for item in run.ranks[0].end.missed]


NOTE = "compiled code as it is without astray"


def both(kind: type[nn.Module], way: Callable[[Any], tuple[Any, Any]], path: Path) -> tuple[RunData, RunData]:
    """The run of the eager program and that of the compiled one, whose graphs and bits are those without astray."""
    model = build(kind)
    with astray.record(path / "eager", model) as rec:
        train(model, model, rec)
    torch_dynamo.reset()
    counters.clear()
    model = build(kind)
    bare = train(model, way(model)[1])
    work = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
    torch_dynamo.reset()
    counters.clear()
    model = build(kind)
    recorded, call = way(model)
    with astray.record(path / "compiled", recorded, compiled="modules") as rec:
        watched = train(model, call, rec)
    assert {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())} == work
    assert same_bits(bare, watched)
    assert hooks_of(recorded) == 0
    assert not recordings
    return astray.open(path / "eager"), astray.open(path / "compiled")


def wrapped(model: Any) -> tuple[Any, Any]:
    fast = torch.compile(model, backend="aot_eager")
    return fast, fast


def in_place(model: Any) -> tuple[Any, Any]:
    model.compile(backend="aot_eager")
    return model, model


@grid(
    kind=[Stack, Broken, *MODELS],
    way=[wrapped, in_place],
    ids={"kind": [kind.__name__ for kind in (Stack, Broken, *MODELS)], "way": ["wrapped", "in_place"]},
    pairs=False,
)
def test_every_row_of_the_eager_run_is_there_with_the_same_bits(
    kind: type[nn.Module], way: Callable[[Any], tuple[Any, Any]], tmp_path: Path
) -> None:
    eager, compiled = both(kind, way, tmp_path)
    assert seen(compiled) == seen(eager)
    assert missed(compiled) == [NOTE]


def test_calls_inside_a_compiled_function_are_seen(tmp_path: Path) -> None:
    model = build(Stack)
    function = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    with astray.record(tmp_path / "compiled", model, compiled="modules") as rec:
        train(model, function, rec)
    model = build(Stack)
    with astray.record(tmp_path / "eager", model) as rec:
        train(model, model, rec)
    compiled, eager = astray.open(tmp_path / "compiled"), astray.open(tmp_path / "eager")
    assert seen(compiled) == seen(eager)
    stacks = [compiled.ranks[0].stack(row["stack"]) for row in rows(compiled, step=1, phase="forward")]
    assert {stack[0].function.rpartition(".")[2] for stack in stacks} == {"<lambda>"}


def test_order_and_nesting_are_those_of_the_program(tmp_path: Path) -> None:
    eager, compiled = both(Stack, wrapped, tmp_path)

    def nested(run: RunData) -> list[tuple[str, str | None]]:
        calls = [run.ranks[0].calls.row(index) for index in range(len(run.ranks[0].calls))]
        names = {call["seq"]: call["site"] for call in calls}
        return [(call["site"], names.get(call["parent"])) for call in calls if call["phase"] == "forward"]

    assert nested(compiled) == nested(eager)


def test_a_fault_inside_a_compiled_model_is_named(tmp_path: Path) -> None:
    for name, scale in (("good", 1.0), ("bad", 1.01)):
        model = build(Stack)
        model.layers[1].norm.register_forward_hook(lambda _m, _a, y, scale=scale: y * scale)
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        with astray.record(tmp_path / name, fast, compiled="modules") as rec:
            train(model, fast, rec)
        torch_dynamo.reset()
    diff = astray.compare(tmp_path / "good", tmp_path / "bad")
    assert (diff.first.step, diff.first.site) == (0, "layers.1.norm")


def test_steps_that_are_not_recorded_leave_the_operators_in_place(tmp_path: Path) -> None:
    fast = torch.compile(build(Stack), backend="aot_eager", fullgraph=True)
    with astray.record(tmp_path / "run", fast, compiled="modules", steps="1:6:2") as rec:
        train(fast, fast, rec, steps=5)
    run = astray.open(tmp_path / "run")
    assert run.steps == [1, 3]
    assert len(rows(run, step=1, site="layers.1.inner", phase="backward", role="output")) == 1
    assert counters["stats"]["unique_graphs"] == 1


def test_code_compiled_before_is_compiled_anew_and_once_more_afterwards(tmp_path: Path) -> None:
    fast = torch.compile(build(Stack), backend="aot_eager", fullgraph=True)
    train(fast, fast)
    with astray.record(tmp_path / "run", fast, compiled="modules") as rec:
        train(fast, fast, rec)
    assert "layers.1.inner" in {row["site"] for row in rows(astray.open(tmp_path / "run"))}
    train(fast, fast)
    assert counters["stats"]["unique_graphs"] == 3
    assert counters["stats"]["calls_captured"] == 3 * 7 + 2 * 7  # two operators for each of the seven calls inside


def test_a_recording_that_is_over_leaves_nothing_behind_in_what_it_compiled(tmp_path: Path) -> None:
    def recorded() -> tuple[Any, list[weakref.ref[Any]]]:
        fast = torch.compile(build(Stack), backend="aot_eager")
        with astray.record(tmp_path / "run", fast, compiled="modules") as rec:
            train(fast, fast, rec)
        return fast, [weakref.ref(rec), weakref.ref(rec._adapter._modules)]

    fast, gone = recorded()
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    torch.ops.astray.enter([torch.ones(1)], "head", "0", 12345)  # as the graph does that was compiled with it
    assert torch.ops.astray.leave([torch.ones(1)], "head", "out", 12345).item() == -1
    train(fast, fast)


class Checkpointed(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.layers[0], x, use_reentrant=False))


class Branching(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cond(x.sum() > 0, lambda x: self.layers[0](x), lambda x: self.layers[1](x), (x,)))


class Vectorised(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.func.vmap(self.layers[0].inner)(x))


BODIES = {
    Checkpointed: {"layers.0", "layers.0.norm", "layers.0.inner"},
    Branching: {f"layers.{i}{name}" for i in (0, 1) for name in ("", ".norm", ".inner")},
    Vectorised: {"layers.0.inner"},
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", BODIES)
def test_where_no_operator_is_allowed_the_program_runs_and_the_run_says_so(
    kind: type[nn.Module], backend: str, tmp_path: Path
) -> None:
    def results(record: bool) -> list[Any]:
        torch_dynamo.reset()
        model = build(kind)
        fast = torch.compile(model, backend=backend, fullgraph=True)
        context: Any = astray.record(tmp_path / "run", fast, compiled="modules") if record else nullcontext()
        with context as rec:
            return train(model, fast, rec)

    bare, watched = results(False), results(True)
    assert all(torch.allclose(one, other) for one, other in zip(bare, watched, strict=True))
    run = astray.open(tmp_path / "run")
    assert set(missed(run)) == {NOTE, *(f"calls of {name} in compiled code" for name in BODIES[kind])}
    assert {row["site"] for row in rows(run, kind="module")} == {"<root>", "head"}


@pytest.mark.slow
def test_no_operator_is_left_in_what_becomes_a_cuda_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CacheBase

    CacheBase.get_system()  # asks once what CUDA device there is, and would believe the patch below
    fast = torch.compile(build(Residual), mode="reduce-overhead")
    with monkeypatch.context() as patch, astray.record(tmp_path / "run", fast, compiled="modules"):
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        fast(torch.ones(2, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert missed(run) == ["calls of norm in compiled code", "calls of inner in compiled code"]
    assert {row["site"] for row in rows(run, kind="module")} == {"<root>"}


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_no_operator_of_ours(strict: bool, tmp_path: Path) -> None:
    model = build(Stack)
    with astray.record(tmp_path / "run", model, compiled="modules"):
        program = torch.export.export(model, (torch.ones(2, 6),), strict=strict)
    assert "astray" not in str(program.graph)


@pytest.mark.slow
def test_with_kernels_of_its_own_all_rows_are_there_and_differ_by_rounding_at_most(tmp_path: Path) -> None:
    model = build(Stack)
    with astray.record(tmp_path / "eager", model, keep="tensors") as rec:
        train(model, model, rec)
    fast = torch.compile(build(Stack), fullgraph=True)
    with astray.record(tmp_path / "compiled", fast, keep="tensors", compiled="modules") as rec:
        train(fast, fast, rec)
    diff = astray.compare(tmp_path / "eager", tmp_path / "compiled")
    assert diff.same
    assert diff.counts["rounding"] > 0
