"""torch.compile: compiled code runs as it would without astray, its boundary is recorded, and what it hides is
reported.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as torch_dynamo
from torch import nn
from torch._C._dynamo import eval_frame as dynamo
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import astray
from astray.store import RunData
from recorded_rows import hooks_of, outline, rows
from small_models import Residual, build, same_bits

pytestmark = pytest.mark.filterwarnings(  # of torch.compile's own doing
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:`torch.jit.script_method` is deprecated",
)

AS_ONE = "torch.compile runs them as one graph"


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Broken(Plain):
    """Is compiled in two pieces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch_dynamo.graph_break()
        return self.head(self.layers[1](x))


class Fallen(Plain):
    """Cannot be compiled, for the graph breaks in a loop. Its layers, being torch's own, are not compiled either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch_dynamo.graph_break()
            x = layer.inner(layer.norm(x))
        return self.head(x)


class Checkpointed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


Way = Callable[[Any, str], tuple[Any, Any]]
"""Takes a model and a backend, returns the module to record and the one to call."""


def wrapped(model: Any, backend: str) -> tuple[Any, Any]:
    fast = torch.compile(model, backend=backend)
    return fast, fast


def wrapped_elsewhere(model: Any, backend: str) -> tuple[Any, Any]:
    return model, torch.compile(model, backend=backend)


def in_place(model: Any, backend: str) -> tuple[Any, Any]:
    model.compile(backend=backend)
    return model, model


def one_layer(model: Any, backend: str) -> tuple[Any, Any]:
    model.layers[1] = torch.compile(model.layers[1], backend=backend)
    return model, model


def one_layer_in_place(model: Any, backend: str) -> tuple[Any, Any]:
    model.layers[1].compile(backend=backend)
    return model, model


def in_a_function(model: Any, backend: str) -> tuple[Any, Any]:
    return model, torch.compile(lambda x: model(x) * 2, backend=backend)


WAYS: list[Way] = [wrapped, wrapped_elsewhere, in_place, one_layer, one_layer_in_place, in_a_function]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def start_over() -> None:
    torch_dynamo.reset()
    counters.clear()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    start_over()
    yield
    start_over()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 18).view(3, 6)


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], rec: Any = None, steps: int = 3) -> list[Any]:
    """Everything that must not change by a bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Any] = []
    for _ in range(steps):
        loss = call(batch()).square().sum()
        loss.backward()
        found += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        if rec is not None:
            rec.step()
    return found


def work() -> dict[str, Any]:
    """How much dynamo has compiled."""
    return {name: dict(counters[name]) for name in ("stats", "frames", "graph_break")}


def missed(run: RunData) -> dict[str, int]:
    return {item.what: item.count for item in run.ranks[0].end.missed}


def both(kind: type[nn.Module], way: Way, backend: str, path: Path) -> tuple[RunData, nn.Module]:
    """Trains without and with astray, and checks that neither the numbers nor dynamo's work differ."""
    for _ in range(2):  # some frames dynamo looks at once in a process, and never again
        start_over()
        model = build(kind)
        bare = train(model, way(model, backend)[1])
        bare_work = work()
    start_over()
    model = build(kind)
    recorded, call = way(model, backend)
    with astray.record(path, recorded) as rec:
        watched = train(model, call, rec)
    assert work() == bare_work
    assert same_bits(bare, watched)
    assert hooks_of(recorded) == 0
    return astray.open(path), model


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((Plain, way) for way in WAYS),
        *((Fallen, way) if way is in_a_function else slow(Fallen, way) for way in WAYS),
        *((Broken, way) if way is wrapped else slow(Broken, way) for way in (wrapped, in_place, in_a_function)),
        *((Checkpointed, wrapped), slow(Checkpointed, in_a_function)),
    ],
)
def test_compiled_programs_run_as_without_astray(kind: type[nn.Module], way: Way, tmp_path: Path) -> None:
    run, model = both(kind, way, "aot_eager", tmp_path / "run")
    gradients = {row["site"] for row in rows(run, role="gradient")}
    assert gradients == {name for name, _ in model.named_parameters()} or way is one_layer


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [wrapped, in_place])
def test_so_they_do_with_other_backends(way: Way, backend: str, tmp_path: Path) -> None:
    run, _ = both(Fallen, way, backend, tmp_path / "fallen")
    assert missed(run) == {}
    run, _ = both(Plain, way, backend, tmp_path / "plain")
    assert missed(run) == {"calls inside <root>": 3}


