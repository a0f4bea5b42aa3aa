"""The gradients of Paddle's calls and parameters, against the same calls made again by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import paddle.nn.functional as F  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.autograd import PyLayer  # noqa: E402
from paddle.distributed.fleet.utils import recompute  # noqa: E402

import astray  # noqa: E402
from capture.paddle.paddle_programs import ConvNet, Transformer  # noqa: E402
from recorded_rows import outline, rows  # noqa: E402

pytestmark = pytest.mark.paddle


def by_call(run: Any) -> dict[tuple[Any, ...], dict[tuple[str, str, str], np.ndarray[Any, Any]]]:
    """The kept tensors of each call, by phase, role and path."""
    calls: dict[tuple[Any, ...], dict[tuple[str, str, str], Any]] = {}
    for row in rows(run):
        if row["kind"] in ("module", "function"):
            key = (row["step"], row["micro"], row["site"], row["call"])
            calls.setdefault(key, {})[row["phase"], row["role"], row["path"]] = run.ranks[0].values(row["row"])
    return calls


def arguments_of(run: Any) -> dict[tuple[Any, ...], tuple[str, Any]]:
    """The type and the arguments of each forward call, with the places of its tensors."""
    table = run.ranks[0].calls
    found = {}
    for index in range(len(table)):
        call = table.row(index)
        if call["phase"] == "forward" and call["args"]:
            key = (call["step"], call["micro"], call["site"], call["call"])
            found[key] = call["type"], json.loads(call["args"])
    return found


def again(function: Any, arguments: Any, tensors: dict[str, Any], wanted: set[str]) -> tuple[Any, dict[str, Any]]:
    """Calls a function with its kept inputs. Returns the result, and the inputs whose gradients are asked for."""
    leaves: dict[str, Any] = {}

    def built(shape: Any, path: str) -> Any:
        if shape == "<tensor>":
            leaf = paddle.to_tensor(np.array(tensors[path]))
            leaf.stop_gradient = path not in wanted
            leaves[path] = leaf
            return leaf
        if isinstance(shape, list):
            return [built(item, f"{path}.{i}") for i, item in enumerate(shape)]
        return shape

    args = [built(item, str(i)) for i, item in enumerate(arguments["args"])]
    kwargs = {name: built(item, f"kwargs.{name}") for name, item in arguments.get("kwargs", {}).items()}
    return function(*args, **kwargs), {path: leaf for path, leaf in leaves.items() if path in wanted}


def check_calls(run: Any, layers: dict[str, Any]) -> int:
    """Every gradient that a call has sent is what the call computes from what arrived. Returns how many there were."""
    checked = 0
    spelled = arguments_of(run)
    for key, tensors in by_call(run).items():
        sent = {
            path: value for (phase, role, path), value in tensors.items() if (phase, role) == ("backward", "output")
        }
        arrived = {
            path: value for (phase, role, path), value in tensors.items() if (phase, role) == ("backward", "input")
        }
        if not sent or key not in spelled:
            continue
        kind, arguments = spelled[key]
        inputs = {
            path: value for (phase, role, path), value in tensors.items() if (phase, role) == ("forward", "input")
        }
        home, _, name = kind.rpartition(".")
        if home == "paddle._C_ops":
            function = getattr(paddle._C_ops, name)
        elif home == "paddle.Tensor":
            function = getattr(paddle.Tensor, name)
        else:
            function = layers[key[2]]
        if "setitem" in name or name.endswith("_"):
            continue
        result, leaves = again(function, arguments, inputs, set(sent))
        outputs = (
            {"out": result} if isinstance(result, paddle.Tensor) else {f"out.{i}": r for i, r in enumerate(result)}
        )
        used = {path: output for path, output in outputs.items() if path in arrived}
        gradients = paddle.grad(
            list(used.values()),
            list(leaves.values()),
            [paddle.to_tensor(np.array(arrived[path])) for path in used],
            allow_unused=True,
        )
        for path, gradient in zip(leaves, gradients, strict=True):
            assert gradient is not None, f"{key} {path}"
            np.testing.assert_array_equal(gradient.numpy(), sent[path], err_msg=f"{key} {path}")
            checked += 1
    return checked


def record(path: Path, model: Any, forward: Any, level: str = "module,function") -> Any:
    with astray.record(path, model, level=level, keep="stats,tensors") as recorder:
        for _ in range(2):
            forward().backward()
            recorder.step()
    return astray.open(path)


def test_what_each_call_sends_is_what_it_computes(tmp_path: Path) -> None:
    paddle.seed(0)
    model = Transformer()
    for layer in model.sublayers():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    ids = paddle.randint(0, 32, [2, 8])
    run = record(tmp_path / "run", model, lambda: F.cross_entropy(model(ids).reshape([-1, 32]), ids.reshape([-1])))
    layers = {"<root>": model} | dict(model.named_sublayers())
    assert check_calls(run, layers) > 100


def test_the_same_of_a_convolutional_net(tmp_path: Path) -> None:
    paddle.seed(0)
    model = ConvNet()
    images, labels = paddle.randn([4, 3, 8, 8]), paddle.randint(0, 5, [4])
    images.stop_gradient = False
    run = record(tmp_path / "run", model, lambda: F.cross_entropy(model(images), labels))
    layers = {"<root>": model} | dict(model.named_sublayers())
    assert check_calls(run, layers) > 15


class Branches(nn.Layer):
    """One value with two users, one of which uses it twice; a sum of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        hidden = x * 2.0
        return self.first(hidden) + self.second(hidden) * hidden


