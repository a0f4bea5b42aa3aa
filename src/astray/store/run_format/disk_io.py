"""Writes bytes to files at the speed of the disk: several threads, and past the page cache where that is faster.

Each thread takes a `WriteJob`: buffers, and the offset in a file from which they are written one after the other. The
kernel takes bytes in two ways: buffered, where it copies them into memory and writes them later, and direct, where the
disk reads them from our memory. Which is faster depends on the disk, on how much memory is free and on how much was
written lately, so it is measured repeatedly (`WriteModeChooser` in `values_writer.py`). Direct writes need offsets,
addresses and lengths that are multiples of a page.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from astray.store.deferred import PAGE, BytePiece, TensorBytes

Bytes = npt.NDArray[np.uint8]

WRITEV_BUFFERS = 1024  # IOV_MAX on Linux
BOUNCE_BYTES = 4 << 20
"""Each thread's buffer for bytes that do not begin on a page."""

DIED = "a thread that writes values has died, perhaps for want of memory"
LOOK_SECONDS = 1.0  # how often a waiting caller checks that the threads are still alive

UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM)
"""Errors of file systems without direct writes, when the file is opened or only when it is written to."""


class DiskFile:
    """A file open for buffered and for direct writing. `direct` is None where the file system has no direct writes."""

    __slots__ = ("buffered", "direct", "refused")

    def __init__(self, buffered: int, path: Path) -> None:
        self.buffered = buffered
        self.direct: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # not every system has O_DIRECT
            self.direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self.refused = self.direct is None

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct is not None:
            os.close(self.direct)


class JobOwner(Protocol):
    """Submitted a job, and is called when it is done (`ShardBatch`)."""

    def finish(self, job: WriteJob) -> None: ...


class WriteJob:
    """Pieces that follow one another in a file.

    Once it is done, `error` is the error of the disk, and `lost` has the values whose bytes never arrived, and why.
    """

    __slots__ = ("direct", "end", "error", "file", "lost", "offset", "owner", "pieces", "seconds")

    def __init__(self, file: DiskFile, offset: int, direct: bool, owner: JobOwner) -> None:
        self.file = file
        self.offset = self.end = offset
        self.direct = direct
        self.owner = owner
        self.pieces: list[tuple[TensorBytes | None, BytePiece]] = []
        self.seconds = 0.0  # its share of the time, divided among the threads busy meanwhile
        self.error: Exception | None = None
        self.lost: dict[TensorBytes, str] = {}

    @property
    def nbytes(self) -> int:
        return self.end - self.offset

    def add(self, values: TensorBytes, piece: BytePiece, offset: int) -> None:
        """Append a piece that belongs at this offset; a gap before it is filled with zeros."""
        if offset > self.end:
            self._append(None, BytePiece(memoryview(bytes(offset - self.end))))
        self._append(values, piece)

    def _append(self, values: TensorBytes | None, piece: BytePiece) -> None:
        self.pieces.append((values, piece))
        self.end += piece.data.nbytes


class WriterThreads:
    """A pool of threads that write. They are started as needed; `next_done` returns every job that was submitted.

    A file takes buffered bytes from one thread at a time, so two threads never have such jobs of one file: the second
    would only wait, while there are bytes for other files. Apart from that, jobs are begun in their order.
    """

    def __init__(self, count: int, name: str = "astray-writer") -> None:
        self.done: SimpleQueue[WriteJob] = SimpleQueue()
        self.wake: Callable[[], None] = _no_op  # called after every job, in the thread that did it
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards all that follows
        self._jobs: deque[WriteJob] = deque()
        self._buffered_files: set[DiskFile] = set()  # files that a thread writes buffered bytes to
        self._unfinished = 0  # jobs
        self._active = 0  # threads that are writing now
        self._busy_threads = 0  # those that have a job
        self._open = True

    @property
    def has_done(self) -> bool:
        """Whether a job is done that `next_done` has not returned yet."""
        return not self.done.empty()

    def next_done(self) -> WriteJob:
        """The next job that is done. Waits for it while the threads are alive; else raises."""
        while True:
            with contextlib.suppress(Empty):
                return self.done.get(timeout=LOOK_SECONDS)
            self.check()
            if not self._busy_threads and not self._jobs and not self.has_done:
                raise RuntimeError(DIED)

    def check(self) -> None:
        """Raise when there are jobs and no thread to do them."""
        if self._jobs and not any(thread.is_alive() for thread in self._threads):
            raise RuntimeError(DIED)

    def submit(self, job: WriteJob) -> None:
        with self._changed:
            self._jobs.append(job)
            self._unfinished += 1
            self._changed.notify()
            needed = len(self._threads) < min(self._unfinished, self._count)
        if needed:
            self._add_thread()

    def close(self) -> None:
        """Wait for the submitted jobs, and end the threads."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._open = True

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # none can be started any more, such as by an exit handler from Python 3.12 on
            if not self._threads:
                self._run_inline()
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        bounce = _BounceBuffer()
        while (job := self._next_job()) is not None:
            self._finish(job, bounce)
            del job  # a waiting thread should not keep the memory of its last job

    def _run_inline(self) -> None:
        """Do the queued jobs in the calling thread."""
        bounce = _BounceBuffer()
        while self._jobs and (job := self._next_job()) is not None:
            self._finish(job, bounce)

    def _finish(self, job: WriteJob, bounce: _BounceBuffer) -> None:
        """Do a job and report it, whatever goes wrong."""
        try:
            self._do(job, bounce)
        except Exception as error:  # noqa: BLE001 - raised where the job came from
            job.error = error
        finally:
            with self._changed:
                self._unfinished -= 1
                self._busy_threads -= 1
                if not job.direct:
                    self._buffered_files.discard(job.file)
                self._changed.notify()
            self.done.put(job)
            self.wake()

    def _next_job(self) -> WriteJob | None:
        with self._changed:
            while True:
                for index, job in enumerate(self._jobs):
                    if job.direct or job.file not in self._buffered_files:
                        del self._jobs[index]
                        if not job.direct:
                            self._buffered_files.add(job.file)
                        self._busy_threads += 1
                        return job
                if not self._open and not self._jobs:
                    self._changed.notify_all()
                    return None
                self._changed.wait()

    def _do(self, job: WriteJob, bounce: _BounceBuffer) -> None:
        try:
            buffers = [_fetch(job, values, piece) for values, piece in job.pieces]
            active, start = self._change_active(1), time.perf_counter()
            try:
                _write(job, buffers, bounce)
            finally:
                active += self._change_active(-1) + 1
            job.seconds = (time.perf_counter() - start) * 2 / active
        finally:
            pieces, job.pieces = job.pieces, []
            for _, piece in pieces:
                if piece.release is not None:
                    piece.release()

    def _change_active(self, change: int) -> int:
        with self._changed:
            self._active += change
            return self._active


class _BounceBuffer:
    """A thread's bounce buffer, for bytes that do not begin on a page; allocated when first needed."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes: Bytes | None = None

    @property
    def bytes(self) -> Bytes:
        if self._bytes is None:
            self._bytes = np.frombuffer(mmap.mmap(-1, BOUNCE_BYTES), np.uint8)  # pages never touched take no memory
        return self._bytes