@pytest.mark.parametrize("way", [wrapped, in_place])
def test_the_boundary_of_a_compiled_model(way: Way, tmp_path: Path) -> None:
    model = build(Plain)
    recorded, call = way(model, "aot_eager")
    with astray.record(tmp_path / "run", recorded, keep="tensors"):
        x = batch().requires_grad_()
        y = call(x)
        y.sum().backward()
    run = astray.open(tmp_path / "run")
    given = [f"<root> forward parameter {name}" for name, _ in build(Plain).named_parameters()]
    assert outline(run, kind="module") == [
        "<root> forward input 0",
        *given,
        "<root> forward output out",
        "<root> backward input out",
        "<root> backward output 0",
    ]
    (row,) = rows(run, site="<root>", phase="backward", role="output")
    assert run.values(0, row["row"]).tobytes() == x.grad.numpy().tobytes()
    assert row["type"] == "Plain"


def test_a_compiled_layer_hides_only_what_is_inside_it(tmp_path: Path) -> None:
    run, _ = both(Plain, one_layer, "aot_eager", tmp_path / "run")
    assert [row["site"] for row in rows(run, step=2, phase="forward", role="output")] == [
        "layers.0.norm", "layers.0.inner", "layers.0", "layers.1", "head", "<root>",
    ]  # fmt: skip
    assert list(missed(run)) == ["calls inside layers.1"]
    (sent,) = rows(run, step=2, site="layers.1", phase="backward", role="output")
    (arriving,) = rows(run, step=2, site="layers.0", phase="backward", role="input")
    assert sent["fingerprint"] == arriving["fingerprint"]


def test_layers_seen_where_compiling_was_given_up(tmp_path: Path) -> None:
    run, _ = both(Fallen, wrapped, "aot_eager", tmp_path / "run")
    assert [row["site"] for row in rows(run, step=2, phase="forward", role="output")] == [
        "layers.0.norm", "layers.0.inner", "layers.1.norm", "layers.1.inner", "head", "<root>",
    ]  # fmt: skip
    assert missed(run) == {}


# -- what is not seen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [0, 2])
def test_a_compiled_function_is_named_each_time_it_hides_calls(warm: int, tmp_path: Path) -> None:
    model = build(Plain)

    @torch.compile(backend="aot_eager")
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    for _ in range(warm):
        evaluate(batch())
    line = evaluate._torchdynamo_orig_callable.__code__.co_firstlineno
    with astray.record(tmp_path / "run", model):
        for _ in range(3):
            evaluate(batch())
    run = astray.open(tmp_path / "run")
    assert missed(run) == {
        f"calls inside the compiled function evaluate (test_compiled.py:{line})": 3,
        "any call of a module": 1,
    }
    assert rows(run) == []


def test_modules_that_only_a_compiled_function_can_have_called_are_named(tmp_path: Path) -> None:
    class Mixed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.fast = torch.compile(lambda x: self.layers[1](x), backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.fast(self.layers[0](x)))

    run, _ = both(Mixed, lambda model, _: (model, model), "", tmp_path / "run")
    assert missed(run).pop("calls of layers.1") == 1
    reasons = {item.what: item.why for item in run.ranks[0].end.missed}
    assert reasons["calls of layers.1"] == "if there were any, a compiled function made them"