def test_shares_of_a_value_with_several_users_are_told_apart(tmp_path: Path) -> None:
    paddle.seed(0)
    model = Branches()
    x = paddle.randn([3, 4])
    x.stop_gradient = False
    run = record(tmp_path / "run", model, lambda: model(x).sum())
    calls = by_call(run)
    layers = {"<root>": model} | dict(model.named_sublayers())
    assert check_calls(run, layers) >= 14
    first, second = (calls[0, 0, site, 0]["backward", "output", "0"] for site in ("first", "second"))
    whole = calls[0, 0, "<root>", 0]["backward", "output", "0"]
    times = calls[0, 0, "<root>/mul", 1]["backward", "output", "1"]
    np.testing.assert_allclose(whole, 2.0 * (first + second + times), rtol=1e-6)


def test_modules_alone_see_what_goes_in_and_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = paddle.randn([3, 4])
    x.stop_gradient = False
    run = record(tmp_path / "run", model, lambda: model(x).sum(), level="module")
    assert outline(run, phase="backward", step=0, kind="module") == [
        "<root> backward input out", "2 backward input out", "2 backward output 0",
        "1 backward input out", "1 backward output 0", "0 backward input out", "<root> backward output 0",
        "0 backward output 0",
    ] or outline(run, phase="backward", step=0, kind="module") == [
        "2 backward input out", "<root> backward input out", "2 backward output 0",
        "1 backward input out", "1 backward output 0", "0 backward input out", "0 backward output 0",
        "<root> backward output 0",
    ]  # fmt: skip
    assert check_calls(run, {"<root>": model} | dict(model.named_sublayers())) == 8


def test_a_result_that_is_an_input_passes_its_gradient_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    run = record(tmp_path / "run", model, lambda: model(paddle.ones([2, 4])).sum(), level="module")
    assert {"1 backward input out", "1 backward output 0"} <= set(outline(run))


def test_several_parts_of_one_result_are_told_apart(tmp_path: Path) -> None:
    class Parts(nn.Layer):
        def forward(self, x: Any) -> Any:
            q, k, v = paddle.split(x, 3, axis=-1)
            return (q - k) * v

    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.parts = Parts()
            self.line = nn.Linear(4, 6)

        def forward(self, x: Any) -> Any:
            return self.parts(self.line(x))

    model = Model()
    run = record(tmp_path / "run", model, lambda: model(paddle.ones([2, 4])).sum())
    assert check_calls(run, dict(model.named_sublayers())) >= 8


