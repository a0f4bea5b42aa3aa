"""Rows to a file and back, and the file as pyarrow reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from astray.records import Blob, Call, Statistics, Tensor
from astray.store.columns import Table
from astray.store.run_format import encoder as batches
from astray.store.run_format.decoder import read_table
from astray.store.run_format.encoder import BatchFile, call_columns, tensor_columns
from astray.store.run_format.ipc import IpcStream
from astray.store.run_format.rows import RowBuffer, call_rows, tensor_rows
from astray.store.run_format.schema import CALLS, TENSORS, Column


def write(path: Path, columns: tuple[Column, ...], *parts: Sequence[Sequence[object]]) -> Table:
    file = BatchFile(path, columns)
    for part in parts:
        file.append(part)
    file.close()
    found = read_table(path, columns)
    assert (found.unread, found.problem) == (0, None)
    return found.table


def filled(rows: RowBuffer, given: Sequence[Call] | Sequence[Tensor]) -> RowBuffer:
    for row in given:
        rows.append(tuple(row))
    return rows


def of_calls(rows: Sequence[Call]) -> Sequence[Sequence[object]]:
    return call_columns(filled(call_rows(), rows))


def of_tensors(rows: Sequence[Tensor], blobs: list[Blob | None] | None = None) -> Sequence[Any]:
    return tensor_columns(filled(tensor_rows(), rows), blobs)


def calls_of(table: Table) -> list[Call]:
    return [Call(**table.row(i)) for i in range(len(table))]


CALL_ROWS = [
    Call(0, 0, 0, "module", "<root>", "Net", 0, "forward", None, 3, "(Tensor, {'p': 0.5})", False),
    Call(2**40, 10**12, 7, "function", "naïve.層/softmax", "", 2**31 - 1, "backward", 0, None, "", True),
    Call(1, 0, 0, "op", "", "aten::mm", 0, "update", 2**62, None, None, True),
]


def test_calls_come_back(tmp_path: Path) -> None:
    table = write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS[:2]), of_calls(CALL_ROWS[2:]))
    assert calls_of(table) == CALL_ROWS


def test_pyarrow_reads_the_same(tmp_path: Path) -> None:
    write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS))
    found = pyarrow.ipc.open_stream(tmp_path / "calls").read_all()
    found.validate(full=True)
    assert [Call(**row) for row in found.to_pylist()] == CALL_ROWS
    assert [(f.name, str(f.type).replace("item: int64 not null", "int64"), f.nullable) for f in found.schema] == [
        (c.name, {"float64": "double"}.get(c.type, c.type), c.nullable) for c in CALLS
    ]


def test_tensors_come_back_with_every_null_and_every_float(tmp_path: Path, tensor: Callable[..., Tensor]) -> None:
    odd = Statistics(float("-inf"), float("inf"), float("nan"), -0.0, 5e-324, None, 0, 1, 2, 3, 2**61, float("nan"))
    rows = [
        tensor(0),
        tensor(1, statistics=None, fingerprint=None, shape=(), stride=(), placement="mesh(2)[Shard(0)]"),
        tensor(2, statistics=odd, fingerprint=2**64 - 1, shape=(0, 5), stride=(5, 1), requires_grad=True),
        tensor(3, fingerprint=0, note="größer als 2³¹ 🙂", device="cuda:7", path=""),
    ]
    blobs = [None, Blob(0, 64, 0, None, "0:1, ..., :64"), Blob(2**31 - 1, 2**50, 2**40, 11), Blob(0, 0, 8, 2, "1:")]
    table = write(tmp_path / "tensors", TENSORS, of_tensors(rows, blobs))
    for i, (row, blob) in enumerate(zip(rows, blobs, strict=True)):
        found = table.row(i)
        statistics = row.statistics or Statistics(*[None] * 12)
        for name, value in statistics._asdict().items():
            assert found[name] is value or np.array_equal(found[name], value, equal_nan=True), name
        places = [found[name] for name in ("blob_file", "blob_offset", "blob_bytes", "sampled", "part")]
        assert places == list(blob or [None] * 5)
        for name in set(row._fields) - {"statistics", "blob"}:
            assert found[name] == getattr(row, name)


def test_null_numbers_read_as_minus_one_and_nan(tmp_path: Path, tensor: Callable[..., Tensor]) -> None:
    table = write(tmp_path / "tensors", TENSORS, of_tensors([tensor(statistics=None)], [None]))
    assert table["blob_offset"].tolist() == [-1]
    assert table["count"].tolist() == [-1]
    assert np.isnan(table["mean"]).all()


def test_a_column_null_in_one_batch_only(tmp_path: Path, call: Callable[..., Call]) -> None:
    parts = [[call(0, args="a"), call(1, args=None), call(2, args="")], [call(3)], [call(4, args="")]]
    table = write(tmp_path / "calls", CALLS, *map(of_calls, parts))
    assert table["args"].tolist() == ["a", None, "", None, ""]
    assert table["args"].values == ["a", ""]
    assert table["parent"].tolist() == [-1] * 5
    assert not table.valid("parent").any()


def test_an_empty_file_is_a_table(tmp_path: Path) -> None:
    table = write(tmp_path / "tensors", TENSORS)
    assert len(table) == 0
    assert table.names == [column.name for column in TENSORS]
    assert pyarrow.ipc.open_stream(tmp_path / "tensors").read_all().num_rows == 0


def test_the_file_is_readable_before_it_is_closed(tmp_path: Path, call: Callable[..., Call]) -> None:
    file = BatchFile(tmp_path / "calls", CALLS)
    for seq in range(3):
        file.append(of_calls([call(seq)]))
        assert calls_of(read_table(tmp_path / "calls", CALLS).table) == [call(n) for n in range(seq + 1)]
        assert pyarrow.ipc.open_stream(tmp_path / "calls").read_all().num_rows == seq + 1
    file.close()


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path: Path, call: Callable[..., Call]) -> None:
    table = write(tmp_path / "calls", CALLS, of_calls([call(args="caf\udce9 é"), call(args="b")]))
    assert table["args"].tolist() == ["caf\\udce9 é", "b"]


def test_strings_too_long_for_one_batch_are_split(
    tmp_path: Path, call: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "OFFSET_LIMIT", 100)
    rows = [call(seq, args="x" * 60) for seq in range(5)]
    assert calls_of(write(tmp_path / "calls", CALLS, of_calls(rows))) == rows


def test_columns_that_an_older_file_lacks_are_null(tmp_path: Path, tensor: Callable[..., Tensor]) -> None:
    later = {"part", "mean", "fingerprint", "sampled", "first_bad", "first_bad_value"}
    older = tuple(column for column in TENSORS if column.name not in later)
    bad = Statistics(-1.0, 2.0, 0.5, 1.0, 3.0, 2.0, 1, 0, 1, 6, 5, float("-inf"))
    rows = [tensor(seq, note="n", statistics=bad) for seq in range(3)]
    blobs: list[Blob | None] = [Blob(0, 64, 24)] * 3
    cells = dict(zip([column.name for column in TENSORS], of_tensors(rows, blobs), strict=True))
    complete = write(tmp_path / "whole", TENSORS, [*cells.values()])
    whole = [complete.row(row) for row in range(3)]
    file = BatchFile(tmp_path / "tensors", older)
    for batch in (slice(0, 1), slice(1, 3)):
        file.append([cells[column.name].part(batch) for column in older])
    file.close()
    found = read_table(tmp_path / "tensors", TENSORS)
    assert (found.problem, found.unread) == (None, 0)
    table = found.table
    assert table.names == [column.name for column in TENSORS]
    for row in range(3):
        assert table.row(row) == {name: None if name in later else cell for name, cell in whole[row].items()}
    assert (table["sampled"].tolist(), np.isnan(table["mean"]).all()) == ([-1] * 3, True)
    assert not any(table.valid(name).any() for name in later)
    assert Statistics.of(table.row(0)) == bad._replace(mean=None, first_bad=None, first_bad_value=None)


def test_a_column_that_no_version_lacks_is_missed(tmp_path: Path, tensor: Callable[..., Tensor]) -> None:
    older = tuple(column for column in TENSORS if column.name != "path")
    cells = of_tensors([tensor()], [None])
    file = BatchFile(tmp_path / "tensors", older)
    file.append([cell for cell, column in zip(cells, TENSORS, strict=True) if column.name != "path"])
    file.close()
    found = read_table(tmp_path / "tensors", TENSORS)
    assert (len(found.table), found.problem) == (0, "its columns are not those of this format version (path)")


def test_a_file_with_other_columns_is_refused(tmp_path: Path, call: Callable[..., Call]) -> None:
    write(tmp_path / "calls", CALLS, of_calls([call()]))
    found = read_table(tmp_path / "calls", TENSORS)
    assert len(found.table) == 0
    assert found.problem is not None
    assert "its columns are not those of this format version" in found.problem


def test_bytes_that_are_no_arrow_are_unread(tmp_path: Path) -> None:
    for content in (b"", b"x", b"\xff" * 4096, bytes(4096), b"\xff\xff\xff\xff\x08\0\0\0" + b"\x07" * 64):
        (tmp_path / "calls").write_bytes(content)
        found = read_table(tmp_path / "calls", CALLS)
        assert (len(found.table), found.unread) == (0, len(content))


def test_damage_in_the_middle_never_raises(tmp_path: Path, tensor: Callable[..., Tensor]) -> None:
    rows = [tensor(seq) for seq in range(20)]
    parts = [of_tensors(rows[i : i + 5], [None] * 5) for i in range(0, 20, 5)]
    write(tmp_path / "tensors", TENSORS, *parts)
    whole = (tmp_path / "tensors").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(500):
        at = int(random.integers(len(whole)))
        damaged = whole[:at] + bytes(random.integers(0, 256, 8, np.uint8)) + whole[at + 8 :]
        (tmp_path / "tensors").write_bytes(damaged)
        assert len(read_table(tmp_path / "tensors", TENSORS).table) <= 20


def rewritten(path: Path, batches: Sequence[pyarrow.RecordBatch], **options: Any) -> None:
    with pyarrow.ipc.new_stream(path, batches[0].schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as stream:
        for batch in batches:
            stream.write_batch(batch)


def test_slices_of_a_table_come_back(tmp_path: Path) -> None:
    whole = write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS * 7))
    batch = pyarrow.ipc.open_stream(tmp_path / "calls").read_all().combine_chunks().to_batches()[0]
    rewritten(tmp_path / "sliced", [batch.slice(1, 9), batch.slice(10, 1), batch.slice(11)])
    found = read_table(tmp_path / "sliced", CALLS)
    assert (found.problem, found.unread) == (None, 0)
    assert calls_of(found.table) == calls_of(whole)[1:]


def test_offsets_that_do_not_begin_at_zero_and_padded_data(tmp_path: Path) -> None:
    """What Arrow allows of a column: data before its first string and behind its last, and bytes under a null."""
    texts = ["wrong", "<root>", "fc", "hidden", "fc", "more"]
    data = pyarrow.py_buffer("".join(texts).encode())
    edges = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    offsets = pyarrow.py_buffer(edges[1:6].tobytes() + bytes(40))
    valid = pyarrow.py_buffer(bytes([0b1011]))
    args = pyarrow.StringArray.from_buffers(4, offsets, data, valid, null_count=1)
    sites = pyarrow.StringArray.from_buffers(4, offsets, data)
    rows = [Call(seq, 0, 0, "module", "?", "Net", 0, "forward", args="?") for seq in range(4)]
    write(tmp_path / "calls", CALLS, of_calls(rows))
    batch = pyarrow.ipc.open_stream(tmp_path / "calls").read_all().combine_chunks().to_batches()[0]
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True)) | {"args": args, "site": sites}
    changed = pyarrow.RecordBatch.from_arrays(list(arrays.values()), schema=batch.schema)
    rewritten(tmp_path / "padded", [changed, batch, changed])
    found = read_table(tmp_path / "padded", CALLS)
    assert found.problem is None
    assert found.table["site"].tolist() == [*texts[1:5], "?", "?", "?", "?", *texts[1:5]]
    assert found.table["args"].tolist() == ["<root>", "fc", None, "fc", "?", "?", "?", "?", "<root>", "fc", None, "fc"]


def test_buffers_whose_sizes_count_their_padding(tmp_path: Path) -> None:
    """Some writers say of a buffer how long it is with the bytes that align the next."""
    expected = write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS), of_calls(CALL_ROWS[:2]))
    data = bytearray((tmp_path / "calls").read_bytes())
    with (tmp_path / "calls").open("rb") as file:
        found = list(IpcStream(file.fileno()).batches())
    for batch in found:
        at = data.index(batch.extents.tobytes())
        extents = batch.extents.copy()
        extents[:-1, 1] = np.where(extents[:-1, 1] > 0, np.diff(extents[:, 0]), 0)
        assert (extents != batch.extents).any()
        data[at : at + extents.nbytes] = extents.tobytes()
    (tmp_path / "calls").write_bytes(data)
    read = read_table(tmp_path / "calls", CALLS)
    assert read.problem is None
    assert calls_of(read.table) == calls_of(expected)


def test_compressed_batches_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS))
    batch = pyarrow.ipc.open_stream(tmp_path / "calls").read_all().combine_chunks().to_batches()[0]
    rewritten(tmp_path / "small", [batch], compression="zstd")
    found = read_table(tmp_path / "small", CALLS)
    assert (len(found.table), found.problem) == (0, "its batches are compressed")


def test_sizes_beyond_all_numbers(tmp_path: Path) -> None:
    write(tmp_path / "calls", CALLS, of_calls(CALL_ROWS))
    data = bytearray((tmp_path / "calls").read_bytes())
    with (tmp_path / "calls").open("rb") as file:
        extents = next(IpcStream(file.fileno()).batches()).extents
    at = data.index(extents.tobytes())
    for number in (1, 5, len(extents) - 1):
        damaged = extents.copy()
        damaged[number, 1] = 2**63 - 1  # which, added to where it begins, is less than nothing
        data[at : at + extents.nbytes] = damaged.tobytes()
        (tmp_path / "calls").write_bytes(data)
        found = read_table(tmp_path / "calls", CALLS)
        assert len(found.table) == 0
        assert found.unread > 0