def test_a_layer_of_torchs_own_compiled_elsewhere_takes_its_hooks_along(tmp_path: Path) -> None:
    layer = nn.Linear(6, 6)
    fast = torch.compile(layer, backend="aot_eager")
    fast(batch())
    with astray.record(tmp_path / "run", layer):
        fast(batch())
    assert missed(astray.open(tmp_path / "run"))["calls of <root>"] == 1


def test_a_whole_step_compiled_still_shows_the_gradients_of_parameters(tmp_path: Path) -> None:
    def results(record: bool) -> tuple[list[Any], dict[str, Any]]:
        start_over()
        model = build(Plain)

        @torch.compile(backend="aot_eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()  # breaks the graph; hooks run while dynamo is on
            return loss

        found: list[Any] = []
        with astray.record(tmp_path / "run", model) if record else nullcontext():
            for _ in range(2):
                found.append(step(batch()).detach().clone())
                found += [parameter.grad.clone() for parameter in model.parameters()]
        return found, work()

    bare, bare_work = results(False)
    watched, watched_work = results(True)
    assert same_bits(bare, watched)
    assert bare_work == watched_work
    run = astray.open(tmp_path / "run")
    names = {name for name, _ in build(Plain).named_parameters()}
    assert {row["site"] for row in rows(run, role="gradient")} == names


def test_compiled_autograd_is_left_whole_and_what_it_hides_is_said(tmp_path: Path) -> None:
    def results(record: bool) -> tuple[list[Any], dict[str, Any]]:
        start_over()
        model = build(Plain)
        found: list[Any] = []
        with torch_dynamo.config.patch(compiled_autograd=True):
            fast = torch.compile(model, backend="aot_eager")
            backward = torch.compile(lambda loss: loss.backward(), backend="aot_eager")
            with astray.record(tmp_path / "run", fast) if record else nullcontext():
                for _ in range(3):
                    loss = fast(batch()).square().sum()
                    backward(loss)
                    found += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        return found, work()

    bare, bare_work = results(False)
    watched, watched_work = results(True)
    assert same_bits(bare, watched)
    assert bare_work["stats"] == watched_work["stats"]  # how many frames it met in torch itself varies
    assert bare_work["graph_break"] == watched_work["graph_break"]
    assert missed(astray.open(tmp_path / "run"))["the gradients of a backward pass"] == 3


# -- what dynamo is spared ---------------------------------------------------------------------------------------


def test_code_compiled_before_is_not_compiled_again(tmp_path: Path) -> None:
    fast = torch.compile(build(Plain), backend="aot_eager", fullgraph=True)
    fast(batch()).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        with astray.record(tmp_path / "run", fast) as rec:
            train(fast, fast, rec)
        fast(batch())
    assert missed(astray.open(tmp_path / "run")) == {"calls inside <root>": 3}


@pytest.mark.parametrize("steps", [None, "0:6:2"])
def test_code_compiled_while_recording_is_compiled_once_more_at_most(steps: str | None, tmp_path: Path) -> None:
    fast = torch.compile(build(Plain), backend="aot_eager", fullgraph=True)
    with astray.record(tmp_path / "run", fast, steps=steps) as rec:
        train(fast, fast, rec, steps=6)
    for name in ("second", "third"):
        fast(batch())
        with astray.record(tmp_path / name, fast) as rec:
            train(fast, fast, rec)
    assert counters["stats"]["unique_graphs"] <= 2


def test_after_stop_dynamo_is_as_it_was(tmp_path: Path) -> None:
    def compile_a_hooked_layer() -> int:
        start_over()
        layer = nn.Linear(6, 6)
        layer.register_forward_hook(lambda *_: None)
        layer.compile(backend="aot_eager")  # compiled for the sake of its hook alone
        layer(batch())
        return int(counters["stats"]["unique_graphs"])

    before = compile_a_hooked_layer()  # in older versions of torch none
    start_over()
    model = build(Plain)
    with astray.record(tmp_path / "run", model), astray.record(tmp_path / "second", model):
        model(batch())
    assert compile_a_hooked_layer() == before
    assert dynamo.set_guard_complete_hook(None) is None


def test_another_ones_guard_hook_still_decides(tmp_path: Path) -> None:
    asked: list[bool] = []

    def deciding(hit: bool) -> bool:
        asked.append(hit)
        return hit

    fast = torch.compile(build(Plain), backend="aot_eager")
    fast(batch())
    dynamo.set_guard_complete_hook(deciding)  # type: ignore[arg-type]
    try:
        with astray.record(tmp_path / "run", fast):
            fast(batch())
        assert asked == [True]
    finally:
        assert dynamo.set_guard_complete_hook(None) is deciding
    assert missed(astray.open(tmp_path / "run")) == {"calls inside <root>": 1}


def test_two_recordings_of_one_compiled_model(tmp_path: Path) -> None:
    fast = torch.compile(build(Plain), backend="aot_eager")
    with astray.record(tmp_path / "one", fast) as one, astray.record(tmp_path / "other", fast) as other:

        class Both:
            def step(self) -> None:
                one.step()
                other.step()

        train(fast, fast, Both())
    assert astray.compare(tmp_path / "one", tmp_path / "other").same
    assert missed(astray.open(tmp_path / "one")) == missed(astray.open(tmp_path / "other"))


# -- comparing ---------------------------------------------------------------------------------------------------


def compared(tmp_path: Path, backend: str, way: Way) -> Any:
    model = build(Plain)
    with astray.record(tmp_path / "eager", model, keep="tensors") as rec:
        train(model, model, rec)
    model = build(Plain)
    recorded, call = way(model, backend)
    with astray.record(tmp_path / "compiled", recorded, keep="tensors") as rec:
        train(model, call, rec)
    return astray.compare(tmp_path / "eager", tmp_path / "compiled")


def matched(diff: Any) -> set[tuple[str, str, str]]:
    """Site, role and verdict of what both runs have."""
    found = [diff.pairs.row(index) for index in diff.matched.nonzero()[0].tolist()]
    return {(row["site"], row["role"], row["verdict"]) for row in found}


@pytest.mark.parametrize("way", [wrapped, in_place])
def test_an_eager_and_a_compiled_recording_compare_by_their_boundary(way: Way, tmp_path: Path) -> None:
    diff = compared(tmp_path, "aot_eager", way)
    names = [name for name, _ in build(Plain).named_parameters()]
    assert matched(diff) == {
        ("<root>", "input", "identical"),
        ("<root>", "output", "identical"),
        *((name, "gradient", "identical") for name in names),
    }
    assert diff.first is None


@pytest.mark.slow
def test_with_kernels_of_its_own_a_compiled_recording_differs_by_rounding_at_most(tmp_path: Path) -> None:
    diff = compared(tmp_path, "inductor", wrapped)
    assert {verdict for _, _, verdict in matched(diff)} <= {"identical", "rounding"}
    assert diff.first is None


# -- programs that know nothing of astray ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        "torch.compile(model, backend='aot_eager')",
        pytest.param("model.compile(backend='aot_eager') or model", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_compiles_is_found_and_hears_no_warning(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 4)
            def forward(self, x):
                return torch.relu(self.a(x))
        model = Net()
        fast = {how}
        loss = nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss(fast(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
            optimizer.step(); optimizer.zero_grad()
        """)
    )
    command = [sys.executable, "-W", "error", "-m", "astray", "run", "-o", str(tmp_path / "run"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = astray.open(tmp_path / "run")
    found = [(row["site"], row["type"], row["step"]) for row in rows(run, phase="forward", role="output")]
    assert found == [
        (name, kind, step) for step in (0, 1) for name, kind in (("<root>", "Net"), ("MSELoss", "MSELoss"))
    ]
    assert missed(run) == {"calls inside <root>": 2}