class Doubled(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2.0


def missed(path: Path) -> dict[str, str]:
    return {what: why for what, why, _ in json.loads((path / "rank0/end.json").read_text())["missed"]}


def test_what_a_pylayer_sends_is_said_to_be_missed(tmp_path: Path) -> None:
    class Custom(nn.Layer):
        def forward(self, x: Any) -> Any:
            return Doubled.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 1))
    run = record(tmp_path / "run", model, lambda: model(paddle.ones([2, 4])).sum(), level="module")
    assert "1 backward input out" in outline(run)
    assert "1 backward output 0" not in outline(run)
    assert "PyLayer" in missed(tmp_path / "run")["gradients that 1 sends"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_calls_are_marked(reentrant: bool, tmp_path: Path) -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.head = nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.head(recompute(self.block, x, use_reentrant=reentrant))

    model = Model()
    x = paddle.randn([2, 4])
    x.stop_gradient = False
    run = record(tmp_path / "run", model, lambda: model(x).sum(), level="module")
    twice = [(row["recompute"], row["call"]) for row in rows(run, step=0, site="block.0", phase="forward", path="out")]
    assert twice == [(False, 0), (True, 0)]
    # Without a backward of its own, only what the first calls had saved is computed again.
    sent = [row["path"] for row in rows(run, step=0, site="block.2", phase="backward", recompute=reentrant)]
    assert sent == ["out", "0"]
    gradients = rows(run, step=0, site="block.0.weight", role="gradient")
    assert [row["path"] for row in gradients] == ["grad"]


def test_gradients_of_parameters_accumulate(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    x = paddle.ones([2, 3])
    path = tmp_path / "run"
    with astray.record(path, model, keep="tensors") as recorder:
        for _ in range(2):
            for scale in (1.0, 10.0):
                (model(x) * scale).sum().backward()
            model.clear_gradients()
            recorder.step()
    run = astray.open(path)
    found = [
        (row["micro"], row["path"], run.ranks[0].values(row["row"]).ravel().tolist()[0])
        for row in rows(run, step=1, site="weight", role="gradient")
    ]
    assert found == [(0, "grad", 2.0), (1, "added", 20.0), (1, "grad", 22.0)]


def test_hooks_of_the_program_count(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    handle = model.weight.register_hook(lambda gradient: gradient * 3.0)
    path = tmp_path / "run"
    with astray.record(path, model, keep="tensors") as recorder:
        model(paddle.ones([2, 3])).sum().backward()
        recorder.step()
    handle.remove()
    run = astray.open(path)
    (row,) = rows(run, site="weight", role="gradient")
    assert run.ranks[0].values(row["row"]).ravel().tolist() == [6.0] * 3
    assert model.weight.grad.numpy().ravel().tolist() == [6.0] * 3


def test_an_exception_of_a_signal_handler_reaches_the_program(tmp_path: Path) -> None:
    """Not as one of Paddle's, and after the backward pass."""
    import signal

    class Alarm(BaseException):
        pass

    def raise_alarm(*_: object) -> None:
        raise Alarm

    model = nn.Linear(3, 1)
    previous = signal.signal(signal.SIGUSR1, raise_alarm)
    try:
        with astray.record(tmp_path / "run", model) as recorder:
            loss = model(paddle.ones([2, 3])).sum()
            model.weight.register_hook(lambda gradient: signal.raise_signal(signal.SIGUSR1))
            with pytest.raises((Alarm, SystemError, OSError, RuntimeError)):
                loss.backward()
            recorder.step()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_several_recomputed_blocks_are_one_forward(tmp_path: Path) -> None:
    """A backward pass inside the backward pass ends before that does."""
    model = Transformer(blocks=3, recomputed=True)
    ids = paddle.randint(0, 32, [2, 8])
    run = record(tmp_path / "run", model, lambda: model(ids).mean(), level="module")
    again = rows(run, step=1, phase="forward", role="output", recompute=True)
    assert {row["site"] for row in again if row["type"] == "Block"} == {"h.0", "h.1", "h.2"}
    assert {row["micro"] for row in rows(run)} == {0}
