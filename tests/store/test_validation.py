"""Rows that no recording has written: they are left out and reported, and nothing above the store sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import astray
from astray.cli import main
from astray.store import RunData, open_run

PARTS = {"calls": "calls.arrows", "tensors": "tensors.arrows"}


def change(run: RunData, table: str, **cells: dict[int, Any]) -> RunData:
    """The same run with other cells in some rows of a table."""
    file = run.path / "rank0" / PARTS[table]
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        rows = stream.read_all()
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    for name, changes in cells.items():
        for row, cell in changes.items():
            columns[name][row] = cell
    schema = pa.schema([pa.field(field.name, field.type) for field in rows.schema])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return open_run(run.path)


@pytest.mark.parametrize(
    ("table", "column", "cell", "said"),
    [
        ("calls", "seq", -5, "seq -5 in place of a number that something can have"),
        ("calls", "seq", 2, "seq 2 in place of a number of its own"),
        ("calls", "step", -1, "step -1 in place of a number that something can have"),
        ("calls", "step", 1 << 60, "step 1152921504606846976 in place of a number that something can have"),
        ("calls", "micro", -3, "micro -3 in place of a number that something can have"),
        ("calls", "parent", -7, "parent -7 in place of a number that something can have"),
        ("calls", "phase", "sideways", "phase 'sideways' in place of one of backward, forward, update"),
        ("calls", "site", None, "site nothing in place of what every row has"),
        ("calls", "recompute", None, "recompute nothing in place of what every row has"),
        ("tensors", "role", "x" * 90, f"role '{'x' * 56}… in place of one of gradient, input, output, parameter"),
        ("tensors", "shape", [-1], "shape [-1] in place of a shape"),
        ("tensors", "shape", [1 << 40] * 3, "shape [1099511627776, 1099511627776, 1099511627776] in place of a shape"),
        ("tensors", "shape", [1] * 65, f"shape [{'1, ' * 18}1,… in place of a shape"),
        ("tensors", "shape", None, "shape nothing in place of what every row has"),
        ("tensors", "stride", [1 << 62], "stride [4611686018427387904] in place of a stride"),
        ("tensors", "count", -2, "count -2 in place of a number that something can have"),
        ("tensors", "nan", 7, "nan 7 in place of no more than there are elements"),
        ("tensors", "std", -1.0, "std -1.0 in place of a magnitude"),
        ("tensors", "absmax", float("inf"), "absmax inf in place of a finite number"),
        ("tensors", "min", 3.0, "min 3.0 in place of at most the largest element"),
        ("tensors", "std", float("nan"), "std nan in place of a number"),
        ("tensors", "mean", 1e308, "mean 1e+308 in place of no more than its largest element"),
        ("tensors", "std", 5.0, "std 5.0 in place of no more than its largest element"),
        ("tensors", "l2", float("inf"), "l2 inf in place of what so many elements add up to"),
        ("tensors", "absmax", 0.0, "absmax 0.0 in place of the larger of its extremes"),
        ("tensors", "min", -1e39, "min -1e+39 in place of what its dtype can hold"),
        ("tensors", "blob_offset", -9, "blob_offset -9 in place of a number that something can have"),
        ("tensors", "dtype", None, "dtype nothing in place of what every row has"),
    ],
)  # fmt: skip
def test_a_row_that_was_never_recorded(small_run: RunData, table: str, column: str, cell: Any, said: str) -> None:
    run = change(small_run, table, **{column: {5: cell}})
    rank = run.ranks[0]
    assert len(getattr(rank, table)) == 7
    found = [problem for problem in run.problems if "never recorded" in problem]
    assert len(found) == 1
    assert found[0].startswith(f"{run.path}/rank0: 1 of 8 {table} says what was never recorded, and is left out. The")
    assert f"The first is row 5, with {said}" in found[0]
    assert not run.complete


def test_several_rows_are_reported_once(small_run: RunData) -> None:
    run = change(small_run, "tensors", shape={2: [-1], 4: [-2]}, std={4: -1.0, 6: -1.0})
    assert len(run.ranks[0].tensors) == 5
    assert "3 of 8 tensors say what was never recorded, and are left out. The first is row 2" in run.problems[0]


def test_values_of_other_rows_are_still_theirs(small_run: RunData) -> None:
    run = change(small_run, "tensors", role={0: "none"})
    for row, seq in enumerate(range(1, 8)):
        values = run.ranks[0].values(row)
        assert values is not None
        assert values.min() == values.max() == seq


def test_a_run_of_nothing_but_such_rows(small_run: RunData, capsys: pytest.CaptureFixture[str]) -> None:
    run = change(small_run, "calls", phase=dict.fromkeys(range(8), "?"))
    assert len(run.ranks[0].calls) == 0
    for command in (["show"], ["show", "--alarms"], ["show", "--risk"], ["compare", str(run.path)]):
        assert main([command[0], str(run.path), *command[1:]]) in (0, 1, 2)
        assert "Traceback" not in capsys.readouterr().err


def test_a_dtype_that_is_not_known_has_no_values(small_run: RunData) -> None:
    """A newer astray may know more of them, so that such a row is not damaged."""
    run = change(small_run, "tensors", dtype={3: "float4_e2m1fn_x2"})
    assert len(run.ranks[0].tensors) == 8
    with pytest.raises(astray.errors.RunError, match="Row 3 of rank 0 is float4_e2m1fn_x2, a dtype whose values"):
        run.ranks[0].values(3)


def test_numbers_that_are_far_apart_can_be_keys(small_run: RunData) -> None:
    run = change(small_run, "calls", step={0: 1 << 53, 1: 1 << 52}, micro={2: (1 << 31) - 1}, call={3: (1 << 31) - 1})
    assert run.problems == []
    assert astray.compare(run, run).first is None


def test_a_small_file_is_read_in_little_memory(tmp_path: Path) -> None:
    """Asking a file for all that it may have takes that much memory, however little it has."""
    import tracemalloc

    from astray.store import safe_paths

    (tmp_path / "small.json").write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert safe_paths.read_file(tmp_path / "small.json") == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_dtype_without_an_end_and_a_tensor_without_elements_are_sound(small_run: RunData) -> None:
    nothing = {name: {5: None} for name in ("min", "max", "mean", "std", "l2", "absmax")}
    run = change(small_run, "tensors", dtype={5: "float99"}, count={5: 0}, zeros={5: 0}, **nothing)
    assert len(run.ranks[0].tensors) == 8
