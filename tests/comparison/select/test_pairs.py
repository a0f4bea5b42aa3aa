"""Rows that are asked for: their order, how many, and how other libraries take them."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow
import pytest

from astray.comparison.comparison import compare
from astray.comparison.select import pairs
from astray.errors import UsageError

ONES = np.ones((2, 4), np.float32)


@pytest.fixture
def diff(runs):
    """Sites in this order, with these errors; `lost` is in the reference only."""
    sides = []
    for path, wrong in (("runs/good", False), ("runs/bad", True)):
        builder = runs.Builder(path)
        for site, error in (("h.10", 2), ("h.2", 0), ("h.1", 3), ("a", 2)):
            call = builder.call(site)
            builder.tensor(call, "output", "out", ONES * np.float32(1 + error * wrong))
        if not wrong:
            builder.tensor(builder.call("lost"), "output", "out", ONES[0])
        sides.append(builder.run)
    return compare(*sides)


def sites(found) -> list[str]:
    return found["site"].column.tolist()


def test_the_order_of_observation_is_the_default(diff):
    assert sites(diff.select()) == sites(diff.table()) == ["h.10", "h.2", "h.1", "a", "lost"]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("error", ["h.2", "h.10", "a", "h.1", "lost"]),  # ties as observed, and what is not known last
        ("-error", ["h.1", "h.10", "a", "h.2", "lost"]),
        ("site", ["a", "h.1", "h.2", "h.10", "lost"]),
        ("-site", ["lost", "h.10", "h.2", "h.1", "a"]),
        ("-error,site", ["h.1", "a", "h.10", "h.2", "lost"]),
        (["-error", " -site"], ["h.1", "h.10", "a", "h.2", "lost"]),
        ("verdict,-error", ["h.2", "h.1", "h.10", "a", "lost"]),
        ("shape_reference,site", ["a", "h.1", "h.2", "h.10", "lost"]),
        ("count_candidate,-absmax_candidate", ["h.1", "h.10", "a", "h.2", "lost"]),
    ],
)
def test_sorting(diff, sort, expected):
    assert sites(diff.select(sort=sort)) == expected


def test_top_cuts_after_sorting_and_says_of_how_many(diff):
    some = diff.select("wrong", sort="-error", top=2)
    assert sites(some) == ["h.1", "h.10"]
    assert (len(some), some.found) == (2, 3)
    assert repr(some) == "<Pairs: 2 of 3 rows where wrong, sorted by -error>"
    assert repr(diff.table()) == "<Pairs: 5 rows>"


def test_what_cannot_be_an_order(diff):
    with pytest.raises(UsageError, match=r"no column 'eror' to sort by\. Did you mean 'error'\?"):
        diff.select(sort="-eror")
    with pytest.raises(UsageError, match="is not an order"):
        diff.select(sort="error,,site")
    with pytest.raises(UsageError, match="-1 rows cannot be shown"):
        diff.select(top=-1)


def test_arrow_takes_a_comparison_and_any_part_of_it(diff):
    table = pyarrow.table(diff)
    assert table.column_names == diff.table().names
    assert table["site"].to_pylist() == ["h.10", "h.2", "h.1", "a", "lost"]
    assert table["error"].to_pylist() == [2.0, 0.0, 3.0, 2.0, None]
    assert table["shape_candidate"].to_pylist() == [[2, 4]] * 4 + [None]
    assert table["count_candidate"].to_pylist() == [8, 8, 8, 8, None]
    assert table["recompute"].to_pylist() == [False] * 5
    assert table["cosine"].null_count == 5
    known = diff.columns["fingerprint_reference"].column.tolist()
    assert (table.schema.field("fingerprint_reference").type, table["fingerprint_reference"].to_pylist()) == (
        pyarrow.uint64(),
        known,
    )
    assert pyarrow.table(diff.select("wrong", "-error"))["site"].to_pylist() == ["h.1", "h.10", "a"]
    assert pyarrow.table(diff.select("error > 100")).num_rows == 0


def test_arrow_takes_more_rows_than_a_piece_has(diff, monkeypatch):
    monkeypatch.setattr(pairs, "PIECE_ROWS", 2)
    table = pyarrow.table(diff)
    assert (table["site"].num_chunks, table["site"].to_pylist()) == (3, ["h.10", "h.2", "h.1", "a", "lost"])


def test_pandas(diff):
    frame = diff.to_pandas()
    assert list(frame.columns) == diff.table().names
    assert frame["site"].tolist() == ["h.10", "h.2", "h.1", "a", "lost"]
    assert frame.loc[frame.verdict == "diverged", "error"].tolist() == [2.0, 3.0, 2.0]
    assert frame["shape_reference"][0] == (2, 4)
    assert frame["count_candidate"].isna().tolist() == [False] * 4 + [True]
    assert frame["count_candidate"][0] == 8
    assert frame["fingerprint_reference"].tolist() == diff.columns["fingerprint_reference"].column.tolist()
    assert np.isnan(frame["error"][4])
    assert diff.select("wrong", "-error", 1).to_pandas()["site"].tolist() == ["h.1"]


def test_without_pandas_there_is_a_sentence(diff, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
        diff.to_pandas()
