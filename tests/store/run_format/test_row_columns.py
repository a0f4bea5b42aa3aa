"""Columns that do not come from rows: as arrays, as lists, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from astray.store.run_format.rows import EncodedCells, ListCells, MaskedCells, NullCells, RowBuffer, numbers
from astray.store.run_format.schema import Column

LIMIT = 2**31 - 1


def test_numbers_that_came_as_arrays() -> None:
    column = MaskedCells(np.arange(20, dtype=np.float64)[::2], np.arange(10) != 3)
    assert len(column) == 10
    nulls, (bitmap, data) = column.encode(Column("x", "float64", True), LIMIT)
    assert (nulls, bitmap) == (1, b"\xf7\x03")
    assert np.frombuffer(data, np.float64).tolist() == list(range(0, 20, 2))
    assert len(data) == 80
    part = column.part(slice(4, 6)).encode(Column("x", "float64", True), LIMIT)
    assert (part[0], part[1][0], bytes(part[1][1])) == (0, b"", np.array([8.0, 10.0]).tobytes())


def test_a_part_of_a_column_is_that_of_its_rows() -> None:
    rows = RowBuffer(([("string", True)],))
    for row in ((("a",),), (("b",),), (None,)):
        rows.append(row)
    cells = EncodedCells(rows, 1, 0, 3)
    expected = (1, (b"\x01", np.array([0, 1, 1], np.int32).tobytes(), b"b"))
    assert len(cells.part(slice(1, 3))) == len(cells.part(slice(1, 30))) == 2
    assert cells.part(slice(1, 3)).encode(Column("x", "string", True), LIMIT) == expected
    assert cells.part(slice(0, 3)).part(slice(1, 9)).encode(Column("x", "string", True), LIMIT) == expected
    assert ListCells(["a", "b", None]).part(slice(1, 3)).encode(Column("x", "string", True), LIMIT) == expected


@pytest.mark.parametrize("type", ["int32", "int64", "string"])
@pytest.mark.parametrize("count", [1, 8, 9])
def test_a_column_that_is_not_there_is_one_of_nulls(type: str, count: int) -> None:
    column = Column("x", type, True)  # type: ignore[arg-type]
    nulls, buffers = NullCells(count).encode(column, LIMIT) or (0, ())
    expected = ListCells([None] * count).encode(column, LIMIT)
    assert (nulls, tuple(map(bytes, buffers))) == expected
    assert len(NullCells(count).part(slice(1, count + 5))) == count - 1


@pytest.mark.parametrize(("type", "filler"), [("int64", 0), ("float64", np.nan)])
def test_the_numbers_of_rows_can_be_changed(type: str, filler: float) -> None:
    rows = RowBuffer(((type, True),))
    for number in (1, None, 3):
        rows.append((number,))
    found = numbers(EncodedCells(rows, 0, 0, 3), Column("x", type, True))  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.data, [1, filler, 3])
    assert found.present.tolist() == [True, False, True]
    found.data[1], found.present[1] = 2, True
    assert found.encode(Column("x", type, True), LIMIT)[0] == 0  # type: ignore[arg-type]
