"""Rows that wait to be written: the native ones and their Python counterpart, bit for bit."""

from __future__ import annotations

import gc
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astray.records import Blob, Statistics
from astray.store.run_format import rows as rows_module
from astray.store.run_format.rows import FINGERPRINT, MEASURED, NOTE, TICKET, VALUES, PythonRowBuffer

Native = pytest.importorskip(
    "astray.store.run_format._columns", reason="the native columns are not built", exc_type=ImportError
).Rows

LIMIT = 2**31 - 1

CELLS: dict[str, Callable[[random.Random], Any]] = {
    "int32": lambda r: r.choice([0, -1, 2**31 - 1, -(2**31), r.randrange(1000)]),
    "int64": lambda r: r.choice([0, -1, 2**63 - 1, -(2**63), r.randrange(10**12), np.int64(7)]),
    "uint64": lambda r: r.choice([0, 2**64 - 1, 2**63, r.getrandbits(64)]),
    "float64": lambda r: r.choice([0.0, -0.0, -1.0, math.inf, math.nan, 5e-324, 3, r.random(), np.float32(0.1)]),
    "bool": lambda r: r.choice([True, False, 1, 0]),
    "string": lambda r: r.choice(["", "input", "naïve.層", "caf\udce9", "🙂" * 3, "x" * r.randrange(200)]),
    "list<int64>": lambda r: tuple(
        r.choice([r.randrange(-5, 2**40), np.int64(3)]) for _ in range(r.choice([0, 1, 2, 4, 31, 33, 70]))
    ),
}
NULLABLE = ["int32", "int64", "uint64", "float64", "string"]


def filled(cells: tuple[Any, ...], rows: list[Any], *, kind: Any = Native) -> Any:
    found = kind(cells)
    for row in rows:
        found.append(row)
    assert len(found) == len(rows)
    return found


def both(cells: tuple[Any, ...], rows: list[Any]) -> tuple[Any, Any]:
    return filled(cells, rows), filled(cells, rows, kind=PythonRowBuffer)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("type", CELLS)
