"""Takes records from a running program, for a thread of its own: what every writer has in common.

The program's side of it appends to a bounded queue and goes on. Nothing that goes wrong on the other side reaches the
program: recording stops, and `failure` says why. `run_writer.py` puts what was taken into files, `flight_recorder.py`
keeps it in memory.
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
from astray.store.deferred import DeferredBytes, DeferredMeasurements
from astray.store.run_format.rows import Row, Rows
from astray.store.run_format.tensor_values import TensorBytes
from astray.store.run_info import End, plain
from astray.store.writing import record_queue as backlog
from astray.store.writing.buffer_pool import Buffer, BufferPool
from astray.store.writing.rank_files import Stack
from astray.store.writing.record_queue import RecordQueue

if TYPE_CHECKING:
    from typing_extensions import Self

QUEUE_BYTES = 256 << 20
IDLE_SECONDS = 0.5  # rows wait no longer than this
STEP_SECONDS = 0.05  # nor those of a step that is over, than this
"""But they do wait. A device's measurements come just when the program, which has waited for the device too, begins its
next step: it would then wait for the interpreter, and the device for it. A little later the device has work enough. And
a batch of rows for every step of a fast loop is too small."""
HELD_SECONDS = 1.0  # nor than this for measurements that the program should have sent for: it may be stuck

_BLOB = Tensor._fields.index("blob")

UNCLOSED = "without closing the recording"


class BackgroundWriter(ABC):
    """Takes the records of one rank. Its methods may be called from any thread, and do nothing in a forked child.

    A subclass says what becomes of them: `_work` runs in the thread, from `_start` until `_closed`, and `_finish` in
    the program's once that is done. `positions` chooses the elements of a sample, of how many and how many of them.
    """

    positions = staticmethod(sample_positions)

    def __init__(
        self, path: str | os.PathLike[str], rank: int, queue_bytes: int, late: DeferredMeasurements | None
    ) -> None:
        self.path = absolute(path)
        self.rank = rank
        self.failure: str | None = None
        self.end: End | None = None  # what was recorded, once closed
        self._late = late
        self._backlog = RecordQueue(queue_bytes)
        self._rooms = BufferPool(queue_bytes)
        self._missed: Counter[tuple[str, str]] = Counter()
        self._is_here = True  # False in a forked child
        self._open = True  # takes records
        self._closed = False
        self._lock = threading.Lock()  # of _missed and _closed
        self._thread = threading.Thread(target=self._live, name=f"astray-writer-rank{rank}", daemon=True)
        # Made now: short of memory, when it is needed, there may be none for it.
        self._died = (
            f"Recording into {self.path} stopped: the thread that writes it has died, perhaps for want of memory. The "
            "program goes on; what was written before can be read. Record less, or lower queue_bytes."
        )

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:
            pass_interrupt(error)
            self._leave()
            raise RunError(
                f"Recording into {self.path} takes a thread of its own, and the system starts no more ({error}). Allow "
                "the program more of them (`ulimit -u`, or the limit of its container)."
            ) from None
        self._backlog.is_served = self._thread.is_alive
        _stop_in_children(self)
        atexit.register(self.close, UNCLOSED)

    def _live(self) -> None:
        """The thread: `_work`, and nobody waits for it any more after that, however it ended."""
        try:
            self._work()
        except BaseException:  # noqa: BLE001 - the thread has nobody above it
            self.failure = self.failure or self._died
        finally:
            self._stop()
            with contextlib.suppress(Exception):
                self._backlog.drop()

    @abstractmethod
    def _work(self) -> None:
        """The thread."""

    @abstractmethod
    def _finish(self, ended: str) -> None:
        """The thread has ended; says in `end` how, and what the program had to say."""

    @property
    def waited_seconds(self) -> float:
        """How long the program has stood still because the other side was slower."""
        return self._backlog.waited_seconds

    def call(self, row: Call) -> None:
        """Record a call."""
        self.call_row(tuple(row))

    def call_row(self, row: Row) -> None:
        """Record a call, given as the plain tuple of its fields: what costs the program least."""
        if self._open:
            self._backlog.put_row(self._backlog.calls, row)

    def tensor(
        self, row: Tensor, values: TensorBytes | Any = None, sampled: int | None = None, part: str | None = None
    ) -> None:
        """Record a tensor, with its values if they are given: a buffer, or what `values` made of one.

        The row's own `blob` is not looked at; the writer fills it in. A buffer belongs to the writer from here on.
        `part` and `sampled` say what a buffer holds when that is not the whole tensor, as for `values`.
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
            self._backlog.put_row(self._backlog.tensors, row)

    @property
    def lanes(self) -> tuple[Rows, Rows, int] | None:
        """Where native code puts the rows of calls and tensors, and from how many on it says that they are `crowded`.

        None where each row has to go through `call_row` and `tensor_row`.
        """
        return self._backlog.calls, self._backlog.tensors, backlog.BATCH_ROWS

    def crowded(self, lane: Rows) -> None:
        """Say that a lane holds a batch. Waits when it is too long."""
        self._backlog.crowded(lane)

    def values(
        self,
        buffer: Any,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> TensorBytes:
        """Hand over the bytes of a tensor, to be given to the rows of every call that saw it. They are stored once.

        `name` is what other tools will see in the safetensors file; begin it with the number of the call. `shape` is
        that of the values in the buffer. `part` is the text of the slice when they are only that part of the tensor,
        `sampled` their number when they are a sample, of the part or of the whole. In place of a buffer there may be a
        `DeferredBytes`, whose bytes come later; should they never come, the rows have no values and the run says why.
        """
        source: DeferredBytes | None = buffer if hasattr(buffer, "pieces") else None
        data = np.frombuffer(buffer, np.uint8).data if source is None else source
        values = TensorBytes(data, name, dtype, shape, sampled, part)
        if self._open:
            self._backlog.put_values(values)
        else:
            values.settle(None)
        if source is not None:
            source.finish(lambda: self._wake_for(source))
        return values

    def _wake_for(self, source: DeferredBytes) -> None:
        """Has more of a source taken. Without a thread that does so, nothing of it is wanted any more."""
        self._backlog.wake.set()
        if not self._thread.is_alive():
            source.release()

    def room(self, nbytes: int) -> Buffer:
        """Memory to put a tensor's bytes into before they are handed over; the writer uses it again."""
        return self._rooms.take(nbytes)

    def waited(self, seconds: float) -> None:
        """Say that the program stood still for so long because values were not taken fast enough."""
        self._backlog.waited(seconds)

    def stack(self, id: int, frames: list[Frame]) -> None:
        """Record a Python stack, innermost frame first, before the first call that refers to it."""
        if self._open:
            self._backlog.put(self._backlog.stacks, Stack(id, frames))

    def setup(self, row: Setup) -> None:  # noqa: B027 - other tools' files have no place for it
        """Record what something is set to, from a step on."""

    def missed(self, what: str, why: str, count: int = 1) -> None:
        """Note something that was not observed, `count` times. The same thing said again is added up."""
        if self._open:
            self._miss(what, why, count)

    @property
    def catches(self) -> bool:
        """Whether `attach` is wanted for the tensors of a call that made NaN or infinity."""
        return False

    def attach(self, seq: int, role: str, path: str, fingerprint: int, values: TensorBytes) -> None:
        """Give values to a row that was handed over without, if it is the tensor of this fingerprint."""
        raise NotImplementedError("Rows are written as they come, and get no values later.")

    @abstractmethod
    def step_done(self) -> None:
        """Say that a step is over."""

    def flush(self) -> bool:
        """Wait until everything handed over before is where it should be.

        Gives False when that cannot be promised, because recording has stopped; `failure` says why.
        """
        if not self._open or threading.current_thread() is self._thread:
            return False
        self._settle()
        flush = self._backlog.put_flush()
        while not flush.wait(1.0) and self._thread.is_alive():  # it may have ended while this was put
            pass
        return flush.is_set() and self.failure is None

    def close(self, ended: str = "normally") -> None:
        """See to what is left, and note how the program ended. A second call does nothing."""
        if self._closed:  # asked before taking the lock, which in a forked child nobody may ever release
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop()
        atexit.unregister(self.close)
        self._conclude(ended)

    def _conclude(self, ended: str) -> None:
        """Waits for the thread, and says how it was. What an interrupt leaves of that is done when the program ends."""
        try:
            if self._late is not None:
                self._late.finish()
            self._backlog.wake.set()
            self._thread.join()
            self._finish(plain(ended))
        except BaseException:
            if self.end is None:
                atexit.register(self._conclude, ended)
            raise

    @abstractmethod
    def discard(self) -> None:
        """Close, and take everything away again: a recording that could not start leaves nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("normally" if kind is None else f"{kind.__name__}: {error}")

    def _stop(self) -> None:
        """Takes no records any more."""
        self._open = self._backlog.calls.open = self._backlog.tensors.open = False

    def _can_answer(self) -> bool:
        """Whether the thread is there, in this process, and is not the one that asks."""
        return self._is_here and threading.current_thread() is not self._thread and self._thread.is_alive()

    def _settle(self) -> None:
        """Sends for the measurements of every ticket in the rows so far."""
        if self._late is not None:
            self._late.settle()

    def _miss(self, what: str, why: str, count: int = 1) -> None:
        with self._lock:
            self._missed[plain(what), plain(why)] += count

    def _lost(self, reason: str) -> None:
        self._miss("the values of a tensor", reason)

    def _all_missed(self) -> list[MissedTensor]:
        return [MissedTensor(what, why, count) for (what, why), count in dict(self._missed).items()]  # copied at one go

    def _leave(self) -> None:
        """This is a forked child: the thread is not there, and what was recorded is the parent's."""
        self._closed, self._is_here = True, False
        self._stop()


_intakes: WeakRegistry[BackgroundWriter] = WeakRegistry()
_watching = False


def _stop_in_children(intake: BackgroundWriter) -> None:
    """Make every forked child of this process leave it alone."""
    global _watching
    _intakes.add(intake)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_stop_all)


def _stop_all() -> None:
    for intake in _intakes:
        intake._leave()
