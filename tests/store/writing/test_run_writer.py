"""The writer from the program's side: its guarantees to a program that goes on, waits, forks, fails or ends."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from safetensors import safe_open

from astray.records import Call, Frame, MissedTensor, Tensor
from astray.store import RunInfo, RunWriter, open_run
from astray.store.run_format import disk_io as disk_module
from astray.store.run_format.rows import PythonRowBuffer
from astray.store.writing import record_queue as backlog_module

MakeCall = Callable[..., Call]
MakeTensor = Callable[..., Tensor]


def test_everything_comes_back(tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor) -> None:
    frames = [Frame("naïve.py", 12, "forward", "return 層(x)"), Frame("train.py", 3, "<module>", "")]
    writer = RunWriter(tmp_path, info=info)
    writer.stack(5, frames)
    writer.call(call(0, stack=5))
    writer.tensor(tensor(0, role="input"), np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.tensor(tensor(0))
    writer.missed("fc.weight", "it has no gradient")
    writer.missed("fc.weight", "it has no gradient")
    writer.missed("values", "the budget was spent", 40)
    writer.missed("values", "the budget was spent", 2)
    writer.missed("café\udce9", "odd")
    assert writer.end is None
    writer.close()
    run = open_run(tmp_path)
    assert writer.end == run.ranks[0].end
    rank = run.ranks[0]
    assert run.complete
    assert run.problems == []
    assert run.info == info
    assert rank.stack(5) == frames
    assert rank.stack(6) == []
    assert rank.values(0).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rank.values(1) is None
    assert rank.tensors["role"].tolist() == ["input", "output"]
    end = rank.end
    assert end is not None
    assert end.missed == [
        MissedTensor("fc.weight", "it has no gradient", 2),
        MissedTensor("values", "the budget was spent", 42),
        MissedTensor("café?", "odd", 1),
    ]
    assert (end.steps, end.calls, end.tensors, end.stacks, end.values, end.value_bytes) == (1, 1, 2, 1, 1, 24)
    assert (end.ended, end.failure, end.waited_seconds) == ("normally", None, 0)


VALUES = {
    "float32": np.array([[1.5, np.nan], [np.inf, -0.0]], np.float32),
    "float64": np.array(2.5),
    "bfloat16": np.array([0x3F80, 0x7FC0], np.uint16),
    "float8_e4m3fn": np.array([0x38, 0x7F], np.uint8),
    "float8_e5m2": np.array([[0x3C]], np.uint8),
    "bool": np.array([True, False]),
    "int64": np.zeros((0, 3), np.int64),
    "uint8": np.arange(5, dtype=np.uint8),
    "complex64": np.array([1 + 2j], np.complex64),
    "complex128": np.array([[1 + 2j, np.nan * 1j]]),
}


@pytest.mark.parametrize("dtype", VALUES)
def test_values_of_every_kind(tmp_path: Path, info: RunInfo, tensor: MakeTensor, dtype: str) -> None:
    array = VALUES[dtype]
    with RunWriter(tmp_path, info=info) as writer:
        writer.tensor(tensor(dtype=dtype, shape=array.shape), array.copy())
    found = open_run(tmp_path).values(0, 0)
    assert found is not None
    assert found.shape == array.shape
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


def test_buffers_of_any_make(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    row = tensor(dtype="uint8", shape=(4,))
    with RunWriter(tmp_path, info=info) as writer:
        for buffer in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), np.frombuffer(b"abcd", np.uint16)):
            writer.tensor(row, buffer)
        with pytest.raises(ValueError, match="contiguous"):
            writer.tensor(row, np.zeros((4, 4), np.uint8)[:, 0])
    run = open_run(tmp_path)
    assert [run.values(0, i).tobytes() for i in range(4)] == [b"abcd"] * 4


def test_a_big_tensor_and_a_sample_of_one(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    big = np.arange(3 << 20, dtype=np.int64)
    with RunWriter(tmp_path, info=info, queue_bytes=1 << 20, shard_bytes=1 << 20) as writer:
        writer.tensor(tensor(0, dtype="int64", shape=big.shape), big)
        writer.tensor(tensor(1, dtype="int64", shape=big.shape), big[:10].copy(), sampled=10)
    run = open_run(tmp_path)
    assert np.array_equal(run.values(0, 0), big)
    assert run.values(0, 1).tolist() == list(range(10))
    assert run.ranks[0].tensors["sampled"].tolist() == [-1, 10]


def test_a_slice_is_stored_in_its_own_shape(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    with RunWriter(tmp_path, info=info) as writer:
        slice_ = writer.values(whole[0:1, ..., :2].copy(), "0.output.0", "float32", (1, 3, 2), part="0:1, ..., :2")
        writer.tensor(tensor(0, shape=whole.shape), slice_)
        writer.tensor(tensor(1, shape=whole.shape), whole[1:].copy(), part="1:")
        writer.tensor(tensor(2, shape=whole.shape), whole[1, 0, ::2].copy(), sampled=2, part="1:")
    with safe_open(tmp_path / "rank0" / "values-00000.safetensors", "np") as file:
        assert file.get_slice("0.output.0").get_shape() == [1, 3, 2]
        assert np.array_equal(file.get_tensor("0.output.0"), whole[0:1, ..., :2])
        assert np.array_equal(file.get_tensor("1.output.0"), whole[1:])
        assert file.get_tensor("2.output.0").tolist() == [12, 14]
    tensors = open_run(tmp_path).ranks[0].tensors
    assert tensors["part"].tolist() == ["0:1, ..., :2", "1:", "1:"]
    assert tensors["sampled"].tolist() == [-1, -1, 2]
    assert slice_.blob is not None
    assert (slice_.blob.part, slice_.blob.sampled) == ("0:1, ..., :2", None)


def test_a_tensor_seen_by_several_calls_is_stored_once(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        seen = writer.values(np.arange(6, dtype=np.float32), "0.output.0", "float32", (2, 3))
        writer.tensor(tensor(0), seen)
        writer.flush()  # written already: the second row still knows where
        writer.tensor(tensor(1, role="input"), seen)
    run = open_run(tmp_path)
    tensors = run.ranks[0].tensors
    assert tensors["blob_offset"][0] == tensors["blob_offset"][1]
    assert np.array_equal(run.values(0, 0), run.values(0, 1))
    assert run.ranks[0].end.values == 1


def test_an_empty_run(tmp_path: Path, info: RunInfo) -> None:
    RunWriter(tmp_path, info=info).close()
    run = open_run(tmp_path)
    assert run.complete
    assert run.steps == []
    assert repr(run) == f"<Run {tmp_path}: torch, 0 steps, 1 rank, 0 calls, 0 tensors, complete>"


def test_other_tools_read_the_files_while_they_are_written(
    tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor
) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        for seq in range(20):
            writer.call(call(seq))
            writer.tensor(tensor(seq), np.full((2, 3), seq, np.float32))
            assert writer.flush()
            folder = tmp_path / "rank0"
            assert pyarrow.ipc.open_stream(folder / "calls.arrows").read_all()["seq"].to_pylist()[-1] == seq
            assert pyarrow.ipc.open_stream(folder / "tensors.arrows").read_all()["seq"].to_pylist()[-1] == seq
            with safe_open(folder / "values-00000.safetensors", "np") as file:
                assert file.get_tensor(f"{seq}.output.0").tolist() == [[seq] * 3] * 2
            assert open_run(tmp_path).values(0, seq).tolist() == [[seq] * 3] * 2


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something the writer does in its own time."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_rows_reach_the_file_by_themselves(tmp_path: Path, info: RunInfo, call: MakeCall) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        writer.call(call(0))
        eventually(lambda: len(open_run(tmp_path).ranks[0].calls) == 1)
        writer.call(call(1))
        writer.step_done()
        eventually(lambda: len(open_run(tmp_path).ranks[0].calls) == 2)


def test_threads_write_at_once(tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor) -> None:
    def work(start: int) -> None:
        for seq in range(start, start + 500):
            writer.call(call(seq))
            writer.tensor(tensor(seq, dtype="int64", shape=(50,)), np.full(50, seq))
            writer.missed("x", "y")

    with RunWriter(tmp_path, info=info, queue_bytes=1 << 16) as writer:
        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rank = open_run(tmp_path).ranks[0]
    sequence = rank.tensors["seq"]
    assert len(sequence) == len(rank.calls) == 4000
    for start in range(0, 8000, 1000):  # each thread's own order is kept
        assert sequence[sequence // 1000 == start // 1000].tolist() == list(range(start, start + 500))
    assert all((rank.values(row) == sequence[row]).all() for row in range(4000))
    assert rank.end.missed == [MissedTensor("x", "y", 4000)]


def test_two_writers_at_once(tmp_path: Path, info: RunInfo, call: MakeCall) -> None:
    with RunWriter(tmp_path / "a", info=info) as a, RunWriter(tmp_path / "b", info=info) as b:
        a.call(call(0))
        b.call(call(1))
        a.call(call(2))
    assert open_run(tmp_path / "a").ranks[0].calls["seq"].tolist() == [0, 2]
    assert open_run(tmp_path / "b").ranks[0].calls["seq"].tolist() == [1]


def test_ranks_in_processes_share_a_folder(tmp_path: Path, program: Callable[..., subprocess.Popen[str]]) -> None:
    processes = [program("ranks.py", tmp_path / "run", rank, 4) for rank in (3, 1, 0, 2)]
    assert [process.communicate(timeout=60) and process.returncode for process in processes] == [0, 0, 0, 0]
    run = open_run(tmp_path / "run")
    assert run.complete
    assert run.problems == []
    assert list(run.ranks) == [0, 1, 2, 3]
    assert all(run.values(rank, row)[0] == 1000 * rank + row for rank in run.ranks for row in range(200))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes about 500 MB/s."""
    write = disk_module.write_all

    def slowly(file: int, buffers: list[memoryview], offset: int) -> None:
        time.sleep(sum(buffer.nbytes for buffer in buffers) / 500e6)
        write(file, buffers, offset)

    monkeypatch.setattr(disk_module, "write_all", slowly)


