"""Functions as msprobe names and shows them: operators, arguments as they were given, gradients of the last node."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import astray
from astray.compat.msprobe import PrecisionDebugger
from msprobe_parts import batches, debugging, names, network, read, train


def dumped(tmp_path: Path, program: Callable[[], object], **settings: Any) -> dict[str, Any]:
    """The entries of a program."""
    with debugging(**({"level": "L1", "dump_path": tmp_path / "dump"} | settings)) as debugger:
        debugger.start()
        program()
        debugger.stop()
    found: dict[str, Any] = read(tmp_path / "dump" / "step0" / "rank")["data"]
    return found


def called(tmp_path: Path, program: Callable[[], object]) -> list[str]:
    """What was called, without numbers."""
    return [name.rsplit(".", 2)[0] for name in dumped(tmp_path, program) if name.endswith(".forward")]


class Scaled:
    def __init__(self) -> None:
        self.by = 3.0


def test_operators_are_named_by_what_was_written(tmp_path: Path) -> None:
    x, y, half, scaled = torch.ones(2), torch.ones(2), 0.5, Scaled()

    def program() -> None:
        z = x + y
        z = x + 1
        z = 1 + x
        z = half * x
        z = x * half
        z = scaled.by * F.relu(x)
        z = (half if x is y else 2) * x
        z = math_of(half) * x
        z = x - 1
        z = 1 - x
        z = x / 2
        z = x @ y
        z = x**2
        z = x % 2
        z += 1
        z -= half
        z *= y
        z.add_(1)
        z = x.add(1)
        z = x.__add__(1)
        z = torch.add(x, 1)
        _ = x < 1, x > 1, x != 1, x == 1, -x, x.neg(), abs(x)
        z = sum([x, y])  # type: ignore[assignment]
        z = operator.mul(x, y)
        z = functools.reduce(torch.Tensor.add, [x, y])

    relu = "Functional.relu"
    assert called(tmp_path, program) == [
        *(f"Tensor.__{name}__" for name in ("add", "add", "radd", "rmul", "mul")), relu,
        *(f"Tensor.__{name}__" for name in ("rmul", "rmul", "rmul", "sub", "rsub", "truediv", "matmul", "pow", "mod")),
        *(f"Tensor.__{name}__" for name in ("iadd", "isub", "imul")),
        "Tensor.add_", "Tensor.add", "Tensor.__add__", "Torch.add",
        *(f"Tensor.__{name}__" for name in ("lt", "gt", "ne", "eq", "neg")), "Tensor.neg", "Tensor.__abs__",
        "Tensor.__radd__", "Tensor.__add__", "Tensor.__mul__", "Tensor.add",
    ]  # fmt: skip


def math_of(number: float) -> float:
    return number


def test_what_is_summed_up_from_zero_changes_its_operator(tmp_path: Path) -> None:
    """One line, first with a number on the left and then with a tensor."""

    def program() -> None:
        total: Any = 0
        for _ in range(3):
            total += torch.ones(2).exp()

    found = [name for name in called(tmp_path, program) if name.startswith("Tensor.__")]
    assert found == ["Tensor.__radd__", "Tensor.__iadd__", "Tensor.__iadd__"]


def test_operators_of_torchs_own_code_are_operators(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], foreach=False)
    weight.sum().backward()
    found = called(tmp_path, optimizer.step)
    assert "Tensor.__iadd__" in found
    assert "Tensor.add_" in found
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    found = called(tmp_path / "layer", lambda: layer(torch.ones(1, 3, 4)))
    assert found.count("Tensor.__add__") == 2


def test_one_over_x_is_what_msprobe_sees_in_it(tmp_path: Path) -> None:
    x = torch.ones(2)
    found = called(tmp_path, lambda: 2 / x)
    assert found == ["Tensor.reciprocal", "Tensor.__mul__"]


def test_arguments_are_as_they_were_given(tmp_path: Path) -> None:
    x, act = torch.ones(2, 4), F.relu
    image = torch.ones(1, 1, 4, 4)

    def program() -> None:
        F.relu(x)
        act(x, True)
        F.softmax(x, dim=-1)
        F.softmax(input=x, dim=-1)
        F.layer_norm(x, (4,), torch.ones(4), eps=1e-3)
        F.max_pool2d(image, 2, stride=1)
        x.split(1)
        x.reshape(x.shape)
        list(map(F.relu, [x]))  # nothing says how it was given: as torch hands it on

    found = dumped(tmp_path, program)
    tensor = "<tensor>"

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and "dtype" in value:
            return tensor
        if isinstance(value, list):
            return [plain(one) for one in value]
        return value["value"] if isinstance(value, dict) else value

    given = {
        name: (plain(entry["input_args"]), {word: plain(one) for word, one in entry["input_kwargs"].items()})
        for name, entry in found.items()
    }
    assert given["Functional.relu.0.forward"] == ([tensor], {})
    assert given["Functional.relu.1.forward"] == ([tensor, True], {})
    assert given["Functional.softmax.0.forward"] == ([tensor], {"dim": -1})
    assert given["Functional.softmax.1.forward"] == ([], {"input": tensor, "dim": -1})
    assert given["Functional.layer_norm.0.forward"] == ([tensor, [4], tensor], {"eps": 1e-3})
    assert given["Functional.max_pool2d.0.forward"] == ([tensor, 2], {"stride": 1})
    assert given["Tensor.split.0.forward"] == ([tensor, 1], {})
    assert found["Tensor.reshape.0.forward"]["input_args"][1] == {"type": "torch.Size", "value": [2, 4]}
    assert given["Functional.relu.2.forward"] == ([tensor], {"inplace": False})


def test_what_makes_a_leaf_has_no_backward(tmp_path: Path) -> None:
    def program() -> None:
        weight = torch.zeros(2, requires_grad=True)
        nn.init.ones_(weight)
        with torch.no_grad():
            weight.normal_()
        rows = torch.zeros(2, 2) * weight
        rows[0] = 1.0
        F.dropout(rows, 0.0).sum().backward()

    backward = {name for name in dumped(tmp_path, program) if name.endswith(".backward")}
    assert backward == {"Tensor.__mul__.0.backward", "Tensor.sum.0.backward"}


def test_a_backward_has_the_gradients_of_the_last_node_and_the_arguments_own(tmp_path: Path) -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (4, 4), (4,)))

    def program() -> None:
        y = F.linear(x, weight, bias)
        torch.where(y > 0, y, 2 * y).sum().backward()

    found = dumped(tmp_path, program, task="tensor")
    where = found["Torch.where.0.backward"]
    assert [leaf and leaf["shape"] for leaf in where["output"]] == [[3, 4], [3, 4]]
    assert "gradients" not in where  # both are of the node
    product = found["Tensor.__rmul__.0.backward"]
    assert [leaf and leaf["shape"] for leaf in product["output"]] == [[3, 4], None]  # of the number there is none
    linear = found["Functional.linear.0.backward"]
    assert [leaf["shape"] for leaf in linear["output"]] == [[4], [3, 4], [4, 4]]  # bias, input, and a transposed weight
    assert list(linear["gradients"]) == ["1"]
    run = astray.open(tmp_path / "dump").ranks[0]
    calls, own = run.calls, {}
    for at, call in enumerate(run.call_rows.tolist()):
        row = run.tensors.row(at)
        if (calls.row(call)["site"], row["role"]) == ("/linear", "output") and calls.row(call)["phase"] == "backward":
            own[row["path"]] = torch.from_numpy(run.values(at).copy())
    assert {*own} == {"0", "1", "2", "node.2"}
    for path, tensor in (("0", x), ("1", weight), ("2", bias)):
        assert torch.equal(own[path], tensor.grad)  # type: ignore[arg-type]


def test_a_dump_has_the_keys_of_a_recording(tmp_path: Path) -> None:
    """What msprobe's form turns round is turned back when it is read."""

    def program(model: nn.Module) -> None:
        x = batches(1)[0]
        y = 0.5 * F.layer_norm(model(x), (2,), torch.ones(2, requires_grad=True))
        y += 1 / (1 + y.exp())
        F.cross_entropy(input=y, target=torch.zeros(10, dtype=torch.long)).backward()

    model = network()
    with debugging(level="mix", dump_path=tmp_path / "dump") as debugger:
        debugger.start(model)
        program(model)
        debugger.stop()
    with astray.record(tmp_path / "run", model, level=["module", "function"], phases=["forward", "backward"]) as run:
        program(model)
        run.step()
    found, expected = (keys(astray.open(tmp_path / name)) for name in ("dump", "run"))
    extra = {key for key in found - expected if not key[-1].startswith("node.") and not key[2].startswith("<root>")}
    # msprobe sees the reciprocal and the product in what is one function to astray.
    assert {key[2].rpartition("/")[2] for key in extra} <= {"reciprocal", "mul"}
    missing = {key for key in expected - found if not key[2].startswith("<root>") and key[-2] != "state"}
    assert {key[2].rpartition("/")[2] for key in missing if key[4] == "forward"} == {"rdiv"}
    assert {key[2].rpartition("/")[2] for key in missing} == {"rdiv", "ones"}  # a creator has no backward there


