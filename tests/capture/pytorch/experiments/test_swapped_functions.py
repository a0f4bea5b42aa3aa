"""`astray.experiment.swap` of functions of torch and ops: inside modules and outside of them, forward and backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import astray
from astray.experiment import swap
from recorded_rows import rows


class Squared(nn.Module):
    """Two products, whose ops are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(60, 60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ self.weight, -1) @ self.weight


class SeenOps(TorchDispatchMode):
    """The dtypes of the inputs of each op that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, list[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        self.dtypes.setdefault(str(func).rpartition(".")[0], []).extend(floating[:1])
        return func(*args, **(kwargs or {}))


def stacks() -> tuple[int, int]:
    """How many modes are on."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def test_other_modes_see_the_tensors_of_the_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Squared(), Squared())
    x = torch.randn(5, 60, requires_grad=True)
    modes = stacks()
    with SeenOps() as seen, swap(model, "1/aten.mm", to="float64"):
        model(x).sum().backward()
    assert stacks() == modes
    assert seen.dtypes["aten.mm"] == [torch.float32] * 12  # two products in each module, each with two gradients
    assert torch.float64 not in {dtype for dtypes in seen.dtypes.values() for dtype in dtypes}


def test_an_op_computes_at_the_destination_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer = Squared()
    x = torch.randn(5, 60, requires_grad=True)
    h = torch.softmax((x.double() @ layer.weight.double()).float(), -1).detach()
    with swap(layer, "<root>/aten.mm", to="float64"):
        y = layer(x)
        y.sum().backward()
    assert torch.equal(y, (h.double() @ layer.weight.double()).float())
    ones = torch.ones(5, 60, dtype=torch.float64)
    down = (ones @ layer.weight.double().T).float()
    soft = torch.ops.aten._softmax_backward_data(down, h, -1, torch.float32)
    assert torch.equal(x.grad, (soft.double() @ layer.weight.double().T).float())
    expected = (h.double().T @ ones).float() + (x.detach().double().T @ soft.double()).float()
    assert torch.equal(layer.weight.grad, expected)


def test_ops_by_a_regular_expression_in_all_modules_and_outside() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    x = torch.randn(4, 300)

    def exact(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.double(), layer.weight.double(), layer.bias.double()).float()

    with swap(model, r"\d/aten\.(addmm|mm)", to="float64"):
        assert torch.equal(model(x), exact(model[1], exact(model[0], x)))
        assert not torch.equal(x @ x.T, (x.double() @ x.double().T).float())
    with swap(None, "/aten.mm", to="float64"):
        assert torch.equal(x @ x.T, (x.double() @ x.double().T).float())


def test_functions_outside_of_modules_and_only_there() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 300)
    exact = torch.softmax(x.double(), -1).float()
    layer, modes = nn.Softmax(-1), stacks()
    for model in (None, layer):
        with swap(model, "/softmax", to="float64"):
            assert torch.equal(torch.softmax(x, -1), exact)
            assert torch.equal(x.softmax(-1), exact)
            assert not torch.equal(layer(x), exact)
            assert not torch.equal(torch.log_softmax(x, -1), torch.log_softmax(x.double(), -1).float())
        assert stacks() == modes
        with pytest.warns(UserWarning, match="/softmax was not swapped"), swap(model, "/softmax", to="float64"):
            layer(x)


def test_a_function_that_a_callable_replaces() -> None:
    def doubled(x: torch.Tensor, dim: int, *, original: Any) -> torch.Tensor:
        return 2 * original(x, dim)

    x = torch.randn(3, 4)
    with swap(None, "/softmax", to=doubled):
        found = torch.softmax(x, -1)
    assert torch.equal(found, 2 * torch.softmax(x, -1))


def test_a_checkpointed_module_computes_its_function_again_at_the_destination() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Squared()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Net()
    x = torch.randn(5, 60)
    for what in ("inner/softmax", "inner/matmul"):
        model.zero_grad()
        with swap(model, what, to="float64"):
            model(x).sum().backward()
        checkpointed = model.inner.weight.grad.clone()
        model.zero_grad()
        with swap(model, what, to="float64"):
            model.inner(x).sum().backward()
        assert torch.equal(model.inner.weight.grad, checkpointed)


@pytest.mark.parametrize("what", ["/linear", "<root>/linear", r".*/linear", "layers.0.linear1"])
def test_torch_stays_on_its_fast_path_for_inference(what: str) -> None:
    """A mode that is on makes it leave it, for kernels that round differently."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        with pytest.warns(UserWarning, match="was not swapped"), swap(model, what, to="float32"):
            assert torch.equal(model(x), plain)
    with swap(model, r".*linear1/linear", to="float64"):  # and is swapped where there is none
        assert not torch.equal(model(x), plain)


def test_modes_are_off_again_after_an_exception() -> None:
    def fail(*_args: Any) -> None:
        raise ArithmeticError

    model, modes = Squared(), stacks()
    for what in ("/softmax", "<root>/softmax", "<root>/aten.mm", "/aten._softmax"):
        with pytest.raises(ArithmeticError), swap(model, what, to=fail):
            model(torch.softmax(torch.ones(1, 60), -1))
        assert stacks() == modes
        assert "forward" not in vars(model)


def test_several_modes_end_in_any_order() -> None:
    x = torch.randn(4, 300)
    seen: list[str] = []

    class Own(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    modes = stacks()
    first, second = swap(None, "/softmax", to="float64"), swap(None, "/log_softmax", to="float64")
    first.__enter__()
    with Own():
        second.__enter__()
        both = torch.softmax(x, -1), torch.log_softmax(x, -1)
        first.__exit__(None, None, None)
        alone = torch.softmax(x, -1), torch.log_softmax(x, -1)
    second.__exit__(None, None, None)
    assert stacks() == modes
    exact = torch.softmax(x.double(), -1).float(), torch.log_softmax(x.double(), -1).float()
    assert all(map(torch.equal, both, exact))
    assert torch.equal(alone[1], exact[1])
    assert not torch.equal(alone[0], exact[0])
    assert seen.count("softmax") == 2  # once each, with what the program has


def test_another_thread_computes_as_before() -> None:
    x = torch.randn(4, 300)
    with ThreadPoolExecutor() as pool, swap(None, "/softmax", to="float64"):
        results = [torch.softmax(x, -1), pool.submit(torch.softmax, x, -1).result()]
    assert not torch.equal(*results)
    assert torch.equal(results[1], torch.softmax(x, -1))


def test_a_recording_sees_the_tensors_of_the_program(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Squared()
    x = torch.randn(5, 60)
    with (
        astray.record(tmp_path / "run", model, level=["module", "function", "op"]),
        swap(model, ["<root>/softmax", "<root>/aten.mm"], to="float64"),
    ):
        model(x).sum().backward()
    recorded = rows(astray.open(tmp_path / "run"))
    assert {row["dtype"] for row in recorded if row["kind"] in ("module", "function")} == {"float32"}
    assert {row["dtype"] for row in recorded if row["site"].endswith("aten.mm")} == {"float32"}
