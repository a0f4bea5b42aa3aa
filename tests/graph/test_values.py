"""Which rows are one value: as recorded, through every format, and derived where it is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import astray
from astray.graph import graph_of
from astray.graph.flow import contents
from astray.store.convert import convert
from record_builders import Builder

FORMAT_3 = Path(__file__).parents[1] / "store" / "run_format" / "format3"


def values(builder: Builder) -> list[int]:
    return graph_of(builder.run.ranks[0]).value.tolist()


def chain(builder: Builder, *arrays: Any, **rest: Any) -> None:
    """Calls of which each takes what the last one gave, and makes it into the next of these."""
    for at in range(len(arrays) - 1):
        seq = builder.call(f"layer{at}", **rest)
        builder.tensor(seq, "input", "0", arrays[at])
        builder.tensor(seq, "output", "out", arrays[at + 1])


def test_equal_bits_are_one_value() -> None:
    builder = Builder()
    a, b, c = np.random.default_rng(0).normal(size=(3, 4, 4))
    chain(builder, a, b, c)
    chain(builder, a, b, step=1)
    assert values(builder) == [0, 1, 1, 2, 3, 4]


def test_equal_statistics_are_where_there_are_no_bits() -> None:
    builder = Builder(keep="stats")
    a, b, c = np.random.default_rng(0).normal(size=(3, 4, 4))
    chain(builder, a, b, c)
    assert values(builder) == [0, 1, 1, 2]


def test_constants_and_unknown_numbers_are_told_apart_by_their_order() -> None:
    for keep in ("stats,fingerprint", "stats", "none"):
        builder = Builder(keep=keep)
        chain(builder, np.ones(3), np.zeros((2, 2)), np.zeros((2, 2)), np.ones(3))
        #                        1  0      0  0'     0' 1'
        assert values(builder) == [0, 1, 1, 2, 2, 3], keep


def test_a_module_gives_the_constant_that_its_function_gave() -> None:
    builder = Builder()
    outer = builder.call("fc")
    inner = builder.call("fc/relu", kind="function", parent=outer)
    builder.tensor(inner, "output", "out", np.zeros(3))
    builder.tensor(outer, "output", "out", np.zeros(3))
    builder.tensor(builder.call("next"), "input", "0", np.zeros(3))
    assert values(builder) == [0, 0, 0]


def test_rows_without_a_number_have_that_of_rows_with_the_same_bits() -> None:
    builder = Builder()
    a, b = np.random.default_rng(0).normal(size=(2, 4))
    builder.tensor(builder.call("x"), "input", "0", a, value=5)
    builder.tensor(builder.call("y"), "input", "0", a)
    builder.tensor(builder.call("z"), "input", "0", b)
    assert values(builder) == [5, 5, 6]


def test_what_tells_a_tensor_from_others() -> None:
    builder = Builder()
    seq = builder.call("x")
    for at, array in enumerate(([1.5, 2.5], [0.25], [3.0], [2.0, 2.0], [np.nan, np.nan], [np.inf, 0.5, 1.0], [])):
        builder.tensor(seq, "input", str(at), np.array(array))
    found = contents(builder.run.ranks[0].tensors)
    assert found.distinctive.tolist() == [True, True, False, False, False, True, False]
    assert len(set(found.code.tolist())) == 7


def test_a_view_shows_nothing_that_its_memory_does_not() -> None:
    builder = Builder()
    whole = np.arange(6.0) + 0.5
    builder.tensor(builder.call("made"), "output", "out", whole, value=1)
    builder.tensor(builder.call("view"), "input", "0", whole[2:4], value=1)
    builder.tensor(builder.call("written past its counter"), "input", "0", whole * 3, value=1)
    assert graph_of(builder.run.ranks[0]).producer.tolist() == [-1, 0, -1]


def recorded(path: Path) -> astray.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with astray.record(path, model, keep="tensors") as rec:
        model(torch.randn(3, 4)).sum().backward()
        rec.step()
    return astray.open(path)


def test_converting_a_run_keeps_its_values_and_an_older_one_has_none(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    convert(run, tmp_path / "copy", "astray")
    copy = astray.open(tmp_path / "copy")
    assert copy.ranks[0].tensors.numbers("value").tolist() == run.ranks[0].tensors.numbers("value").tolist()
    convert(FORMAT_3, tmp_path / "new", "astray")
    new = astray.open(tmp_path / "new")
    assert (new.info.format, set(new.ranks[0].tensors.numbers("value").tolist())) == (4, {-1})
    assert not new.ranks[0].tensors.valid("value").any()


def test_a_dump_of_another_tool_flows_by_its_bits(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    convert(run, tmp_path / "dump", "msprobe")
    dump = astray.open(tmp_path / "dump").ranks[0]
    graph = graph_of(dump)
    assert not dump.tensors.valid("value").any()
    taken = [
        row for row, call in enumerate(dump.call_rows.tolist())
        if dump.calls["site"][call] == "1" and dump.calls["phase"][call] == "forward" and graph.takes[row]
    ]  # fmt: skip
    assert [dump.calls["site"][graph.source_call[row]] for row in taken] == ["0"]