def keys(run: Any) -> set[tuple[Any, ...]]:
    rank = run.ranks[0]
    found = set()
    for at, call in enumerate(rank.call_rows.tolist()):
        of, row = rank.calls.row(call), rank.tensors.row(at)
        if of["kind"] in ("module", "function"):
            found.add((of["step"], of["kind"], of["site"], of["call"], of["phase"], row["role"], row["path"]))
    return found


def test_a_wrapped_model_has_the_names_of_torch(tmp_path: Path) -> None:
    """As DistributedDataParallel, which takes processes, so does DataParallel call what it wraps `module`."""
    model = nn.DataParallel(network())
    with debugging(level="L0", dump_path=tmp_path / "dump") as debugger:
        train(debugger, model, at=model)
    found = names(tmp_path / "dump" / "step0" / "rank")
    assert "Module.module.ModuleOP.forward.0" in found
    assert "Module.module.linear_1.Linear.backward.0" in found
    assert "Module.module.linear_1.Linear.parameters_grad.0" in found
    with debugging(level="L0", dump_path=tmp_path / "bare") as debugger:
        train(debugger, model.module, at=model.module)
    wrapped, bare = (keys(astray.open(tmp_path / name)) for name in ("dump", "bare"))
    assert bare <= wrapped


def test_recurrent_functions_have_the_prefix_of_their_own(tmp_path: Path) -> None:
    lstm = nn.LSTM(2, 3)
    found = called(tmp_path, lambda: lstm(torch.ones(4, 1, 2)))
    assert "VF.lstm" in found
    rank = astray.open(tmp_path / "dump").ranks[0]
    assert "torch.lstm" in rank.calls["type"]


def test_no_hook_stays_on_a_graph(tmp_path: Path) -> None:
    x = torch.ones(2, 3, 4, requires_grad=True)
    with debugging(level="L1", dump_path=tmp_path / "dump") as debugger:
        debugger.start()
        y = F.linear(x, torch.ones(5, 4)).exp()
        debugger.stop()
    assert isinstance(debugger, PrecisionDebugger)
    before = read(tmp_path / "dump" / "step0" / "rank")["data"]
    y.sum().backward()  # of the graph that is still there
    assert read(tmp_path / "dump" / "step0" / "rank")["data"] == before


def test_bits_of_a_training_are_its_own(tmp_path: Path) -> None:
    def trained(debugger: PrecisionDebugger | None) -> list[torch.Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for x in batches(3):
            if debugger is not None:
                debugger.start(model)
            y = model(x)
            loss = (0.5 * y + 1 / (2 + y.exp())).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if debugger is not None:
                debugger.stop()
                debugger.step()
        return [weight.detach().clone() for weight in model.parameters()]

    bare = trained(None)
    with debugging(level="mix", dump_path=tmp_path / "dump") as debugger:
        watched = trained(debugger)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