def _fetch(job: WriteJob, values: TensorBytes | None, piece: BytePiece) -> memoryview:
    """The bytes of a piece once they have arrived, or zeros when they never will."""
    try:
        if piece.ready is not None:
            piece.ready()
    except Exception as error:  # noqa: BLE001 - whatever a device says: these bytes are lost, and no others
        if values is not None:
            job.lost[values] = f"{type(error).__name__}: {error}"
        return memoryview(bytes(piece.data.nbytes))
    return piece.data


def _write(job: WriteJob, buffers: Sequence[memoryview], bounce: _BounceBuffer) -> None:
    if not job.direct:
        write_all(job.file.buffered, buffers, job.offset)
        return
    pages = _DirectWrite(job.file, job.offset, bounce.bytes)
    for buffer in buffers:
        pages.add(buffer)
    pages.write()


class _DirectWrite:
    """Bytes to be written directly, beginning at an offset that is a multiple of a page.

    Buffers that are whole pages are not copied; everything else is gathered into pages first. What does not fill a page
    at the end is written buffered, and so is what the file system does not accept.
    """

    def __init__(self, file: DiskFile, offset: int, bounce: Bytes) -> None:
        self._file = file
        self._bounce = bounce
        self._offset = self._end = offset  # where the vector begins and ends
        self._vector: list[memoryview] = []
        self._gathered = self._in_vector = 0  # bytes in the bounce buffer, and how many of them are in the vector

    def add(self, buffer: memoryview) -> None:
        while buffer.nbytes:
            if self._end % PAGE == 0 and buffer.nbytes >= PAGE and _address(buffer) % PAGE == 0:
                count = buffer.nbytes - buffer.nbytes % PAGE
                self._flush_gathered()
                self._vector.append(buffer[:count])
            else:
                count = min(buffer.nbytes, len(self._bounce) - self._gathered)
                np.copyto(self._bounce[self._gathered :][:count], np.frombuffer(buffer, np.uint8, count))
                self._gathered += count
            self._end += count
            buffer = buffer[count:]
            full = self._gathered == len(self._bounce) or len(self._vector) >= WRITEV_BUFFERS - 1
            if full and self._end % PAGE == 0:
                self.write()

    def write(self) -> None:
        """Write what was added, and continue where that ends."""
        self._flush_gathered()
        rest = self._end % PAGE
        pages, last = _split(self._vector, self._end - self._offset - rest)
        written = self._write_pages(pages)
        write_all(self._file.buffered, [*_split(pages, written)[1], *last], self._offset + written)
        self._vector, self._gathered, self._in_vector, self._offset = [], 0, 0, self._end

    def _flush_gathered(self) -> None:
        if self._in_vector < self._gathered:
            self._vector.append(self._bounce[self._in_vector : self._gathered].data)
            self._in_vector = self._gathered

    def _write_pages(self, pages: list[memoryview]) -> int:
        """Write whole pages directly; returns how many bytes the file system took."""
        if not pages or self._file.direct is None or self._file.refused:
            return 0
        try:
            return os.pwritev(self._file.direct, pages, self._offset)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._file.refused = True
            return 0


def _split(buffers: list[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes, and the rest."""
    before: list[memoryview] = []
    for index, buffer in enumerate(buffers):
        if buffer.nbytes > count:
            return [*before, buffer[:count]] if count else before, [buffer[count:], *buffers[index + 1 :]]
        before.append(buffer)
        count -= buffer.nbytes
    return before, []


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def write_all(file: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other, however little the system takes at a time."""
    waiting = [buffer for buffer in buffers if buffer.nbytes]
    while waiting:
        written = os.pwritev(file, waiting[:WRITEV_BUFFERS], offset)
        offset += written
        while waiting and written >= waiting[0].nbytes:
            written -= waiting.pop(0).nbytes
        if written:
            waiting[0] = waiting[0][written:]


def _no_op() -> None:
    pass
