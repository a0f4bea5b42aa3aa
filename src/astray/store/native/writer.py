"""Takes records from a running program and writes them in a thread of its own.

The program's side of it appends to a bounded queue and goes on. Nothing that goes wrong on the other side reaches the
program: recording stops, `failure` says why, and what was written before stays readable.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astray.part import Part
from astray.record import Call, Frame, Missed, Tensor
from astray.store.info import End, RunInfo, now, plain, write_json
from astray.store.late import Late
from astray.store.native import backlog
from astray.store.native.backlog import Backlog
from astray.store.native.files import RankFiles, Stack
from astray.store.native.folder import END_FILE, claim, recordable, release
from astray.store.native.rooms import Room, Rooms
from astray.store.native.rows import Row, Rows
from astray.store.native.values import Values
from astray.store.native.values_writer import SHARD_BYTES
from astray.store.source import Source

QUEUE_BYTES = 256 << 20
IDLE_SECONDS = 0.5  # rows wait no longer than this
HELD_SECONDS = 1.0  # nor than this for measurements that the program should have sent for: it may be stuck
STEP_SECONDS = 0.05  # nor than this once their step is done; a batch for every step of a fast loop would be too small

_BLOB = Tensor._fields.index("blob")

UNCLOSED = "without closing the recording"


class RunWriter:
    """Writes one rank of a run. Its methods may be called from any thread, and do nothing in a forked child.

    >>> with RunWriter("runs/a", info=RunInfo.here()) as writer:
    ...     writer.call(Call(0, 0, 0, "module", "fc", "Linear", 0, "forward"))
    ...     writer.tensor(Tensor(0, "output", "0", "float32", (2,), (1,), "cpu", False), np.ones(2, np.float32))

    `world_size` is for when `info` does not say it. `queue_bytes` is how much memory values may take on their way to
    the disk: more lets the program run ahead of a slow disk for longer. `shard_bytes` is the size at which the next
    values file begins. A row may hold a ticket of `late` in place of its statistics. Raises RunExists or RunError when
    the folder cannot be recorded into.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int = 0,
        *,
        info: RunInfo,
        world_size: int | None = None,
        overwrite: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        shard_bytes: int = SHARD_BYTES,
        late: Late | None = None,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.failure: str | None = None
        self.end: End | None = None  # what `end.json` says, once closed
        if world_size is not None:
            info = msgspec.structs.replace(info, world_size=world_size)
        self._folder = claim(self.path, rank, info, overwrite)
        with recordable(self.path):
            self._files = RankFiles(self._folder, shard_bytes, late)
        self._late = late
        self._backlog = Backlog(queue_bytes)
        self._rooms = Rooms(queue_bytes)
        self._files.values.connect(self._backlog.wake.set, self._backlog.written, self._lost)
        self._missed: Counter[tuple[str, str]] = Counter()
        self._open = True  # takes records
        self._closed = False
        self._step_ended = False
        self._lock = threading.Lock()  # of _missed and _closed
        _stop_in_children(self)
        atexit.register(self.close, UNCLOSED)
        self._thread = threading.Thread(target=self._work, name=f"astray-writer-rank{rank}", daemon=True)
        self._thread.start()

    @property
    def waited_seconds(self) -> float:
        """How long the program has stood still because the disk was slower."""
        return self._backlog.waited_seconds

    def call(self, row: Call) -> None:
        """Record a call."""
        self.call_row(tuple(row))

    def call_row(self, row: Row) -> None:
        """Record a call, given as the plain tuple of its fields: what costs the program least."""
        if self._open:
            self._backlog.put_row(self._backlog.calls, row)

    def tensor(
        self, row: Tensor, values: Values | Any = None, sampled: int | None = None, part: str | None = None
    ) -> None:
        """Record a tensor, with its values if they are given: a buffer, or what `values` made of one.

        The row's own `blob` is not looked at; the writer fills it in. A buffer belongs to the writer from here on.
        `part` and `sampled` say what a buffer holds when that is not the whole tensor, as for `values`.
        """
        if not self._open:
            return
        if values is not None and not isinstance(values, Values):
            shape = row.shape if part is None else Part.parse(part).shape_of(row.shape)
            shape = shape if sampled is None else (sampled,)
            values = self.values(values, f"{row.seq}.{row.role}.{row.path}", row.dtype, shape, sampled, part)
        plain = values is None and row.blob is None
        self.tensor_row(tuple(row) if plain else (*row[:_BLOB], values, *row[_BLOB + 1 :]))

    def tensor_row(self, row: Row) -> None:
        """Record a tensor, given as the plain tuple of its fields, with its `Values` or None in place of the blob."""
        if self._open:
            self._backlog.put_row(self._backlog.tensors, row)

    @property
    def lanes(self) -> tuple[Rows, Rows, int]:
        """Where `call_row` and `tensor_row` put rows, and from how many on they must be asked: for native code."""
        return self._backlog.calls, self._backlog.tensors, backlog.BATCH_ROWS

    def values(
        self,
        buffer: Any,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> Values:
        """Hand over the bytes of a tensor, to be given to the rows of every call that saw it. They are stored once.

        `name` is what other tools will see in the safetensors file; begin it with the number of the call. `shape` is
        that of the values in the buffer. `part` is the text of the slice when they are only that part of the tensor,
        `sampled` their number when they are a sample, of the part or of the whole. In place of a buffer there may be a
        `Source`, whose bytes come later; should they never come, the rows have no values and the run says why.
        """
        source: Source | None = buffer if hasattr(buffer, "pieces") else None
        data = np.frombuffer(buffer, np.uint8).data if source is None else source
        values = Values(data, name, dtype, shape, sampled, part)
        if self._open:
            self._backlog.put_values(values)
        else:
            values.settle(None)
        if source is not None:
            source.finish(self._backlog.wake.set)
        return values

    def room(self, nbytes: int) -> Room:
        """Memory to put a tensor's bytes into before they are handed over; the writer uses it again."""
        return self._rooms.take(nbytes)

    def waited(self, seconds: float) -> None:
        """Say that the program stood still for so long because values were not written fast enough."""
        self._backlog.waited(seconds)

    def stack(self, id: int, frames: list[Frame]) -> None:
        """Record a Python stack, innermost frame first, before the first call that refers to it."""
        if self._open:
            self._backlog.put(self._backlog.stacks, Stack(id, frames))

    def missed(self, what: str, why: str, count: int = 1) -> None:
        """Note something that was not observed, `count` times. The same thing said again is added up."""
        if self._open:
            with self._lock:
                self._missed[plain(what), plain(why)] += count

    def step_done(self) -> None:
        """Say that a step is over, so that its rows reach the file soon."""
        if self._open:
            self._settle()
            self._step_ended = True
            self._backlog.wake.set()

    def flush(self) -> bool:
        """Wait until everything handed over before is with the kernel, where a kill cannot reach it.

        Gives False when that cannot be promised, because recording has stopped; `failure` says why.
        """
        if not self._open:
            return False
        self._settle()
        flush = self._backlog.put_flush()
        while not flush.wait(1.0) and self._thread.is_alive():  # it may have ended while this was put
            pass
        return flush.is_set() and self.failure is None

    def close(self, ended: str = "normally") -> None:
        """Write what is left, and `end.json` with how the program ended. A second call does nothing."""
        if self._closed:  # asked before taking the lock, which in a forked child nobody may ever release
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop()
        atexit.unregister(self.close)
        if self._late is not None:
            self._late.finish()
        self._backlog.wake.set()
        self._thread.join()
        self._write_end(plain(ended))

    def _stop(self) -> None:
        """Takes no records any more."""
        self._open = self._backlog.calls.open = self._backlog.tensors.open = False

    def _settle(self) -> None:
        """Sends for the measurements of every ticket in the rows so far."""
        if self._late is not None:
            self._late.settle()

    def discard(self) -> None:
        """Close, and take everything away again: a recording that could not start leaves no run."""
        self.close()
        release(self.path, self.rank)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("normally" if kind is None else f"{kind.__name__}: {error}")

    def _work(self) -> None:
        """The writer's thread."""
        try:
            self._write_until_closed()
            self._files.close()
        except Exception as error:  # noqa: BLE001 - a failure here must never end the user's program
            self._fail(error)
        finally:
            self._stop()
            self._backlog.drop()
            self._rooms.close()

    def _write_until_closed(self) -> None:
        written = held = time.monotonic()
        closing = False
        while not closing:
            self._backlog.wake.wait(STEP_SECONDS if self._step_ended else IDLE_SECONDS)
            self._backlog.wake.clear()
            closing = self._closed  # read before taking: what was handed over before closing is still written
            patience = STEP_SECONDS if self._step_ended else IDLE_SECONDS
            self._files.values.collect()
            if closing or self._backlog.wants_rows_taken or time.monotonic() - written >= patience:
                self._files.take(*self._backlog.take())  # all at once: to take them bit by bit is to copy them
            for group in self._backlog.take_values():
                self._files.take_values(group)
            if self._files.waiting_rows >= backlog.BATCH_ROWS:
                self._files.write_rows()
            self._backlog.make_room()
            if self._backlog.flushes or closing:
                self._files.values.settle()
            if self._files.values.is_growing:  # the rest of a large tensor is coming
                closing = False
                continue
            if self._backlog.flushes or closing or time.monotonic() - written >= patience:
                self._step_ended = False
                self._files.write_rows()
                self._backlog.answer()
                written = time.monotonic()
                if not self._files.waiting_rows:
                    held = written
                elif written - held >= HELD_SECONDS and self._late is not None:
                    self._late.settle(own_thread=True)
                    held = written

    def _fail(self, error: Exception) -> None:
        """Keep of the rows taken what can still be written, and say what happened."""
        for save in (self._files.values.abandon, self._files.write_rows, self._files.close):
            with contextlib.suppress(Exception):
                save()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        files = self._files
        self.failure = (
            f"Recording into {self._folder} stopped: {reason}. The program goes on; {files.calls.rows:,} calls and "
            f"{files.tensors.rows:,} tensors before that can be read. {_remedy(error)}"
        )

    def _lost(self, reason: str) -> None:
        with self._lock:
            self._missed["the values of a tensor", plain(reason)] += 1

    def _write_end(self, ended: str) -> None:
        files = self._files
        self.end = End(
            complete=self.failure is None,
            ended=ended,
            finished=now(),
            failure=self.failure,
            steps=len(files.steps),
            calls=files.calls.rows,
            tensors=files.tensors.rows,
            stacks=files.stacks,
            values=files.values.count,
            value_bytes=files.values.nbytes,
            waited_seconds=round(self.waited_seconds, 3),
            missed=[Missed(what, why, count) for (what, why), count in self._missed.items()],
        )
        try:
            write_json(self._folder / END_FILE, self.end)
        except OSError as error:
            self.failure = self.failure or f"{self._folder / END_FILE} could not be written: {error.strerror}."


def _remedy(error: Exception) -> str:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "Make room, or record into another folder." if full else "Record into another folder."


_writers: weakref.WeakSet[RunWriter] = weakref.WeakSet()
_watching = False


def _stop_in_children(writer: RunWriter) -> None:
    """Make every forked child of this process leave the writer alone: its thread is not there, its files are ours."""
    global _watching
    _writers.add(writer)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_stop_all)


def _stop_all() -> None:
    for writer in _writers:
        writer._closed = True
        writer._stop()
