"""What a reader of foreign dumps tells, as the tables of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from astray.errors import RunError
from astray.foreign.dump_rows import DumpRank, DumpRows, ValueLocation, shape_of
from astray.records import Frame, Statistics
from astray.store import RunInfo
from astray.store.run import RunData


def test_rows_and_values() -> None:
    read: list[str] = []

    def load(name: str, array: np.ndarray) -> ValueLocation:
        def now() -> np.ndarray:
            read.append(name)
            return array

        return ValueLocation(name, now, array.nbytes)

    rows = DumpRows()
    stack = rows.stack([Frame("a.py", 1, "f", "x = 1")])
    assert rows.stack([Frame("a.py", 1, "f", "x = 1")]) == stack
    assert rows.stack([]) is None
    outer = rows.call("<root>", "Net", step=2, stack=stack)
    inner = rows.call("fc", "Linear", step=2, parent=outer, call=1)
    both = load("w", np.array([[1.0, 2.0], [3.0, np.nan]], np.float32))
    rows.tensor(inner, "parameter", "weight", "float32", (2, 2), values=both, requires_grad=True)
    rows.tensor(inner, "input", "0", "float32", (2, 2), values=both)
    told = Statistics(-1.0, 2.0, 0.5, None, 3.0, 2.0, -1, -1, -1, 6)
    rows.tensor(outer, "output", "out", "float32", (6,), statistics=told, note="as the dump has it")
    rows.tensor(outer, "output", "odd", "float7", (6,), values=both)
    rank = DumpRank(0, rows.source())
    run = RunData(Path("x"), RunInfo(astray="", created="2026-01-01T00:00:00+00:00"), {0: rank})
    assert repr(run) == "<Run x: no framework, 1 step, 1 rank, 2 calls, 4 tensors, complete>"
    assert read == []  # nothing has read them yet
    call = rank.calls.row(1)
    assert (call["site"], call["call"], call["parent"], call["stack"]) == ("fc", 1, 0, None)
    assert rank.stack(0)[0].code == "x = 1"
    first = rank.tensors.row(0)
    assert (first["nan"], first["max"], first["stride"], first["requires_grad"]) == (1, 3.0, (2, 1), True)
    assert rank.tensors.row(1)["fingerprint"] == first["fingerprint"] is not None
    assert read == ["w"]  # the same values are measured once
    third = rank.tensors.row(2)
    assert (third["min"], third["std"], third["nan"], third["count"]) == (-1.0, None, None, 6)
    assert (third["fingerprint"], third["note"]) == (None, "as the dump has it")
    assert np.array_equal(rank.values(0), [[1, 2], [3, np.nan]], equal_nan=True)
    assert rank.values(2) is None
    assert rank.values(3) is None
    assert run.problems == []


def test_values_that_cannot_be_read_leave_what_the_dump_says() -> None:
    def lost() -> np.ndarray:
        raise RunError("w.npy is gone.")

    rows = DumpRows()
    seq = rows.call("fc", "Linear")
    told = Statistics(0.0, 1.0, 0.5, None, 1.0, 1.0, -1, -1, -1, 2)
    rows.tensor(seq, "output", "out", "float32", (2,), statistics=told, values=ValueLocation("w.npy", lost, 8))
    other = ValueLocation("v.npy", lambda: np.zeros(3, np.float32), 8)
    rows.tensor(seq, "output", "out", "float32", (2,), values=other)
    rank = DumpRank(0, rows.source())
    assert rank.tensors.row(0)["max"] == 1.0
    assert rank.tensors["note"].tolist() == [
        "w.npy is gone.",
        "v.npy holds float32 of shape [3], and the dump says float32 of shape [2].",
    ]
    assert rank.problems == rank.tensors["note"].tolist()
    with pytest.raises(RunError, match="gone"):
        rank.values(0)


def test_shapes_that_are_none() -> None:
    assert shape_of([]) == ()
    assert shape_of([0, 3]) == (0, 3)
    for bad in ([-1], [1.0], [True], "2", None, [1 << 40, 1 << 40], [1] * 65, {}):
        assert shape_of(bad) is None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"mean": 1e308}, "mean 1e+308 in place of no more than its largest element"),
        ({"max": 1e308, "absmax": 1e308}, "max 1e+308 in place of what its dtype can hold"),
        ({"l2": 1e300}, "l2 1e+300 in place of what so many elements add up to"),
        ({"absmax": 9.0}, "absmax 9.0 in place of the larger of its extremes"),
        ({"min": 3.0}, "min 3.0 in place of at most the largest element"),
    ],
)
def test_statistics_that_no_tensor_has_are_told_and_left_out(told: dict[str, float], said: str) -> None:
    rows = DumpRows()
    seq = rows.call("fc", "Linear")
    sound = Statistics(-1.0, 2.0, 0.5, None, 3.0, 2.0, -1, -1, -1, 6)
    for statistics in (None, sound, sound._replace(**told)):
        rows.tensor(seq, "output", "out", "float32", (6,), statistics=statistics)
    rank = DumpRank(0, rows.source())
    assert [rank.tensors.row(row)["max"] for row in range(3)] == [None, 2.0, None]
    assert rank.problems == [
        f"The dump says of 1 tensor what no tensor has, and that is left out. The first is tensor 2, with {said}."
    ]
    assert not rank.complete


def test_shapes_of_more_bytes_than_can_be_counted() -> None:
    for bad in ([1 << 59], [0, 1 << 61], [0, 1 << 58, 2], [1 << 61, 0]):
        assert shape_of(bad) is None
