"""The base of every writer: the program appends to a bounded queue, and a thread of the writer's own takes from it.

Errors of that thread do not reach the program: recording stops, and `failure` says why. `run_writer.py` writes what was
taken into files, `flight_recorder.py` keeps it in memory, `foreign/live_writer.py` writes another tool's files.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from astray.errors import RunError
from astray.interrupts import pass_interrupt
from astray.part import Part
from astray.process import WeakRegistry, absolute
from astray.records import Call, Frame, MissedTensor, Setup, Tensor
from astray.stats import sample_positions
from astray.store.deferred import DeferredBytes, DeferredMeasurements, TensorBytes
from astray.store.run_format.rows import Row, RowBuffer
from astray.store.run_info import End, plain
from astray.store.writing.buffer_pool import Buffer, BufferPool
from astray.store.writing.rank_files import Stack
from astray.store.writing.record_queue import BATCH_ROWS, RecordQueue

if TYPE_CHECKING:
    from typing_extensions import Self

QUEUE_BYTES = 256 << 20

_BLOB = Tensor._fields.index("blob")

UNCLOSED = "without closing the recording"


class BackgroundWriter(ABC):
    """Takes the records of one rank. Its methods may be called from any thread, and do nothing in a forked child.

    A subclass implements `_work`, which runs in the thread from `_start` until `_closed`, and `_finish`, which runs in
    the program's thread after that. `positions(count, samples)` chooses the elements of a sample.
    """

    positions = staticmethod(sample_positions)

    def __init__(
        self, path: str | os.PathLike[str], rank: int, queue_bytes: int, deferred: DeferredMeasurements | None
    ) -> None:
        self.path = absolute(path)
        self.rank = rank
        self.failure: str | None = None
        self.end: End | None = None  # what was recorded, once closed
        self._deferred = deferred
        self._queue = RecordQueue(queue_bytes)
        self._buffers = BufferPool(queue_bytes)
        self._missed: Counter[tuple[str, str]] = Counter()
        self._is_owner = True  # False in a forked child
        self._open = True  # takes records
        self._closed = False
        self._lock = threading.Lock()  # guards _missed and _closed
        self._thread = threading.Thread(target=self._run, name=f"astray-writer-rank{rank}", daemon=True)
        # Made now: when it is needed there may be no memory left for it.
        self._died = (
            f"Recording into {self.path} stopped: the thread that writes it has died, perhaps for want of memory. The "
            "program goes on; what was written before can be read. Record less, or lower queue_bytes."
        )

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            pass_interrupt(error)
            self._abandon()
            raise RunError(
                f"Recording into {self.path} takes a thread of its own, and the system starts no more ({error}). Allow "
                "the program more of them (`ulimit -u`, or the limit of its container)."
            ) from None
        self._queue.is_consumer_alive = self._thread.is_alive
        _abandon_in_children(self)
        atexit.register(self.close, UNCLOSED)

    def _run(self) -> None:
        """The thread: runs `_work`, and releases the threads that wait for the queue, however that ended."""
        try:
            self._work()
        except BaseException:  # noqa: BLE001 - nothing above this thread would catch it
            self.failure = self.failure or self._died
        finally:
            self._stop()
            with contextlib.suppress(Exception):
                self._queue.drop()

    @abstractmethod
    def _work(self) -> None:
        """The thread."""

    @abstractmethod
    def _finish(self, ended: str) -> None:
        """Called once the thread has ended: sets `end`, from how the program ended and what it noted."""

    @property
    def waited_seconds(self) -> float:
        """How long the program has waited because the writer was slower."""
        return self._queue.waited_seconds

    def call(self, row: Call) -> None:
        """Record a call."""
        self.call_row(tuple(row))

    def call_row(self, row: Row) -> None:
        """Record a call, given as the plain tuple of its fields: the cheapest way."""
        if self._open:
            self._queue.put_row(self._queue.calls, row)

    def tensor(
        self, row: Tensor, values: TensorBytes | Any = None, sampled: int | None = None, part: str | None = None
    ) -> None:
        """Record a tensor, with its values if there are any: a buffer, or what the method `values` returned for one.

        The row's own `blob` is ignored; the writer fills it in. The writer owns the buffer from here on. `part` and
        `sampled` say what a buffer holds when that is not the whole tensor, as for `values`.
        """
        if not self._open:
            return
        if values is not None and not isinstance(values, TensorBytes):
            shape = row.shape if part is None else Part.parse(part).shape_of(row.shape)
            shape = shape if sampled is None else (sampled,)
            values = self.values(values, f"{row.seq}.{row.role}.{row.path}", row.dtype, shape, sampled, part)
        plain = values is None and row.blob is None
        self.tensor_row(tuple(row) if plain else (*row[:_BLOB], values, *row[_BLOB + 1 :]))

    def tensor_row(self, row: Row) -> None:
        """Record a tensor, given as the tuple of its fields, with its `TensorBytes` or None in place of the blob."""
        if self._open:
            self._queue.put_row(self._queue.tensors, row)

    @property
    def row_buffers(self) -> tuple[RowBuffer, RowBuffer, int] | None:
        """Where native code appends the rows of calls and of tensors, and from how many rows on it calls `batch_ready`.

        None where each row has to go through `call_row` and `tensor_row`.
        """
        return self._queue.calls, self._queue.tensors, BATCH_ROWS

    def batch_ready(self, rows: RowBuffer) -> None:
        """Called when one of these holds a batch. Waits when it is too long."""
        self._queue.batch_ready(rows)

    def values(
        self,
        buffer: Any,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> TensorBytes:
        """Hand over the bytes of a tensor, to be shared by the rows of every call that saw it. They are stored once.

        `name` is what other tools see in the safetensors file; begin it with the number of the call. `shape` is that of
        the values in the buffer. `part` is the text of the slice when they are only that part of the tensor, `sampled`
        their number when they are a sample, of the part or of the whole. In place of a buffer there may be a
        `DeferredBytes`, whose bytes come later; if they never come, the rows have no values and the run says why.
        """
        source: DeferredBytes | None = buffer if hasattr(buffer, "pieces") else None
        data = np.frombuffer(buffer, np.uint8).data if source is None else source
        values = TensorBytes(data, name, dtype, shape, sampled, part)
        if self._open:
            self._queue.put_values(values)
        else:
            values.resolve(None)
        if source is not None:
            source.finish(lambda: self._wake_for(source))
        return values

    def _wake_for(self, source: DeferredBytes) -> None:
        """Wakes the thread to take more of a source, or releases the source when the thread is gone."""
        self._queue.wake.set()
        if not self._thread.is_alive():
            source.release()

    def take_buffer(self, nbytes: int) -> Buffer:
        """Memory for a tensor's bytes before they are handed over; the writer reuses it."""
        return self._buffers.take(nbytes)

    def waited(self, seconds: float) -> None:
        """Add seconds that the program waited because values were not taken fast enough."""
        self._queue.waited(seconds)

    def stack(self, id: int, frames: list[Frame]) -> None:
        """Record a Python stack, innermost frame first, before the first call that refers to it."""
        if self._open:
            self._queue.put(self._queue.stacks, Stack(id, frames))

    def setup(self, row: Setup) -> None:  # noqa: B027 - other tools' files have no place for it
        """Record what something is set to, from a step on."""

    def missed(self, what: str, why: str, count: int = 1) -> None:
        """Note something that was not observed, `count` times. Equal notes are added up."""
        if self._open:
            self._note_missed(what, why, count)

    @property
    def catches(self) -> bool:
        """Whether `attach` should be called for the tensors of a call that made NaN or infinity."""
        return False

    def attach(self, seq: int, role: str, path: str, fingerprint: int, values: TensorBytes) -> None:
        """Add values to a row that was handed over without, if its tensor has this fingerprint."""
        raise NotImplementedError("Rows are written as they come, and get no values later.")

    @abstractmethod
    def step_done(self) -> None:
        """A step is over."""

    def flush(self) -> bool:
        """Wait until everything handed over before is where it should be.

        Returns False when that cannot be promised, because recording has stopped; `failure` says why.
        """
        if not self._open or threading.current_thread() is self._thread:
            return False
        self._start_fetch()
        flush = self._queue.put_flush()
        while not flush.wait(1.0) and self._thread.is_alive():  # the thread may have ended before it saw the flush
            pass
        return flush.is_set() and self.failure is None

    def close(self, ended: str = "normally") -> None:
        """Finish what is left, and note how the program ended. A second call does nothing."""
        if self._closed:  # checked before taking the lock, which in a forked child may never be released
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop()
        atexit.unregister(self.close)
        self._join_thread(ended)

    def _join_thread(self, ended: str) -> None:
        """Waits for the thread, and calls `_finish`. After an interrupt the rest is done when the program ends."""
        try:
            if self._deferred is not None:
                self._deferred.finish()
            self._queue.wake.set()
            self._thread.join()
            self._finish(plain(ended))
        except BaseException:
            if self.end is None:
                atexit.register(self._join_thread, ended)
            raise

    @abstractmethod
    def discard(self) -> None:
        """Close, and remove everything: a recording that could not start leaves nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("normally" if kind is None else f"{kind.__name__}: {error}")

    def _stop(self) -> None:
        """Take no more records."""
        self._open = self._queue.calls.open = self._queue.tensors.open = False

    def _is_responsive(self) -> bool:
        """Whether the thread is alive, in this process, and not the caller."""
        return self._is_owner and threading.current_thread() is not self._thread and self._thread.is_alive()

    def _start_fetch(self) -> None:
        """Starts to fetch the measurements of every ticket handed out so far."""
        if self._deferred is not None:
            self._deferred.start_fetch()

    def _note_missed(self, what: str, why: str, count: int = 1) -> None:
        with self._lock:
            self._missed[plain(what), plain(why)] += count

    def _lost(self, reason: str) -> None:
        self._note_missed("the values of a tensor", reason)

    def _all_missed(self) -> list[MissedTensor]:
        return [MissedTensor(what, why, count) for (what, why), count in dict(self._missed).items()]  # an atomic copy

    def _abandon(self) -> None:
        """In a forked child: the thread does not exist there, and what was recorded belongs to the parent."""
        self._closed, self._is_owner = True, False
        self._stop()


_writers: WeakRegistry[BackgroundWriter] = WeakRegistry()
_registered_at_fork = False


def _abandon_in_children(writer: BackgroundWriter) -> None:
    """Make every forked child of this process leave the writer alone."""
    global _registered_at_fork
    _writers.add(writer)
    if not _registered_at_fork:
        _registered_at_fork = True
        os.register_at_fork(after_in_child=_abandon_all)


def _abandon_all() -> None:
    for writer in _writers:
        writer._abandon()