def test_both_give_the_same_bytes(type: str, count: int) -> None:
    source = random.Random(count)
    native, python = both((("string", False), (type, False)), [("before", CELLS[type](source)) for _ in range(count)])
    for start, stop in ((0, count), (count // 3, count), (0, count // 2), (count // 2, count // 2)):
        found = native.encode(1, start, stop, LIMIT)
        assert found == python.encode(1, start, stop, LIMIT)
        assert found[0] == 0
        assert found[1][0] == b""


@pytest.mark.parametrize("missing", [0.01, 0.5, 1])
@pytest.mark.parametrize("count", [1, 8, 13, 1000])
@pytest.mark.parametrize("type", NULLABLE)
def test_both_give_the_same_nulls(type: str, count: int, missing: float) -> None:
    source = random.Random(count)
    rows = [(None if source.random() < missing else CELLS[type](source),) for _ in range(count)]
    native, python = both(((type, True),), rows)
    found = native.encode(0, 0, count, LIMIT)
    assert found == python.encode(0, 0, count, LIMIT)
    nulls, (bitmap, *_) = found
    assert nulls == sum(row == (None,) for row in rows)
    present = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    assert present[:count].tolist() == ([int(row != (None,)) for row in rows] if nulls else [])
    assert not present[count:].any()
    assert native.encode(0, count // 2, count, LIMIT) == python.encode(0, count // 2, count, LIMIT)


def test_what_is_in_a_tuple_is_null_where_it_is_not_there() -> None:
    rows = [(0, (1.5, 7)), (1, None), (2, 12345), (3, (None, 9))]  # 12345 is a ticket
    native, python = both((("int64", False), [("float64", True), ("int64", True)]), rows)
    for column, type, expected in ((2, "float64", [1.5, math.nan, math.nan, math.nan]), (3, "int64", [7, 0, 0, 9])):
        found = native.encode(column, 0, 4, LIMIT)
        assert found == python.encode(column, 0, 4, LIMIT)
        np.testing.assert_array_equal(np.frombuffer(found[1][1], type), expected)
    assert found[:1] == (2,)
    for kind in (native, python):
        assert [np.frombuffer(part, np.int64).tolist() for part in kind.tickets(1)] == [[2], [12345]]


def random_tensor(source: random.Random) -> tuple[Any, ...]:
    shape = tuple(source.randrange(9) for _ in range(source.randrange(4)))
    moments = [None if source.random() < 0.2 else source.random() for _ in range(6)]
    first = source.choice([(None, None), (7, math.inf), (0, math.nan)])
    statistics = source.choice([None, source.getrandbits(40), Statistics(*moments, 1, 2, 3, 4, *first)])  # type: ignore[arg-type]
    note = source.choice([None, "a note", "größer"])
    text = "x" * source.randrange(30)
    blob: Any = source.choice([None, Blob(1, 2, 3)])
    measured = (statistics, source.choice([None, 2**64 - 1]))
    value = source.choice([None, source.randrange(2**40)])
    form = ("float32", shape, shape, "cpu", True)
    return (source.randrange(99), "input", text, *form, *measured, blob, None, note, value)


def contents(rows: Any) -> list[Any]:
    columns = [column for column in range(NOTE + 1) if column != VALUES]
    return [rows.encode(column, 0, len(rows), LIMIT) for column in columns] + [rows.cells(VALUES), rows.cells(NOTE)]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_moved_as_they_are(seed: int) -> None:
    source = random.Random(seed)
    native, python = both(rows_module._TENSOR, [random_tensor(source) for _ in range(300)])
    held: list[tuple[Any, Any]] = []
    for _ in range(60):
        choice = source.random()
        if choice < 0.4:
            count = source.choice([None, 0, len(native), source.randrange(len(native) + 1)])
            held.append((native.take(count), python.take(count)))
            assert contents(held[-1][0]) == contents(held[-1][1])
        elif choice < 0.7 and held:
            more = held.pop(source.randrange(len(held)))
            native.extend(more[0])
            python.extend(more[1])
        else:
            for row in [random_tensor(source) for _ in range(source.randrange(40))]:
                native.append(row)
                python.append(row)
        assert len(native) == len(python)
        assert contents(native) == contents(python)
        assert native.tickets(TICKET) == python.tickets(TICKET)
    assert (TICKET, MEASURED, FINGERPRINT) == (8, 9, 21)


@pytest.mark.parametrize("kind", [Native, PythonRowBuffer])
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
        ((1, 2**63), "list<int64>", OverflowError),
        ("text", "float64", (TypeError, ValueError)),
    ],
)
def test_a_cell_that_does_not_fit_is_an_error(
    kind: Any, cell: object, type: str, error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    good = CELLS[type](random.Random(0))
    rows = kind((("string", False), (type, False)))
    rows.append(("a", good))
    with pytest.raises(error):
        rows.append(("b", cell)) or rows.encode(1, 0, 2, LIMIT)
    if kind is Native:  # and the row is not there by half
        rows.append(("c", good))
        assert rows.cells(0) == ["a", "c"]


@pytest.mark.parametrize("kind", [Native, PythonRowBuffer])
def test_what_the_offsets_cannot_count_is_refused(kind: Any) -> None:
    texts = filled((("string", False),), [("ab",), ("層",)], kind=kind)
    lists = filled((("list<int64>", False),), [((1, 2),), ((3,),)], kind=kind)
    assert texts.encode(0, 0, 2, 5) is not None
    assert texts.encode(0, 0, 2, 4) is None
    assert texts.encode(0, 1, 2, 3) is not None
    assert lists.encode(0, 0, 2, 3) is not None
    assert lists.encode(0, 0, 2, 2) is None


def test_what_makes_no_sense_is_refused() -> None:
    for row in ((1,), (1, 2, 3), ()):
        for kind in (Native, PythonRowBuffer):
            with pytest.raises(IndexError, match=f"2 items, not {len(row)}"):
                kind((("int64", False), ("int64", False))).append(row)
    rows = Native((("int64", False), ("object", True), [("int64", True)]))
    for act, error in (
        (lambda: Native((("int16", False),)), ValueError),
        (lambda: Native((("int64", False),) * 49), ValueError),
        (lambda: Native([]), TypeError),
        (lambda: rows.append([1, 2, 3]), TypeError),
        (lambda: rows.append((1, None, "text")), TypeError),
        (lambda: rows.append((1, None, True)), TypeError),
        (lambda: rows.append((1, None, ())), IndexError),
        (lambda: rows.extend(rows), TypeError),
        (lambda: rows.extend([]), TypeError),
        (lambda: rows.extend(Native((("int64", False),))), TypeError),
        (lambda: rows.take(1), IndexError),
        (lambda: rows.take(-1), IndexError),
        (lambda: rows.take("all"), TypeError),
        (lambda: rows.encode(0, 0, 1, LIMIT), IndexError),
        (lambda: rows.encode(4, 0, 0, LIMIT), IndexError),
        (lambda: rows.encode(1, 0, 0, LIMIT), TypeError),
        (lambda: rows.cells(0), TypeError),
        (lambda: rows.tickets(0), TypeError),
    ):
        with pytest.raises(error):
            act()
    assert len(rows) == 0


@pytest.mark.parametrize("kind", [Native, PythonRowBuffer])
def test_rows_that_are_closed_take_no_more(kind: Any) -> None:
    rows = filled((("int64", False),), [(1,)], kind=kind)
    assert rows.open
    rows.open = False
    rows.append((2,))
    assert len(rows) == 1
    assert rows.take().open
    rows.open = True
    rows.append((2,))
    assert len(rows) == 1


def test_a_cell_whose_reading_appends_a_row_of_its_own() -> None:
    rows = Native((("string", False), ("int64", False)))

    class Nosy:
        def __index__(self) -> int:
            rows.append(("inner", 1))
            return 2

    rows.append(("outer", Nosy()))
    assert rows.cells(0) == ["inner", "outer"]
    assert np.frombuffer(rows.encode(1, 0, 2, LIMIT)[1][1], np.int64).tolist() == [1, 2]


def test_objects_are_held_and_released() -> None:
    rows, one = Native((("object", True), ("string", True))), object()
    held = sys.getrefcount(one)
    for _ in range(100):
        rows.append((one, "caf\udce9"))
    assert sys.getrefcount(one) == held + 100
    first, other = rows.take(30), Native((("object", True), ("string", True)))
    other.extend(first)
    assert sys.getrefcount(one) == held + 130
    assert [cell is one for cell in other.cells(0)] == [True] * 30
    del rows, first, other
    gc.collect()
    assert sys.getrefcount(one) == held
