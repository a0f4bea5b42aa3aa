"""A run, opened: finding tensors, joining tables, handing them to other tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from astray.errors import RunError
from astray.records import Call, Key, Tensor
from astray.store import RunData, RunInfo, RunWriter, open_run
from astray.web.detail import detail_of
from astray.web.views import RunView
from record_builders import Builder

KEY = Key(1, 0, "layers.2", 0, "forward", "output", "0")


def test_it_says_what_it_is(small_run: RunData) -> None:
    assert repr(small_run) == f"<Run {small_run.path}: torch, 2 steps, 1 rank, 8 calls, 8 tensors, complete>"
    assert small_run.steps == [0, 1]
    assert (small_run.complete, small_run.problems) == (True, [])
    assert small_run.info.versions == {"torch": "2.13"}


def test_a_tensor_by_its_key(small_run: RunData) -> None:
    found = small_run.tensor(KEY)
    assert found.dtype == np.float32
    assert found.tolist() == [[6, 6, 6], [6, 6, 6]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": "layer.2"}, r"there is no site 'layer\.2'\. Nearest: 'layers\.2', "),
        ({"step": 7}, r"there is no step 7; recorded: 0–1\."),
        ({"micro": 3}, r"there is no micro 3; recorded: only 0\."),
        ({"phase": "backward"}, r"there is no phase 'backward'\. Nearest: 'forward'\."),
        ({"call": 1}, r"there is no call 1; recorded: only 0\."),
        ({"role": "input"}, r"there is no role 'input'\. Nearest: 'output'\."),
        ({"path": "1"}, r"there is no path '1'\. Nearest: '0'\."),
        ({"rank": 4}, r"has no rank 4; it has 0\."),
    ],
)
def test_what_is_there_instead(small_run: RunData, change: dict[str, object], message: str) -> None:
    with pytest.raises(RunError, match=message):
        small_run.tensor(KEY._replace(**change))  # type: ignore[arg-type]


def test_values_that_were_not_kept(
    tmp_path: Path, info: RunInfo, call: Callable[..., Call], tensor: Callable[..., Tensor]
) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        writer.call(call(0))
        writer.tensor(tensor(0))
    run = open_run(tmp_path)
    assert run.values(0, 0) is None
    with pytest.raises(RunError, match=r"no values of output 0 of layers\.0 .*Record with keep='tensors'\."):
        run.tensor(Key(0, 0, "layers.0", 0, "forward", "output", "0"))


def test_dtypes_that_numpy_lacks_are_widened(tmp_path: Path, info: RunInfo, tensor: Callable[..., Tensor]) -> None:
    stored = {
        "bfloat16": (np.array([0x3FC0], np.uint16), np.array([1.5], np.float32)),
        "float8_e4m3fn": (np.array([0x3C], np.uint8), np.array([1.5], np.float32)),
        "complex32": (np.array([1.5, -2.0], np.float16), np.array([1.5 - 2j], np.complex64)),
        "complex64": (np.array([1 + 2j], np.complex64), np.array([1 + 2j], np.complex64)),
        "int64": (np.array([2**60 + 1]), np.array([2**60 + 1])),
        "bool": (np.array([True]), np.array([True])),
    }
    with RunWriter(tmp_path, info=info) as writer:
        for seq, (dtype, (raw, _)) in enumerate(stored.items()):
            writer.call(Call(seq, 0, 0, "op", dtype, "", 0, "forward"))
            writer.tensor(tensor(seq, dtype=dtype, shape=(1,)), raw)
    run = open_run(tmp_path)
    for dtype, (_, expected) in stored.items():
        found = run.tensor(Key(0, 0, dtype, 0, "forward", "output", "0"))
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


def test_a_slice_has_its_own_shape(tmp_path: Path, info: RunInfo, tensor: Callable[..., Tensor]) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    part = whole[0:1, ..., 1:3]
    with RunWriter(tmp_path, info=info) as writer:
        writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
        writer.tensor(tensor(0, shape=whole.shape), part.copy(), part="0:1, ..., 1:3")
        writer.tensor(tensor(0, shape=whole.shape, path="1"), part.reshape(-1)[:4].copy(), 4, "0:1, ..., 1:3")
        writer.tensor(tensor(0, shape=(3,), path="2"), whole[0, :, 0].copy(), part=":8")
        writer.tensor(tensor(0, shape=whole.shape, path="3"), np.zeros((0, 3, 4), np.float32), part="5:6")
        writer.tensor(tensor(0, shape=whole.shape, path="4"), part.copy(), part="0:1, ..., :4")
        writer.tensor(
            tensor(0, shape=whole.shape, path="5"), writer.values(part.copy(), "0", "float32", part.shape, None, "x")
        )
    run = open_run(tmp_path)
    found = [run.tensor(Key(0, 0, "fc", 0, "forward", "output", str(path))) for path in range(4)]
    assert np.array_equal(found[0], part)
    assert found[1].tolist() == [1, 2, 5, 6]
    assert found[2].tolist() == [0, 4, 8]
    assert found[3].shape == (0, 3, 4)
    parts = ["0:1, ..., 1:3", "0:1, ..., 1:3", ":8", "5:6", "0:1, ..., :4", "x"]
    assert run.ranks[0].tensors["part"].tolist() == parts
    assert run.ranks[0].tensors["shape"].tolist() == [(2, 3, 4), (2, 3, 4), (3,), *[(2, 3, 4)] * 3]
    with pytest.raises(RunError, match=r"Row 4 of rank 0 keeps 24 bytes, which is not float32 of shape \[1, 3, 4\]\."):
        run.values(0, 4)
    with pytest.raises(RunError, match=r"Row 5 of rank 0 keeps a part that cannot be read: 'x' is not a part"):
        run.values(0, 5)


def test_the_first_run_of_a_recomputed_call_is_meant(
    tmp_path: Path, info: RunInfo, call: Callable[..., Call], tensor: Callable[..., Tensor]
) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        for seq, again in enumerate([True, False, True]):
            writer.call(call(0)._replace(seq=seq, recompute=again))
            writer.tensor(tensor(seq, shape=(1,)), np.array([seq], np.float32))
    assert open_run(tmp_path).tensor(Key(0, 0, "layers.0", 0, "forward", "output", "0")).tolist() == [1]


def test_calls_of_tensors(
    tmp_path: Path, info: RunInfo, call: Callable[..., Call], tensor: Callable[..., Tensor]
) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        for seq in (5, 3, 9):  # in no order: a call's row may come after those inside it
            writer.call(call(seq))
        for seq in (3, 9, 4, 5, 10):
            writer.tensor(tensor(seq))
    run = open_run(tmp_path)
    assert run.ranks[0].call_rows.tolist() == [1, 2, -1, 0, -1]
    assert run.problems == ["2 of 5 tensors belong to calls whose rows are not there."]
    joined = pyarrow.table(run.table())
    assert joined["seq"].to_pylist() == [3, 9, 4, 5, 10]
    assert joined["site"].to_pylist() == ["layers.3", "layers.1", None, "layers.1", None]


def test_tensors_without_any_call(tmp_path: Path, info: RunInfo, tensor: Callable[..., Tensor]) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        writer.tensor(tensor(0))
    run = open_run(tmp_path)
    assert run.steps == []
    assert pyarrow.table(run.table())["step"].to_pylist() == [None]
    with pytest.raises(RunError, match="no tensors were recorded"):
        run.tensor(KEY)


def test_the_joined_table(tmp_path: Path, info: RunInfo, tensor: Callable[..., Tensor]) -> None:
    for rank in range(2):
        with RunWriter(tmp_path, rank, info=info, world_size=2) as writer:
            writer.call(Call(0, 3, 1, "module", "naïve.層", "Linear", 2, "forward", None, None, "(…)", True))
            writer.tensor(tensor(0, note="ö" if rank else None, shape=(rank, 3), requires_grad=bool(rank)))
    run = open_run(tmp_path)
    table = pyarrow.table(run.table())
    table.validate(full=True)
    assert table.column_names == run.table().names
    assert table.column_names[:4] == ["rank", "seq", "step", "micro"]
    rows = table.to_pylist()
    for rank, row in enumerate(rows):
        calls, tensors = run.ranks[rank].calls.row(0), run.ranks[rank].tensors.row(0)
        assert row == {**calls, **tensors, "rank": rank, "shape": [rank, 3], "stride": [3, 1]}
    assert repr(run.table()) == "<RunTable: 2 tensors, 41 columns; pyarrow.table, polars.DataFrame and duckdb take it>"


def test_a_long_table_comes_in_pieces(tmp_path: Path, info: RunInfo, tensor: Callable[..., Tensor]) -> None:
    rows = 70_000
    with RunWriter(tmp_path, info=info) as writer:
        for seq in range(rows):
            writer.tensor(tensor(seq))
    assert pyarrow.table(open_run(tmp_path).table())["fingerprint"].to_pylist() == [2**64 - 1 - n for n in range(rows)]


def test_an_empty_run_joins_to_an_empty_table(tmp_path: Path, info: RunInfo) -> None:
    RunWriter(tmp_path, info=info).close()
    table = pyarrow.table(open_run(tmp_path).table())
    assert (table.num_rows, table.num_columns) == (0, 41)


def test_a_sample_of_more_elements_than_there_are() -> None:
    run = Builder(keep="stats,sample")
    run.tensor(run.call("h"), "output", "out", np.ones(6, np.float32))
    rows = run.rank()._tensors
    rows[0] = rows[0]._replace(shape=(2,), stride=(1,))
    with pytest.raises(RunError, match=r"keeps a sample of 4 elements, and there are 2: the run was damaged\."):
        run.run.ranks[0].values(0)
    assert detail_of(RunView(run.run), 0)["row"] == 0
