"""The function and op levels: what is recorded, in which order and module, and that the program is unchanged."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, relu  # imported before any recording
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import astray
from recorded_rows import outline, rows
from tensor_oracle import PythonObserver


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + relu(self.fc(self.norm(x)))


def record_step(path: Path, model: nn.Module, x: torch.Tensor, **settings: Any) -> astray.Run:
    with astray.record(path, model, **settings) as rec:
        F.mse_loss(model(x), torch.zeros_like(x)).backward()
        rec.step()
    return astray.open(path)


def calls(run: astray.Run, **wanted: Any) -> list[str]:
    table = run.ranks[0].calls
    found = [table.row(i) for i in range(len(table))]
    return [
        f"{call['kind']} {call['site']} {call['phase']}"
        for call in found
        if all(call[name] == value for name, value in wanted.items())
    ]


def test_functions_are_seen_in_their_modules_however_they_were_imported(tmp_path: Path) -> None:
    run = record_step(tmp_path / "run", nn.Sequential(Block()), torch.randn(3, 4), level="function")
    assert calls(run, phase="forward") == [
        "function 0.norm/layer_norm forward",
        "function 0.fc/linear forward",
        "function 0/relu forward",
        "function 0/add forward",
        "function /zeros_like forward",
        "function /mse_loss forward",
    ]
    assert calls(run, phase="backward", kind="function") == [
        "function /mse_loss backward",
        "function 0/add backward",
        "function 0/relu backward",
        "function 0.fc/linear backward",
        "function 0.norm/layer_norm backward",
    ]
    assert {row["type"] for row in rows(run, site="0.fc/linear")} == {"torch.nn.functional.linear"}


def test_several_levels_share_one_order_and_know_what_encloses_them(tmp_path: Path) -> None:
    levels = ["module", "function", "op"]
    run = record_step(tmp_path / "run", nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4), level=levels)
    assert outline(run, phase="forward")[: outline(run).index("<root> forward output out") + 1] == [
        "<root> forward input 0",
        "0 forward input 0",
        "0 forward parameter weight",
        "0 forward parameter bias",
        "0/linear forward input 0",
        "0/linear forward input 1",
        "0/linear forward input 2",
        "0/aten.t forward input 0",
        "0/aten.t forward output out",
        "0/aten.addmm forward input 0",
        "0/aten.addmm forward input 1",
        "0/aten.addmm forward input 2",
        "0/aten.addmm forward output out",
        "0/linear forward output out",
        "0 forward output out",
        "<root> forward output out",
    ]
    table = run.ranks[0].calls
    by_seq = {table.row(i)["seq"]: table.row(i) for i in range(len(table))}
    chain = ["0/aten.addmm"]
    call = next(call for call in by_seq.values() if call["site"] == "0/aten.addmm")
    while call["parent"] is not None:
        call = by_seq[call["parent"]]
        chain.append(call["site"])
    assert chain == ["0/aten.addmm", "0/linear", "0", "<root>"]


def test_ops_of_the_backward_pass_belong_to_the_module_whose_forward_caused_them(tmp_path: Path) -> None:
    run = record_step(tmp_path / "run", nn.Sequential(Block()), torch.randn(3, 4), level="op")
    backward = calls(run, phase="backward", kind="op")
    assert "op 0.norm/aten.native_layer_norm_backward backward" in backward
    assert "op 0/aten.threshold_backward backward" in backward
    assert backward.count("op 0.fc/aten.mm backward") == 2
    assert "op /aten.mse_loss_backward backward" in backward


def test_no_function_is_replaced_and_nothing_remains(tmp_path: Path) -> None:
    before = F.gelu, torch.relu, torch.Tensor.add, torch.Tensor.__add__
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level=["function", "op"]):
        assert (F.gelu, torch.relu, torch.Tensor.add, torch.Tensor.__add__) == before
        assert all(now is then for now, then in zip((F.gelu, torch.relu), before, strict=False))
        assert pickle.loads(pickle.dumps(F.gelu)) is F.gelu
        assert len(_get_current_function_mode_stack()) == 1
    assert not _get_current_function_mode_stack()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("level", ["function", "op"])
def test_nothing_remains_after_an_exception_and_it_is_noted(level: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), astray.record(tmp_path / "run", nn.Linear(2, 2), level=level):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert not _get_current_function_mode_stack()
    assert not _get_current_dispatch_mode_stack()
    missed = astray.open(tmp_path / "run").ranks[0].end.missed
    assert ("the output of /mm" if level == "function" else "the output of /aten.mm") in {one.what for one in missed}


def test_modes_of_others_keep_their_place_when_steps_are_left_out(tmp_path: Path) -> None:
    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = nn.Linear(2, 2)
    below = Other()
    with below, astray.record(tmp_path / "run", model, level="function", steps="1") as rec:
        inside = Other()
        with inside:
            assert _get_current_function_mode_stack() == [below, inside]  # step 0 is not recorded
            model(torch.ones(1, 2))
            rec.step()
            assert len(_get_current_function_mode_stack()) == 3
            assert _get_current_function_mode_stack()[0] is below
            assert _get_current_function_mode_stack()[2] is inside
            model(torch.ones(1, 2))
        rec.step()
        assert _get_current_function_mode_stack() == [below]
    run = astray.open(tmp_path / "run")
    assert run.steps == [1]


def test_an_in_place_function_has_its_input_before_and_its_output_after(tmp_path: Path) -> None:
    x = torch.full((2, 3), -2.0)
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function"):
        x.relu_()
        x[0] = 5.0
        x.data.add_(1.0)  # past the version counter
        x.data.mul_(2.0)
    run = astray.open(tmp_path / "run")
    means = [(row["site"], row["role"], row["path"], row["mean"]) for row in rows(run)]
    assert means == [
        ("/relu_", "input", "0", -2.0),
        ("/relu_", "output", "out", 0.0),
        ("/setitem", "input", "0", 0.0),
        ("/setitem", "output", "out", 2.5),
        ("/add_", "input", "0", 2.5),
        ("/add_", "output", "out", 3.5),
        ("/mul_", "input", "0", 3.5),
        ("/mul_", "output", "out", 7.0),
    ]


def test_views_of_one_memory_are_measured_and_stored_once(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function", keep="tensors"):
        y = x.view(-1).reshape(32, 128).unsqueeze(0)
        y.flatten()
        x.t()
    run = astray.open(tmp_path / "run")
    end = run.ranks[0].end
    assert end is not None
    assert end.value_bytes == 2 * x.numel() * 4  # as it lies, and transposed
    shapes = [(row["path"], row["shape"]) for row in rows(run, site="/reshape")]
    assert shapes == [("0", (4096,)), ("out", (32, 128))]
    (flat,) = rows(run, site="/flatten", role="output")
    assert (run.values(0, flat["row"]) == x.flatten().numpy()).all()


def test_functions_that_a_custom_backward_calls_are_of_the_backward_phase(tmp_path: Path) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return torch.mul(gradient, 2)

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x)

    run = record_step(tmp_path / "run", nn.Sequential(Doubling()), torch.ones(2, requires_grad=True), level="function")
    assert calls(run, site="0/mul") == ["function 0/mul forward", "function 0/mul backward"]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["function", "op"])
def test_functions_run_again_for_the_backward_are_marked_and_numbered_apart(
    level: str, reentrant: bool, tmp_path: Path
) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, checkpoint(torch.tanh, x, use_reentrant=reentrant), use_reentrant=reentrant)

    x = torch.ones(2, 4, requires_grad=True)
    run = record_step(tmp_path / "run", Saving(), x, level=level)
    names = {"function": ("<root>/tanh", "inner.fc/linear"), "op": ("<root>/aten.tanh", "inner.fc/aten.addmm")}[level]
    table = run.ranks[0].calls
    for name in names:
        found = [table.row(i) for i in range(len(table)) if table.row(i)["site"] == name]
        forward = [(call["call"], call["recompute"]) for call in found if call["phase"] == "forward"]
        assert forward == [(0, False), (0, True)]


def test_only_the_functions_of_a_users_list(tmp_path: Path) -> None:
    listed = tmp_path / "functions.yaml"
    listed.write_text("functional:\n  - linear\ntensor:\n  - add\n  - item\n")
    run = record_step(
        tmp_path / "run", nn.Sequential(Block()), torch.randn(3, 4), level="function", functions=str(listed)
    )
    assert calls(run, phase="forward") == ["function 0.fc/linear forward", "function 0/add forward"]


def test_two_recordings_of_two_models_see_only_their_own_functions(tmp_path: Path) -> None:
    one, two = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Tanh())
    with (
        astray.record(tmp_path / "one", one, level=["module", "function"]),
        astray.record(tmp_path / "two", two, level=["module", "function"]),
    ):
        torch.exp(two(one(torch.ones(1, 2))))
    assert calls(astray.open(tmp_path / "one"))[1:] == [
        "module <root> forward",
        "module 0 forward",
        "function 0/linear forward",
        "function /exp forward",
    ]
    assert calls(astray.open(tmp_path / "two"))[1:] == [
        "module <root> forward",
        "module 0 forward",
        "function 0/tanh forward",
        "function /exp forward",
    ]


def test_what_only_tells_about_a_tensor_is_not_a_call(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function"):
        x.size(), x.dim(), x.shape, x.is_contiguous(), x.sum().item(), len(x), torch.is_tensor(x), x.requires_grad
        torch.empty(3), x.new_empty(2)
    assert calls(astray.open(tmp_path / "run")) == ["function /sum forward"]


@pytest.mark.parametrize("level", [["function"], ["op"], ["function", "op"]])
def test_marks_for_a_profiler_are_no_calls(level: list[str], tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model, level=level), torch.profiler.record_function("mine"):
        model(torch.ones(1, 2))
    assert [one for one in calls(astray.open(tmp_path / "run")) if "record_function" in one] == []


def test_functions_that_return_nothing_give_what_they_have_written(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with astray.record(tmp_path / "run", model, level="function") as rec:
        for factor in (1e30, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            rec.step()
    found = rows(astray.open(tmp_path / "run"), site="/_amp_foreach_non_finite_check_and_unscale_", role="output")
    assert [(row["step"], row["path"], row["shape"]) for row in found] == [
        (step, path, shape) for step in (0, 1) for path, shape in (("out.0", (2, 2)), ("out.1", (2,)), ("out.2", ()))
    ]
    assert [row["max"] for row in found if row["shape"] == ()] == [1, 0]  # whether infinity was found
    assert [row["max"] for row in found if row["shape"] == (2,)] == [None, 1]  # unscaled gradients


def test_random_numbers_are_outputs_of_the_function_that_draws_them(tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function"):
        torch.manual_seed(3)
        torch.randn(4)
    run = astray.open(tmp_path / "run")
    (row,) = rows(run, site="/randn")
    assert (row["role"], row["shape"]) == ("output", (4,))


@pytest.mark.parametrize("level", ["function", "op"])
def test_a_buffer_that_something_else_fills_is_read_again(level: str, tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level=level):
        buffer = torch.zeros(3)
        buffer.numpy()[:] = 7.0  # as a kernel of the user's own would
        torch.exp(buffer)
    (row,) = rows(astray.open(tmp_path / "run"), site="/exp" if level == "function" else "/aten.exp", role="input")
    assert row["mean"] == 7.0


@pytest.mark.parametrize(("level", "prefix"), [("function", "/"), ("op", "/aten.")])
def test_memory_is_read_once_it_has_been_filled(level: str, prefix: str, tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level=level):
        whole = torch.empty(4)
        whole.copy_(torch.ones(4))
        torch.exp(torch.full((4,), 3.0), out=torch.empty(4))
        halves = torch.empty(4)
        halves[:2].fill_(1.0)
        halves[2:].fill_(2.0)
        halves.sum()
    run = astray.open(tmp_path / "run")
    assert [(row["path"], row["mean"]) for row in rows(run, site=f"{prefix}copy_")] == [("1", 1.0), ("out", 1.0)]
    assert [row["path"] for row in rows(run, site=f"{prefix}exp")] == ["0", "out"]
    assert [(row["path"], row["note"]) for row in rows(run, site=f"{prefix}fill_")] == [
        ("out", "only a part of it has been filled yet")
    ] * 2
    assert rows(run, site=f"{prefix}sum", role="input")[0]["mean"] == 1.5


def test_memory_is_filled_by_a_function_that_gets_it_by_name(tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function"):
        nn.init.constant_(tensor=torch.empty(4), val=2.0)
    found = [(row["role"], row["mean"]) for row in rows(astray.open(tmp_path / "run")) if row["site"] == "/constant_"]
    assert found == [("output", 2.0)]


def test_ops_that_the_backward_pass_makes_are_no_functions_too(tmp_path: Path) -> None:
    run = record_step(tmp_path / "run", nn.Sequential(Block()), torch.randn(3, 4), level=["function", "op"])
    assert not [call for call in calls(run, kind="function") if "aten" in call]
    assert len(calls(run, site="0.fc/aten.mm")) == 2


def test_one_name_has_one_numbering(tmp_path: Path) -> None:
    x = torch.ones(2)
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level=["function", "op"]):
        torch.add(x, x)
        x.add(1.0)
        x + x
    run = astray.open(tmp_path / "run")
    assert [row["call"] for row in rows(run, site="/add", role="output")] == [0, 1, 2]
    assert [row["call"] for row in rows(run, site="/aten.add", role="output")] == [0, 1, 2]


@pytest.mark.parametrize("broken", ["observe_unread", "written"])
def test_a_failure_of_ours_leaves_no_call_open(broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function") as rec:
        engine = rec._engine
        observer = PythonObserver(engine.tensors)
        setattr(observer, broken, lambda *_: 1 / 0)
        engine._set_observer(observer)
        x = torch.ones(2)
        x.add_(1.0)
        engine._set_observer(engine.tensors.native)
        torch.exp(x)
    run = astray.open(tmp_path / "run")
    assert {row["parent"] for row in rows(run, site="/exp")} == {None}
    assert "ZeroDivisionError" in caplog.text
    assert torch.equal(x, torch.full((2,), 2.0))
