"""Writing bytes: by several threads, buffered and direct, from any memory; and failures of the disk."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from astray.store.deferred import PAGE, BytePiece, TensorBytes
from astray.store.run_format import disk_io as disk
from astray.store.run_format.disk_io import DiskFile, WriteJob, WriterThreads
from astray.store.run_format.shard_file import TensorBytesReader, shard_name
from astray.store.writing import values_writer
from astray.store.writing.buffer_pool import BufferPool
from astray.store.writing.values_writer import ValuesWriter, WriteModeChooser


class Owner:
    """The listener of write requests."""

    def finish(self, job: WriteJob) -> None: ...


def pages(size: int, seed: int = 0, shift: int = 0) -> memoryview:
    """Bytes that begin `shift` after a page does."""
    memory = np.frombuffer(mmap.mmap(-1, size + PAGE), np.uint8)[shift : shift + size]
    memory[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory.data


def written(path: Path, buffers: list[memoryview], offset: int, direct: bool) -> bytes:
    """What a file holds, from `offset` on, after a job has put these buffers there."""
    size = sum(buffer.nbytes for buffer in buffers)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(descriptor, offset + size + 3 * PAGE)
    file = DiskFile(descriptor, path)
    job = WriteJob(file, offset, direct, Owner())
    for buffer in buffers:
        job.add(values_of(buffer), BytePiece(buffer), job.end)
    pool = WriterThreads(1)
    pool.submit(job)
    assert pool.done.get() is job
    pool.close()
    file.close()
    assert job.error is None
    data = path.read_bytes()
    assert len(data) == offset + size + 3 * PAGE
    assert not any(data[:offset])
    assert not any(data[offset + size :])
    return data[offset : offset + size]


def values_of(data: memoryview, name: str = "x") -> TensorBytes:
    return TensorBytes(data, name, "uint8", (data.nbytes,))


def test_buffered_bytes_of_one_file_come_from_one_thread_at_a_time(tmp_path: Path) -> None:
    files = [DiskFile(os.open(tmp_path / name, os.O_RDWR | os.O_CREAT), tmp_path / name) for name in "ab"]
    reached, go_on, begun = threading.Event(), threading.Event(), []

    def wait() -> None:
        reached.set()
        go_on.wait()

    pool, data = WriterThreads(3), memoryview(bytes(PAGE))
    jobs = [WriteJob(file, offset, False, Owner()) for file, offset in ((files[0], 0), (files[0], PAGE), (files[1], 0))]
    for job, ready in zip(jobs, (wait, lambda: begun.append("second"), lambda: begun.append("other")), strict=True):
        job.add(values_of(data), BytePiece(data, ready), job.end)
        pool.submit(job)
    reached.wait()
    assert pool.done.get(timeout=60) is jobs[2]  # of the other file, though it came last
    assert begun == ["other"]
    go_on.set()
    assert [pool.done.get(timeout=60) for _ in range(2)] == jobs[:2]
    pool.close()
    for file in files:
        file.close()
    assert [(tmp_path / name).stat().st_size for name in "ab"] == [2 * PAGE, PAGE]


MIXED = [
    [(1 << 20, 0)],
    [(1 << 20, 1)],
    [(PAGE, 0), (PAGE, 64), (3 * PAGE, 0)],
    [(70_001, 0), (100, 0), (70_001, 16), (1, 0)],
    [(0, 0), (PAGE - 1, 0)],
    [(10 << 20, 8), (PAGE, 0), (5, 0)],
    [(PAGE, 0)] * 1500,
    [(PAGE, 16)] * 1500,
]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("sizes", MIXED, ids=range(len(MIXED)))
def test_every_byte_goes_where_it_belongs(tmp_path: Path, sizes: list[tuple[int, int]], direct: bool) -> None:
    buffers = [pages(size, seed, shift) for seed, (size, shift) in enumerate(sizes)]
    assert written(tmp_path / "file", buffers, 8 * PAGE, direct) == b"".join(buffers)


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP, "half"])
def test_a_file_system_that_does_not_take_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int | str
) -> None:
    write = os.pwritev

    def refuse(file: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(file):
            if isinstance(answer, int):
                raise OSError(answer, os.strerror(answer))
            return write(file, [buffers[0][:PAGE]], offset)
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    buffers = [pages(70_001), pages(3 * PAGE, 1)]
    assert written(tmp_path / "file", buffers, 0, True) == b"".join(buffers)


def is_direct(file: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{file}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disk were far behind: direct writes, and several files at once."""
    monkeypatch.setattr(WriteModeChooser, "INITIAL_BYTES", 0)
    monkeypatch.setattr(values_writer, "SHARD_QUEUE_BYTES", 0)
    monkeypatch.setattr(values_writer, "BATCH_BYTES", 1 << 20)


