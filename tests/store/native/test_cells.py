"""Columns of rows as Arrow buffers: the native extension and the Python that stands in for it, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astray.store.native.cells import Cells, Masked, python_encode, python_tickets
from astray.store.native.schema import Column

native = pytest.importorskip(
    "astray.store.native._columns", reason="the native columns are not built", exc_type=ImportError
)

LIMIT = 2**31 - 1

CELLS: dict[str, Callable[[random.Random], Any]] = {
    "int32": lambda r: r.choice([0, -1, 2**31 - 1, -(2**31), r.randrange(1000)]),
    "int64": lambda r: r.choice([0, -1, 2**63 - 1, -(2**63), r.randrange(10**12), np.int64(7)]),
    "uint64": lambda r: r.choice([0, 2**64 - 1, 2**63, r.getrandbits(64)]),
    "float64": lambda r: r.choice([0.0, -0.0, -1.0, math.inf, math.nan, 5e-324, 3, r.random(), np.float32(0.1)]),
    "bool": lambda r: r.choice([True, False, 1, 0]),
    "string": lambda r: r.choice(["", "input", "naïve.層", "caf\udce9", "🙂" * 3, "x" * r.randrange(200)]),
    "list<int64>": lambda r: tuple(r.randrange(-5, 2**40) for _ in range(r.randrange(5))),
}
NULLABLE = ["int32", "int64", "uint64", "float64", "string"]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("type", CELLS)
def test_both_give_the_same_bytes(type: str, count: int) -> None:
    source = random.Random(count)
    rows = [("before", CELLS[type](source), None) for _ in range(count)]
    found = native.encode(rows, 1, -1, type, False, LIMIT)
    assert found == python_encode(rows, 1, -1, type, False, LIMIT)
    assert found[0] == 0
    assert found[1][0] == b""


@pytest.mark.parametrize("missing", [0.01, 0.5, 1])
@pytest.mark.parametrize("count", [1, 8, 13, 1000])
@pytest.mark.parametrize("type", NULLABLE)
def test_both_give_the_same_nulls(type: str, count: int, missing: float) -> None:
    source = random.Random(count)
    rows = [(None if source.random() < missing else CELLS[type](source),) for _ in range(count)]
    found = native.encode(rows, 0, -1, type, True, LIMIT)
    assert found == python_encode(rows, 0, -1, type, True, LIMIT)
    nulls, (bitmap, *_) = found
    assert nulls == sum(row == (None,) for row in rows)
    present = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    assert present[:count].tolist() == ([int(row != (None,)) for row in rows] if nulls else [])
    assert not present[count:].any()


def test_cells_of_a_tuple_in_a_row_are_null_where_it_is_not_there() -> None:
    rows = [(0, (1.5, 7)), (1, None), (2, 12345), (3, (None, 9))]  # 12345 is a ticket
    for item, type, expected in ((0, "float64", [1.5, math.nan, math.nan, math.nan]), (1, "int64", [7, 0, 0, 9])):
        found = native.encode(rows, item, 1, type, True, LIMIT)
        assert found == python_encode(rows, item, 1, type, True, LIMIT)
        np.testing.assert_array_equal(np.frombuffer(found[1][1], type), expected)
    assert found[:1] == (2,)


@pytest.mark.parametrize("encode", [native.encode, python_encode])
def test_a_row_may_be_missing_altogether(encode: Any) -> None:
    nulls, (bitmap, data) = encode([None, (4, 5), None], 1, -1, "int32", True, LIMIT)
    assert (nulls, bitmap, np.frombuffer(data, np.int32).tolist()) == (2, b"\x02", [0, 5, 0])


@pytest.mark.parametrize("encode", [native.encode, python_encode])
@pytest.mark.parametrize(
    ("cell", "type", "error"),
    [
        *((None, type, TypeError) for type in CELLS),
        (2**31, "int32", OverflowError),
        (-(2**31) - 1, "int32", OverflowError),
        (2**63, "int64", OverflowError),
        (-1, "uint64", OverflowError),
        (2**64, "uint64", OverflowError),
        (1, "string", TypeError),
        (b"bytes", "string", TypeError),
        (1, "list<int64>", TypeError),
        ((1, None), "list<int64>", TypeError),
        ("text", "float64", (TypeError, ValueError)),
    ],
)
def test_a_cell_that_does_not_fit_is_an_error(
    encode: Any, cell: object, type: str, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    good = CELLS[type](random.Random(0))
    with pytest.raises(error):
        encode([(good,), (cell,)], 0, -1, type, False, LIMIT)


@pytest.mark.parametrize("encode", [native.encode, python_encode])
def test_what_the_offsets_cannot_count_is_refused(encode: Any) -> None:
    texts, lists = [("ab",), ("層",)], [((1, 2),), ((3,),)]
    assert encode(texts, 0, -1, "string", False, 5) is not None
    assert encode(texts, 0, -1, "string", False, 4) is None
    assert encode(lists, 0, -1, "list<int64>", False, 3) is not None
    assert encode(lists, 0, -1, "list<int64>", False, 2) is None


def test_rows_that_are_none_are_refused_and_nothing_is_lost_on_the_way() -> None:
    with pytest.raises(TypeError):
        native.encode((("a",),), 0, -1, "string", False, LIMIT)
    with pytest.raises(ValueError, match="no column type int16"):
        native.encode([(1,)], 0, -1, "int16", False, LIMIT)
    with pytest.raises(IndexError):
        native.encode([(1,), ()], 0, -1, "int64", False, LIMIT)


def test_tickets_are_found() -> None:
    rows = [("a", 5), ("b", None), ("c", (1.0, 2)), ("d", 2**62), ("e", True)]
    found = native.tickets(rows, 1)
    assert found == python_tickets(rows, 1)
    assert [np.frombuffer(part, np.int64).tolist() for part in found] == [[0, 3], [5, 2**62]]
    assert native.tickets([], 1) == python_tickets([], 1) == (b"", b"")


def test_numbers_that_came_as_arrays() -> None:
    column = Masked(np.arange(20, dtype=np.float64)[::2], np.arange(10) != 3)
    assert len(column) == 10
    nulls, (bitmap, data) = column.encode(Column("x", "float64", True), LIMIT)
    assert (nulls, bitmap) == (1, b"\xf7\x03")
    assert np.frombuffer(data, np.float64).tolist() == list(range(0, 20, 2))
    assert len(data) == 80
    part = column.part(slice(4, 6)).encode(Column("x", "float64", True), LIMIT)
    assert (part[0], part[1][0], bytes(part[1][1])) == (0, b"", np.array([8.0, 10.0]).tobytes())


def test_a_part_of_a_column_is_that_of_its_rows() -> None:
    cells = Cells([(0, ("a",)), (1, ("b",)), (2, None)], 0, 1)
    assert len(cells.part(slice(1, 3))) == 2
    found = cells.part(slice(1, 3)).encode(Column("x", "string", True), LIMIT)
    assert found == (1, (b"\x01", np.array([0, 1, 1], np.int32).tobytes(), b"b"))
