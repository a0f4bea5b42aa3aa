"""Where the value of a row came from and where it went: hand-built rows, and what small programs record."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.graph import Graph, graph_of
from record_builders import Builder


@pytest.fixture(params=["recorded", "derived"])
def numbered(request: pytest.FixtureRequest) -> bool:
    """Whether rows say which value they are, or it has to be found out by their bits."""
    return bool(request.param == "recorded")


def array(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape or (3, 4)).astype(np.float32)


class Rows:
    """A hand-built rank, where a value is a number from which its elements are drawn."""

    def __init__(self, numbered: bool, keep: str = "stats,fingerprint") -> None:
        self.builder = Builder(keep=keep)
        self._numbered = numbered
        self.count = 0

    def call(self, site: str, takes: dict[str, int], gives: dict[str, int] | None = None, **rest: Any) -> int:
        seq = self.builder.call(site, **rest)
        for path, value in takes.items():
            self.row(seq, "parameter" if path in ("weight", "bias") else "input", path, value)
        for path, value in (gives or {}).items():
            self.row(seq, "output", path, value)
        return int(seq)

    def row(self, seq: int, role: str, path: str, value: int, elements: np.ndarray | None = None) -> int:
        elements = array(value) if elements is None else elements
        self.builder.tensor(seq, role, path, elements, **({"value": value} if self._numbered else {}))
        self.count += 1
        return self.count - 1

    @property
    def graph(self) -> Graph:
        return graph_of(self.builder.run.ranks[0])


def test_the_innermost_result_made_it(numbered: bool) -> None:
    rows = Rows(numbered)
    root = rows.call("<root>", {"0": 1})
    fc = rows.call("fc", {"0": 1, "weight": 2}, parent=root)
    rows.call("fc/linear", {"0": 1, "1": 2}, {"out": 3}, kind="function", parent=fc)
    rows.row(fc, "output", "out", 3)
    act = rows.call("act", {"0": 3}, {"out": 4}, parent=root)
    rows.row(root, "output", "out", 4)
    graph = rows.graph
    #                           x   x   w   x   w   lin fc  act out root
    assert graph.maker.tolist() == [-1, -1, -1, -1, -1, 5, 5, 5, 8, 8]
    assert graph.producer.tolist() == [-1, -1, -1, -1, -1, -1, -1, 5, -1, -1]
    assert graph.source_call[7] == 2
    assert graph.consumers(5).tolist() == graph.consumers(6).tolist() == [7]
    assert graph.consumers(0).tolist() == [1, 3]
    assert graph.explains(4).tolist() == [2]  # the weight that the module was given
    assert graph.explains(8).tolist() == [7]
    assert graph.inputs(act).tolist() == [7]


def test_a_call_that_gives_what_it_was_given_has_made_nothing(numbered: bool) -> None:
    rows = Rows(numbered)
    rows.call("fc", {"0": 1}, {"out": 2})
    rows.call("dropout", {"0": 2}, {"out": 2})
    rows.call("head", {"0": 2}, {"out": 3})
    graph = rows.graph
    assert graph.maker.tolist() == [-1, 1, 1, 1, 1, 5]
    rows = Rows(numbered)
    rows.call("identity", {"0": 1}, {"out": 1})  # of the program's input
    rows.call("head", {"0": 1}, {"out": 3})
    graph = rows.graph
    assert graph.maker.tolist() == [-1, -1, -1, 3]
    assert graph.first_seen.tolist() == [0, 0, 0, 3]


def test_what_code_between_two_calls_made_has_no_maker_and_may_come_of_all_it_could_see(numbered: bool) -> None:
    rows = Rows(numbered)
    root = rows.call("<root>", {"0": 1})
    rows.call("a", {"0": 1}, {"out": 2}, parent=root)
    rows.call("a/inside", {"0": 1}, {"out": 9}, parent=1)
    rows.call("b", {"0": 3}, {"out": 4}, parent=root)  # 3 was made of 1 and 2, unseen
    rows.call("c", {"0": 8}, {"out": 5}, parent=root)
    rows.row(root, "output", "out", 8)  # made before c, too
    graph = rows.graph
    assert graph.producer[5] == -1
    assert graph.explains(5).tolist() == [0, 2]
    assert graph.explains(7).tolist() == [0, 2, 6]
    assert (graph.producer[7], graph.maker[9]) == (-1, 9)
    assert graph.explains(9).tolist() == [0, 2, 6, 8]


def test_of_a_view_the_call_that_gave_it_or_else_what_made_its_memory() -> None:
    rows, whole = Rows(numbered=True), array(5, 2, 6)
    linear = rows.builder.call("linear")
    made = rows.row(linear, "output", "out", 1, whole)
    chunk = rows.builder.call("chunk")
    rows.row(chunk, "input", "0", 1, whole)
    half = rows.row(chunk, "output", "out.1", 1, whole[:, 3:])
    taken = [rows.row(rows.builder.call(f"t{at}"), "input", "0", 1, part) for at, part in
             enumerate((whole[:, 3:], whole[:, :2], whole.T, whole.reshape(-1)))]  # fmt: skip
    graph = rows.graph
    assert graph.producer[taken].tolist() == [half, made, made, made]
    assert graph.maker[half] == half
    assert graph.explains(half).tolist() == [1]


def test_memory_that_was_copied_has_the_bits_of_what_it_is_a_copy_of() -> None:
    rows = Rows(numbered=True)
    rows.call("a", {"0": 1}, {"out": 2})
    seq = rows.builder.call("b")
    copied = rows.row(seq, "input", "0", 7, array(2))
    zeros = rows.row(rows.builder.call("zeros"), "output", "out", 8, np.zeros(3))
    others = rows.row(rows.builder.call("c"), "input", "0", 9, np.zeros(3))
    graph = rows.graph
    assert graph.producer[copied] == 1
    assert graph.producer[others] == -1, "zeros are everywhere"
    assert graph.maker[zeros] == zeros


def test_a_weight_is_what_the_optimizer_left_of_it_the_step_before(numbered: bool) -> None:
    rows = Rows(numbered)
    rows.call("fc", {"0": 1, "weight": 2}, {"out": 3})
    update = rows.call("fc.weight", {"grad": 4, "weight": 2}, {"weight": 5}, kind="optimizer", phase="update")
    again = rows.builder.call("fc", step=1)
    weight = rows.row(again, "parameter", "weight", 11, array(5))
    graph = rows.graph
    assert graph.source_call[weight] == update
    assert graph.first_seen[4] == 1  # the weight that the optimizer found was there before


@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats"])
def test_gradients_of_a_value_that_several_use_are_their_shares(numbered: bool, keep: str) -> None:
    rows = Rows(numbered, keep)
    a = rows.call("a", {"0": 1}, {"out": 2})
    b = rows.call("b", {"0": 2}, {"out": 3})
    inner = rows.call("b/inner", {"0": 2}, {"out": 30}, parent=b)
    c = rows.call("c", {"0": 2, "1": 3}, {"out": 4})
    back_c = rows.call("c", {"out": 5}, {"0": 6, "1": 7}, phase="backward", parent=c)
    rows.call("b/inner", {"out": 20}, {"0": 21}, phase="backward", parent=inner)
    back_b = rows.call("b", {"out": 7}, {"0": 8}, phase="backward", parent=b)
    arriving = rows.count
    rows.call("a", {"out": 9}, phase="backward", parent=a)  # 9 is 6 + 8
    graph = rows.graph
    shares = graph.contributors(arriving)
    assert graph.producer[arriving] == -1
    assert graph.call_rows[shares].tolist() == [back_c, back_b]
    assert [graph.tensors["path"][row] for row in shares] == ["0", "0"]
    assert set(shares.tolist()) <= set(
        graph.explains(arriving).tolist()
    )  # code between the modules may have used it, too


def test_what_a_program_saves_was_made_before(numbered: bool) -> None:
    rows = Rows(numbered)
    rows.call("a", {"0": 1}, {"out": 2})
    rows.call("hidden", {}, {"out": 2}, kind="custom")
    rows.call("made by hand", {}, {"out": 5}, kind="custom")
    rows.call("b", {"0": 5}, {"out": 6})
    graph = rows.graph
    assert graph.maker[:4].tolist() == [-1, 1, 1, -1]
    assert graph.producer[4] == -1
    assert graph.explains(4).tolist() == [3]


def test_a_lost_call_and_an_empty_rank_do_no_harm() -> None:
    rows = Rows(numbered=True)
    rows.call("a", {"0": 1}, {"out": 2})
    lost = rows.row(99, "input", "0", 2)
    graph = rows.graph
    assert (graph.producer[lost], graph.explains(lost).tolist()) == (1, [1])
    empty = graph_of(Builder().run.ranks[0])
    assert empty.maker.tolist() == empty.producer.tolist() == empty.first_seen.tolist() == []


def test_numbers_of_a_damaged_column_take_no_room() -> None:
    rows = Rows(numbered=True)
    seq = rows.builder.call("a")
    for value in (1 << 40, (1 << 63) - 1):
        rows.row(seq, "output", str(value), value, array(value % 7))
    rows.row(rows.builder.call("b"), "input", "0", 1 << 40, array((1 << 40) % 7))
    assert rows.graph.producer.tolist() == [-1, -1, 0]


def test_it_is_built_once_and_goes_with_the_rank() -> None:
    run = Rows(numbered=True).builder.run
    graph = graph_of(run.ranks[0])
    assert graph_of(run.ranks[0]) is graph
    gone = weakref.ref(graph)
    del graph, run
    gc.collect()
    assert gone() is None


# -- programs ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._run = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._run(self, x)


def recorded(path: Path, model: nn.Module, level: str = "module", **settings: Any) -> Graph:
    torch.manual_seed(0)
    with astray.record(path, model, level=level, **settings) as rec:
        out = model(torch.randn(3, 4))
        out.square().mean().backward()
        rec.step()
    return graph_of(astray.open(path).ranks[0])


def find(graph: Graph, site: str, role: str, path: str, phase: str = "forward") -> int:
    (found,) = [
        row
        for row, call in enumerate(graph.call_rows.tolist())
        if (graph.calls["site"][call], graph.calls["phase"][call]) == (site, phase)
        and (graph.tensors["role"][row], graph.tensors["path"][row]) == (role, path)
    ]
    return found


def name(graph: Graph, row: int) -> str:
    call = graph.call_rows[row]
    return f"{graph.calls['site'][call]} {graph.calls['phase'][call]} {graph.tensors['path'][row]}"


def test_a_residual_is_used_twice_and_its_gradient_is_added_up(tmp_path: Path) -> None:
    model = Model(
        lambda m, x: m.head((y := m.stem(x)) + m.fc(y)), stem=nn.Linear(4, 4), fc=nn.Linear(4, 4), head=nn.Linear(4, 2)
    )
    graph = recorded(tmp_path / "run", model)
    stem = find(graph, "stem", "output", "out")
    assert [name(graph, row) for row in graph.consumers(stem)] == ["fc forward 0"]
    head = find(graph, "head", "input", "0")
    assert graph.producer[head] == -1
    may = [name(graph, row) for row in graph.explains(head)]
    assert may == ["<root> forward 0", "stem forward out", "fc forward out"]
    graph = recorded(tmp_path / "fine", model, level="module,function")
    assert name(graph, int(graph.producer[find(graph, "head", "input", "0")])) == "<root>/add forward out"
    arriving = find(graph, "stem", "input", "out", "backward")
    shares = {name(graph, row) for row in graph.contributors(arriving)}
    assert shares == {"<root>/add backward 0", "fc backward 0"}


def test_a_write_in_place_is_made_by_the_call_that_wrote(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.fc(x)
        z = y.detach().clone()
        z.mul_(2)
        return m.head(y + z)

    graph = recorded(tmp_path / "run", Model(forward, fc=nn.Linear(4, 4), head=nn.Linear(4, 1)), "module,function")
    row = find(graph, "<root>/add", "input", "1")
    assert name(graph, int(graph.producer[row])) == "<root>/mul_ forward out"
    row = find(graph, "<root>/mul_", "input", "0")
    assert name(graph, int(graph.producer[row])) == "<root>/clone forward out"


def test_attention_takes_its_views_of_one_projection(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.soft, self.out = nn.Linear(4, 12), nn.Softmax(-1), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(self.soft(q @ k.transpose(-1, -2)) @ v)

    graph = recorded(tmp_path / "run", Attention(), "module,function")
    products = [
        row
        for row, call in enumerate(graph.call_rows.tolist())
        if str(graph.calls["site"][call]).endswith("/matmul") and graph.calls["phase"][call] == "forward"
        and graph.takes[row]
    ]  # fmt: skip
    made = [name(graph, int(graph.producer[row])) for row in products]
    assert made == [
        "<root>/chunk forward out.0", "<root>/transpose forward out", "soft/softmax forward out",
        "<root>/chunk forward out.2",
    ]  # fmt: skip


def test_tied_weights_and_their_gradient(tmp_path: Path) -> None:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = one.weight
    graph = recorded(tmp_path / "run", nn.Sequential(one, nn.ReLU(), other), "module,function")
    weights = [find(graph, "0", "parameter", "weight"), find(graph, "2", "parameter", "weight")]
    assert len(set(graph.value[weights].tolist())) == 1
    taken = {name(graph, row) for row in graph.consumers(weights[0])}
    assert {"2 forward weight", "0/linear forward 1", "2/linear forward 1"} <= taken


def test_runs_under_inference_mode_flow_by_their_bits(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    with torch.inference_mode(), astray.record(tmp_path / "run", model):
        model(torch.randn(3, 4))
    graph = graph_of(astray.open(tmp_path / "run").ranks[0])
    assert name(graph, int(graph.producer[find(graph, "2", "input", "0")])) == "1 forward out"


def test_a_run_of_format_3_has_the_flow_that_it_would_have_today(tmp_path: Path) -> None:
    old = graph_of(astray.open(Path(__file__).parents[1] / "store" / "run_format" / "format3").ranks[0])
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.fc(x)) + x)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with astray.record(tmp_path / "run", net, level="module,function", optimizer="calls") as rec:
        for _ in range(2):
            for _ in range(2):
                net(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
    new = graph_of(astray.open(tmp_path / "run").ranks[0])
    assert len(old.maker) == len(new.maker)
    differ = [name(new, row) for row in np.flatnonzero(old.maker != new.maker)]
    assert {one.split()[0] for one in differ} <= {"out.bias"}  # its gradient is a constant, which bits do not tell