def check(folder: Path, group: list[TensorBytes], expected: list[bytes]) -> None:
    """Both our reader and the safetensors library find every byte."""
    reader = TensorBytesReader(folder)
    for values, data in zip(group, expected, strict=True):
        assert values.blob is not None
        assert values.resolved
        assert values.data is None
        assert bytes(reader.read(values.blob)) == data
        with safe_open(folder / shard_name(values.blob.file), "np") as file:
            assert file.get_tensor(values.name).tobytes() == data


@pytest.mark.usefixtures("ahead")
def test_several_shards_are_filled_at_once(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path, shard_bytes=8 << 20, threads=4)
    sizes = [3, 70_000, 5 << 20, 64, 1 << 20, 0, 65_536, 17 << 20, 300_001] * 4
    data = [bytes(pages(size, seed)) for seed, size in enumerate(sizes)]
    group = [values_of(memoryview(each), str(seq)) for seq, each in enumerate(data)]
    writer.write(group[:20])
    writer.write(group[20:])
    writer.drain()
    check(tmp_path, group, data)  # before they are cut, and after
    writer.close()
    check(tmp_path, group, data)
    assert (writer.count, writer.nbytes) == (len(sizes), sum(sizes))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("astray-writer")]


def test_a_few_values_make_one_file(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    for seq in range(20):
        writer.write([values_of(pages(1 << 20), str(seq))])
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == [shard_name(0)]


def test_large_tensors_begin_on_a_page(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    group = [values_of(pages(size), str(seq)) for seq, size in enumerate([10, 65_536, 10, 65_537, 65_535])]
    writer.write(group)
    writer.close()
    offsets = [values.blob.offset - (128 << 10) for values in group if values.blob]
    assert offsets == [0, 4096, 69_632, 73_728, 73_728 + 65_600]


def test_the_memory_of_written_values_is_reported(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    free: list[int] = []
    woken = threading.Event()
    writer.connect(woken.set, free.append, print)
    writer.write([values_of(pages(100)), values_of(pages(200))])
    assert woken.wait(10)
    writer.drain()
    assert free == [300]
    writer.close()


class Late:
    """A source whose pieces come later, or never."""

    held = 0

    def __init__(self, pieces: list[BytePiece], failure: str | None = None) -> None:
        self.nbytes = sum(piece.data.nbytes for piece in pieces)
        self.released = 0
        self._pieces = pieces
        self._failure = failure

    def pieces(self) -> Iterator[BytePiece | None]:
        for piece in self._pieces:
            yield from (piece, None, None)
        if self._failure:
            raise RuntimeError(self._failure)

    def finish(self, on_piece: Callable[[], None]) -> None: ...

    def release(self) -> None:
        self.released += 1


def late(data: list[memoryview], calls: list[str]) -> Late:
    return Late([BytePiece(each, lambda: calls.append("ready"), lambda: calls.append("release")) for each in data])


def test_pieces_are_waited_for_and_given_back(tmp_path: Path) -> None:
    writer = ValuesWriter(tmp_path)
    calls: list[str] = []
    data = [pages(2 * PAGE), pages(5000, 1), pages(3, 2)]
    source = late(data, calls)
    group = [values_of(pages(7)), TensorBytes(source, "late", "uint8", (source.nbytes,)), values_of(pages(9), "y")]
    expected = [bytes(pages(7)), b"".join(data), bytes(pages(9))]
    writer.write(group)
    assert writer.has_partial
    while writer.has_partial:
        writer.collect()
    writer.drain()
    writer.close()
    check(tmp_path, group, expected)
    assert sorted(calls) == ["ready"] * 3 + ["release"] * 3
    assert source.released == 1


@pytest.mark.parametrize("way", ["a piece", "the source"])
def test_bytes_that_never_come_leave_a_hole_and_a_reason(tmp_path: Path, way: str) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    writer = ValuesWriter(tmp_path)
    reasons: list[str] = []
    writer.connect(lambda: None, lambda size: None, reasons.append)
    released: list[int] = []
    pieces = [BytePiece(pages(PAGE), fail if way == "a piece" else None, lambda: released.append(1))]
    source = Late(pieces, None if way == "a piece" else "the device is gone")
    lost = TensorBytes(source, "lost", "uint8", (PAGE,))
    before, after = values_of(pages(100), "before"), values_of(pages(70_000, 1), "after")
    writer.write([before, lost, after])
    while writer.has_partial:
        writer.collect()
    writer.drain()
    writer.close()
    assert lost.resolved
    assert lost.blob is None
    assert reasons == ["RuntimeError: the device is gone"]
    assert released == [1]
    check(tmp_path, [before, after], [bytes(pages(100)), bytes(pages(70_000, 1))])
    with safe_open(tmp_path / shard_name(0), "np") as file:
        assert {name for name in file.keys() if not name.startswith("__pad")} == {"before", "after"}  # noqa: SIM118
    assert writer.count == 2


def write_and_wait(writer: ValuesWriter, group: list[TensorBytes]) -> None:
    writer.write(group)
    writer.drain()


@pytest.mark.usefixtures("ahead")
def test_what_a_full_disk_did_not_take_is_resolved_without_a_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ValuesWriter(tmp_path, threads=2)
    free: list[int] = []
    writer.connect(lambda: None, free.append, print)
    first = values_of(pages(1 << 20), "first")
    writer.write([first])
    writer.drain()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwritev", full)
    group = [values_of(pages(1 << 20), str(seq)) for seq in range(6)]
    with pytest.raises(OSError, match="No space left"):
        write_and_wait(writer, group)
    writer.abandon()
    monkeypatch.undo()
    assert [(values.resolved, values.blob) for values in group] == [(True, None)] * 6
    assert sum(free) == 7 << 20
    writer.close()
    check(tmp_path, [first], [bytes(pages(1 << 20))])


def test_the_faster_mode_is_chosen_and_both_are_measured_again() -> None:
    mode = WriteModeChooser()
    speed = {False: 1.0, True: 3.0}
    ways = []
    for step in range(4000):
        if step == 2000:
            speed = {False: 1.0, True: 0.5}
        way = mode.choose(1 << 24)
        ways.append(way)
        mode.record(way, 1 << 24, 1 / speed[way])
    assert not any(ways[:2])
    assert all(ways[2:120])
    assert sum(ways[2:2000]) > 0.98 * 1998
    assert sum(ways[2010:]) < 0.02 * 1990
    assert any(ways[2100:])  # it is tried once in a while


def test_a_mode_that_is_not_available_is_never_chosen() -> None:
    mode = WriteModeChooser()
    mode.disable_direct()
    assert not any(mode.choose(1 << 26) for _ in range(100))


def test_rooms_are_used_again_and_bounded() -> None:
    pool = BufferPool(1 << 20)
    buffer = pool.take(300_000)
    address = buffer.array.ctypes.data
    assert address % PAGE == 0
    assert buffer.array.nbytes == buffer.nbytes == buffer.held == 300_000
    buffer.release()
    buffer.release()
    again, other = pool.take(310_000), pool.take(300_000)
    assert again.array.ctypes.data == address != other.array.ctypes.data
    again.release()
    other.release()
    for size in (700_000, 700_000, 500_000, 2 << 20):
        pool.take(size).release()
        assert pool._kept == sum(size * len(free) for size, free in pool._free.items()) <= 1 << 20
    pool.close()
    assert pool._kept == 0
