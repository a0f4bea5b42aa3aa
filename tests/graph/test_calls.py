"""Which call lies in which, and whose backward and whose gradient is which, micro step by micro step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import astray
from astray.graph import CallTree, graph_of
from record_builders import Builder


def tree_of(builder: Builder) -> CallTree:
    return CallTree(builder.run.ranks[0].calls)


def test_a_backward_call_lies_in_the_backward_of_what_is_around_its_forward() -> None:
    builder = Builder()
    root = builder.call("<root>")
    block = builder.call("block", parent=root)  # that has no backward of its own
    fc = builder.call("block.fc", parent=block)
    linear = builder.call("block.fc/linear", kind="function", parent=fc)
    back_linear = builder.call("block.fc/linear", kind="function", phase="backward", parent=linear)
    back_fc = builder.call("block.fc", phase="backward", parent=fc)
    back_root = builder.call("<root>", phase="backward", parent=root)
    tree = tree_of(builder)
    assert tree.parent.tolist() == [-1, 0, 1, 2, linear, fc, root]
    assert tree.enclosings.tolist() == [-1, root, block, fc, back_fc, back_root, -1]
    assert [tree.backward_of(call) for call in (root, block, fc, linear)] == [back_root, None, back_fc, back_linear]
    assert tree.around(linear) == tree.around(back_linear) == [root, block, fc]
    assert tree.is_inside(back_linear, back_root)
    assert tree.is_inside(linear, root)
    assert not tree.is_inside(root, linear)


def test_a_backward_op_lies_in_the_module_whose_code_made_its_node() -> None:
    builder = Builder()
    root = builder.call("<root>")
    fc = builder.call("fc", parent=root)
    op = builder.call("fc/aten.mm", kind="op", phase="backward", parent=fc)
    back = builder.call("fc", phase="backward", parent=fc)
    tree = tree_of(builder)
    assert (tree.enclosing(op), tree.around(op), tree.backward_of(fc)) == (back, [root, fc], back)


def test_a_gradient_belongs_to_its_module_in_the_same_micro_step() -> None:
    builder = Builder()
    for micro in range(2):
        root = builder.call("<root>", micro=micro)
        builder.call("fc", micro=micro, parent=root)
    gradient = builder.call("fc.weight", kind="parameter", phase="backward", micro=1)
    bias = builder.call("bias", kind="parameter", phase="backward", micro=1)
    unowned = builder.call("gone.weight", kind="parameter", phase="backward", micro=1)
    tree = tree_of(builder)
    assert [tree.owner(call) for call in (gradient, bias, unowned)] == [3, 2, None]
    assert tree.around(gradient) == [2, 3]


def test_a_gradient_of_no_such_micro_step_belongs_to_the_last_call_that_was_trained() -> None:
    builder = Builder()
    for micro in range(3):
        builder.call("fc", micro=micro)
    builder.call("fc", phase="backward", parent=1, micro=1)
    gradient = builder.call("fc.weight", kind="parameter", phase="backward", micro=7)
    tree = tree_of(builder)
    assert tree.owner(gradient) == 1


def test_a_damaged_parent_leads_nowhere() -> None:
    builder = Builder()
    builder.call("a", seq=0, parent=99)
    builder.call("b", seq=1, parent=1)
    tree = CallTree(builder.run.ranks[0].calls)
    assert (tree.parent.tolist(), tree.around(1)) == ([-1, -1], [])
    assert CallTree(Builder().run.ranks[0].calls).enclosings.tolist() == []


def test_a_call_that_is_repeated_lies_where_it_lay_the_first_time() -> None:
    builder = Builder()
    root = builder.call("<root>")
    block = builder.call("block", parent=root)
    builder.call("block.fc", parent=block)
    again = builder.call("block", recompute=True)
    builder.call("block.fc", parent=again, recompute=True)
    builder.call("lost", recompute=True)
    assert tree_of(builder).enclosings.tolist() == [-1, root, block, root, again, -1]


class Trained(nn.Module):
    """Has a step for training and one for validation, as Lightning's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def sites(graph: Any, calls: list[int]) -> list[str]:
    return [f"{graph.calls['site'][call]}#{graph.calls.numbers('micro')[call]}" for call in calls]


def test_a_validation_pass_first_has_no_part_in_the_gradients(tmp_path: Path) -> None:
    model = Trained()
    with astray.record(tmp_path / "run", model, level="module,function") as rec:
        with torch.no_grad():
            model(torch.randn(2, 4))  # validation
        for _ in range(2):  # gradient accumulation
            model(torch.randn(2, 4)).sum().backward()
        rec.step()
    graph = graph_of(astray.open(tmp_path / "run").ranks[0])
    calls = graph.calls
    for call in range(len(calls)):
        micro = int(calls.numbers("micro")[call])
        if calls["phase"][call] == "backward":
            assert {int(calls.numbers("micro")[one]) for one in graph.around(call)} <= {micro}
            assert micro in (1, 2)
        if calls["kind"][call] == "parameter":
            owner = graph.owner(call)
            assert owner is not None
            assert sites(graph, graph.around(call)) == [
                f"<root>#{micro}",
                f"net#{micro}",
                f"{calls['site'][owner]}#{micro}",
            ]
            assert graph.backward_of(owner) is not None


def test_recomputed_calls_lie_where_they_lay_the_first_time(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Model()
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        rec.step()
    graph = graph_of(astray.open(tmp_path / "run").ranks[0])
    again = [call for call in range(len(graph.calls)) if graph.calls.numbers("recompute")[call]]
    blocks = [call for call in again if graph.calls["site"][call] == "block"]
    assert len(blocks) == 2
    for call in blocks:
        assert sites(graph, graph.around(call)) == [f"<root>#{graph.calls.numbers('micro')[call]}"]