@pytest.mark.usefixtures("slow_disk")
def test_a_slow_disk_makes_the_program_wait_and_not_grow(tmp_path: Path, info: RunInfo, tensor: MakeTensor) -> None:
    megabyte = 1 << 20
    tracemalloc.start()
    with RunWriter(tmp_path, info=info, queue_bytes=8 * megabyte) as writer:
        for seq in range(128):
            writer.tensor(tensor(seq, dtype="uint8", shape=(megabyte,)), np.full(megabyte, seq, np.uint8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * megabyte
    run = open_run(tmp_path)
    assert run.ranks[0].end.waited_seconds > 0
    assert all((run.values(0, row)[::4096] == row).all() for row in range(128))


def test_rows_are_bounded_too(tmp_path: Path, info: RunInfo, call: MakeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "BATCH_ROWS", 64)
    monkeypatch.setattr(backlog_module, "QUEUE_ROWS", 256)
    with RunWriter(tmp_path, info=info) as writer:
        for seq in range(20_000):
            writer.call(call(seq))
            assert len(writer._queue.calls) <= 256
    assert open_run(tmp_path).ranks[0].calls["seq"].tolist() == list(range(20_000))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_recording_and_not_the_program(small_disk: Path, run_program: Callable[..., str]) -> None:
    last, failure = run_program("full_disk.py", small_disk / "run", 0, "values").splitlines()
    assert last == "63"
    assert failure.startswith(f"Recording into {small_disk / 'run' / 'rank0'} stopped: No space left on device. ")
    check_what_is_left(small_disk / "run", 4)


@pytest.mark.parametrize("kept", ["values", "rows"])
def test_a_file_size_limit_stops_the_recording_and_not_the_program(
    tmp_path: Path, run_program: Callable[..., str], kept: str
) -> None:
    last, failure = run_program("full_disk.py", tmp_path / "run", 1 << 20, kept).splitlines()
    assert last == "63"
    assert failure.startswith(f"Recording into {tmp_path / 'run' / 'rank0'} stopped: File too large: files may have 1,")
    check_what_is_left(tmp_path / "run", 1)


def check_what_is_left(path: Path, least: int) -> None:
    run = open_run(path)
    rank = run.ranks[0]
    assert not run.complete
    assert any("stopped" in text for text in run.problems)
    assert len(rank.tensors) >= least
    for row, kept in enumerate(rank.tensors.valid("blob_file").tolist()):
        assert not kept or (rank.values(row) == rank.tensors["seq"][row]).all()


def test_a_removed_folder_stops_the_recording_and_not_the_program(
    tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor
) -> None:
    writer = RunWriter(tmp_path / "run", info=info)
    shutil.rmtree(tmp_path / "run")
    writer.call(call(0))
    writer.tensor(tensor(0), np.zeros(6, np.float32))
    assert not writer.flush()
    assert writer.failure is not None
    assert "stopped: No such file or directory" in writer.failure
    writer.call(call(1))
    writer.tensor(tensor(1), np.zeros(6, np.float32))
    assert not writer.flush()
    writer.close()


def test_a_record_that_makes_no_sense_is_refused(tmp_path: Path, info: RunInfo, call: MakeCall) -> None:
    with RunWriter(tmp_path, info=info) as writer:
        writer.call(call(0))
        with pytest.raises(TypeError, match="is None, in a column without nulls"):
            writer.call(call(1, site=None))
        writer.call(call(2))
    run = open_run(tmp_path)
    assert (run.complete, run.problems) == (True, [])
    assert run.ranks[0].calls["seq"].tolist() == [0, 2]


def test_without_the_native_extension_it_stops_the_recording(
    tmp_path: Path, info: RunInfo, call: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astray.store.run_format.rows.RowBuffer", PythonRowBuffer)
    writer = RunWriter(tmp_path, info=info)
    writer.call(call(0))
    writer.flush()
    writer.call(call(1, site=None))
    assert not writer.flush()
    writer.close()
    assert writer.failure is not None
    run = open_run(tmp_path)
    assert not run.complete
    assert run.problems == [writer.failure]
    assert run.ranks[0].calls["seq"].tolist() == [0]


def test_after_closing_nothing_happens(tmp_path: Path, info: RunInfo, call: MakeCall, tensor: MakeTensor) -> None:
    writer = RunWriter(tmp_path, info=info)
    writer.close()
    writer.call(call(0))
    writer.tensor(tensor(0), np.zeros(6, np.float32))
    writer.stack(0, [])
    writer.missed("a", "b")
    writer.step_done()
    assert not writer.flush()
    writer.close("again")
    run = open_run(tmp_path)
    assert len(run.ranks[0].calls) == len(run.ranks[0].tensors) == 0
    assert run.ranks[0].end.ended == "normally"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("astray-writer")]


def test_forked_children_leave_it_alone(tmp_path: Path, run_program: Callable[..., str]) -> None:
    assert run_program("forks.py", tmp_path) == "done\n"
    run = open_run(tmp_path)
    assert run.complete
    assert run.ranks[0].end.missed == []
    assert run.ranks[0].end.ended == "normally"
    assert run.ranks[0].tensors["seq"].tolist() == list(range(2000))
    assert all((run.values(0, row) == row).all() for row in range(2000))


@pytest.mark.parametrize(
    ("way", "complete", "problem"),
    [
        ("falls off the end", True, "ended without closing the recording."),
        ("raises", True, "ended with ValueError: loss is NaN."),
        ("exits hard", False, "the recording was stopped before it ended."),
    ],
)
def test_how_the_program_ended(
    tmp_path: Path, run_program: Callable[..., str], way: str, complete: bool, problem: str
) -> None:
    run_program("ends.py", tmp_path, way)
    run = open_run(tmp_path)
    assert len(run.ranks[0].calls) == 1
    assert run.complete == complete
    assert [text.endswith(problem) for text in run.problems] == [True]
