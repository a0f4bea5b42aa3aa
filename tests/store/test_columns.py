from __future__ import annotations

import numpy as np
import pytest

from astray.store.columns import DictionaryColumn, Table


def test_coded_keeps_distinct_values_in_order_of_first_appearance() -> None:
    column = DictionaryColumn.of(["b", "a", None, "b"])
    assert column.values == ["b", "a"]
    assert column.codes.tolist() == [0, 1, -1, 0]
    assert list(column) == ["b", "a", None, "b"]
    assert (len(column), column[2], column[-1]) == (4, None, "b")


def test_coded_takes_rows_masks_and_slices() -> None:
    column = DictionaryColumn.of([(1, 2), (), (1, 2), None])
    assert column.take(np.array([3, 0])).tolist() == [None, (1, 2)]
    assert column.take(np.array([True, False, True, False])).tolist() == [(1, 2), (1, 2)]
    assert column.take(slice(1, 2)).tolist() == [()]


def test_code_of_an_unknown_value_matches_no_row() -> None:
    column = DictionaryColumn.of(["a", None])
    assert not (column.codes == column.code("b")).any()
    assert column.code("a") == 0


@pytest.fixture
def table() -> Table:
    columns = {
        "site": DictionaryColumn.of(["x", None, "y"]),
        "step": np.array([0, 1, 2]),
        "mean": np.array([0.5, np.nan, np.nan]),
        "fingerprint": np.array([2**64 - 1, 0, 0], np.uint64),
    }
    masks = {"mean": np.array([True, True, False]), "fingerprint": np.array([True, False, True])}
    return Table(columns, masks)


def test_rows_are_plain_objects(table: Table) -> None:
    assert table.row(0) == {"site": "x", "step": 0, "mean": 0.5, "fingerprint": 2**64 - 1}
    assert table.row(1)["site"] is None
    assert table.row(1)["fingerprint"] is None
    assert np.isnan(table.row(1)["mean"])  # a NaN that was recorded
    assert table.row(2)["mean"] is None  # nothing was


def test_valid(table: Table) -> None:
    assert table.valid("site").tolist() == [True, False, True]
    assert table.valid("step").all()
    assert table.valid("mean").tolist() == [True, True, False]


def test_take_keeps_masks(table: Table) -> None:
    taken = table.take(np.array([2, 0]))
    assert len(taken) == 2
    assert taken.row(0) == {"site": "y", "step": 2, "mean": None, "fingerprint": 0}
    assert taken.names == table.names


def test_columns_must_have_one_length() -> None:
    with pytest.raises(ValueError, match=r"different lengths: \{'a': 1, 'b': 2\}"):
        Table({"a": np.zeros(1), "b": np.zeros(2)})


def test_an_empty_table_has_no_rows() -> None:
    assert len(Table({})) == 0
    assert repr(Table({"a": np.zeros(0)})) == "<Table 0 rows: a>"
