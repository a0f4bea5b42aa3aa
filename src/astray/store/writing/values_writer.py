"""Writes the bytes of tensors as they come, by several threads, into shards that are whole at every moment.

The writer's thread assigns slots in the shards and updates their headers; in between the threads of
`run_format/disk_io.py` write the bytes. A file takes buffered bytes from one thread at a time, so when the program is
far ahead several shards are filled side by side, each by a `ShardQueue` of batches. A tensor is resolved once the
header lists it; its row waits for that.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from astray.process import largest_file
from astray.records import Blob
from astray.store.deferred import PAGE, PIECE_BYTES, BytePiece, TensorBytes
from astray.store.run_format.disk_io import WriteJob, WriterThreads
from astray.store.run_format.shard_file import LARGE, ShardFile, ShardSlot, shard_name

SHARD_BYTES = 1 << 30
HEADER_BYTES = 128 << 10, 4 << 20
"""Bytes for a shard's header: of the first shard, and at most. It doubles, so that short runs stay small."""

THREADS = max(4, min(8, os.cpu_count() or 1))
"""More would not speed up copying into the page cache, or a disk on the network. They run only while values wait."""

BATCH_BYTES = 8 << 20
"""Tensors are written and entered into the header in batches of this size, unless they are larger themselves."""

IN_FLIGHT_BYTES = 256 << 20
"""What the threads have at a time at most: large tensors for each, but not more than should be written in one mode
before its speed is known."""

SHARD_QUEUE_BYTES = 32 << 20
"""How many bytes have to wait for one shard before another is filled in parallel."""


class ValuesWriter:
    """Writes tensors into the shards of one rank's folder. All of its methods are for one thread."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, threads: int = THREADS) -> None:
        self.count = 0
        self.nbytes = 0
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._header_bytes = HEADER_BYTES[0]
        self._shards: list[ShardFile] = []
        self._queues: list[ShardQueue] = []
        self._threads = threads
        self._pool = WriterThreads(threads)
        self._mode = WriteModeChooser()
        self._waiting: deque[ShardBatch] = deque()  # to be submitted, in their order
        self._jobs_in_flight = 0  # jobs that the threads have
        self._bytes_in_flight = 0  # bytes of these jobs
        self._partial: dict[ShardBatch, Iterator[WriteJob | None]] = {}  # jobs that are still to come
        self._written: Callable[[int], None] = _no_op
        self._lost: Callable[[str], None] = _no_op

    def connect(self, wake: Callable[[], None], written: Callable[[int], None], lost: Callable[[str], None]) -> None:
        """`wake` is called, from any thread, when there is something to `collect`. While collecting, `written` gets the
        bytes of the queue's memory that became free, and `lost` the reason why a tensor's bytes never came."""
        self._pool.wake, self._written, self._lost = wake, written, lost

    def write(self, group: Sequence[TensorBytes]) -> None:
        """Begin to write a group of tensors. Raises the disk's error on these or on earlier ones."""
        try:
            self._distribute(group)
        except Exception:  # a full disk, or no memory
            sent = {values for queue in self._queues for batch in queue.waiting for values in batch.slots}
            self._drop([values for values in group if values not in sent and not values.resolved])
            raise
        self.collect()

    def collect(self) -> None:
        """Enter what has been written meanwhile into the headers. Raises the disk's error on it."""
        self._pool.check()
        while self._jobs_in_flight and self._pool.has_done:
            self._finish(self._pool.next_done())
        partial, self._partial = self._partial, {}
        for batch, jobs in partial.items():
            self._submit(batch, jobs)
        self._start()
        for queue in self._queues:
            self._publish(queue)

    @property
    def has_partial(self) -> bool:
        """Whether a tensor is so large that more of it will come, as memory becomes free.

        That may need later tensors to be written first, so the writer's thread must not wait for it.
        """
        return bool(self._partial)

    def drain(self) -> None:
        """Wait until everything that has arrived is written. Raises the disk's error on it."""
        while self._jobs_in_flight:
            self._finish(self._pool.next_done())
            self._start()
        self.collect()

    def abandon(self) -> None:
        """Resolve everything: what is written with its blob, the rest without one."""
        self._waiting.clear()
        self._partial.clear()
        with contextlib.suppress(RuntimeError):  # a thread has died, and its job with it
            while self._jobs_in_flight:
                self._finish(self._pool.next_done())
        self._jobs_in_flight = 0
        for queue in self._queues:
            with contextlib.suppress(Exception):  # the other shards are still written
                self._publish(queue)
            while queue.waiting:
                self._drop(queue.waiting.popleft().slots)

    def close(self) -> None:
        """Cut every shard where its data ends, each of them even if another cannot be."""
        self.abandon()
        self.end_threads()
        with contextlib.ExitStack() as closing:
            for shard in self._shards:
                closing.callback(shard.trim)

    def end_threads(self) -> None:
        """End the threads that write, once their jobs are done."""
        self._pool.close()

    def _distribute(self, group: Sequence[TensorBytes]) -> None:
        """Assign a slot to each tensor, in batches, and send these."""
        queue: ShardQueue | None = None
        batch: ShardBatch | None = None
        for values in group:
            if queue is None or batch is None or batch.nbytes + values.size > BATCH_BYTES:
                self._send(queue, batch)
                queue = self._next_queue(values.size)
                batch = ShardBatch(queue.shard)
            if not batch.add(values):
                self._send(queue, batch)
                queue.shard = self._add_shard(values.size)
                batch = ShardBatch(queue.shard)
                batch.add(values)
        self._send(queue, batch)

    def _next_queue(self, size: int) -> ShardQueue:
        """The queue with the fewest bytes, or a new one. Direct writes to one file run in parallel: they add none."""
        queue = min(self._queues, key=attrgetter("load"), default=None)
        is_loaded = queue is not None and queue.load >= SHARD_QUEUE_BYTES and not self._mode.direct
        if queue is None or (is_loaded and len(self._queues) < self._threads):
            queue = ShardQueue(self._add_shard(size))
            self._queues.append(queue)
        return queue

    def _add_shard(self, size: int) -> ShardFile:
        """Begin a file that has room for a tensor of this size at least."""
        number = len(self._shards)
        room = self._header_bytes + max(self._shard_bytes, size)
        limit = largest_file()
        if limit is not None:  # a smaller file may do; one that does not hold the tensor is refused by the system
            room = max(min(room, limit), self._header_bytes + size)
        shard = ShardFile(self._folder / shard_name(number), number, self._header_bytes, room)
        self._shards.append(shard)
        self._header_bytes = min(2 * self._header_bytes, HEADER_BYTES[1])
        return shard

    def _drop(self, group: Iterable[TensorBytes]) -> None:
        """Resolve values that will not be written."""
        for values in group:
            held = values.held
            values.resolve(None)
            self._written(held)

    def _send(self, queue: ShardQueue | None, batch: ShardBatch | None) -> None:
        """Queue the bytes of a batch for writing."""
        if queue is None or batch is None or not batch.slots:
            return
        queue.waiting.append(batch)
        queue.load += batch.nbytes
        self._waiting.append(batch)
        self._start()

    def _start(self) -> None:
        """Give the threads up to IN_FLIGHT_BYTES."""
        while self._waiting and self._bytes_in_flight < IN_FLIGHT_BYTES:
            batch = self._waiting.popleft()
            direct = batch.direct_bytes > 0 and self._mode.choose(batch.direct_bytes)
            self._submit(batch, batch.jobs(direct))

    def _submit(self, batch: ShardBatch, jobs: Iterator[WriteJob | None]) -> None:
        """Submit the jobs of a batch, as far as its bytes have arrived or will arrive by themselves."""
        for job in jobs:
            if job is None:
                self._partial[batch] = jobs
                return
            self._jobs_in_flight += 1
            self._bytes_in_flight += job.nbytes
            batch.jobs_left += 1
            self._pool.submit(job)
        batch.complete = True

    def _finish(self, job: WriteJob) -> None:
        self._jobs_in_flight -= 1
        self._bytes_in_flight -= job.nbytes
        job.owner.finish(job)
        if job.nbytes >= BATCH_BYTES // 2 and job.error is None:
            self._mode.record(job.direct, job.nbytes, job.seconds)
        if job.file.refused:
            self._mode.disable_direct()

    def _publish(self, queue: ShardQueue) -> None:
        """Enter the written batches of a queue into the headers of their shards, and resolve their tensors."""
        while queue.waiting and queue.waiting[0].complete and not queue.waiting[0].jobs_left:
            batch = queue.waiting[0]
            if batch.error is not None:
                raise batch.error
            batch.publish()
            queue.waiting.popleft()
            queue.load -= batch.nbytes
            if batch.shard is not queue.shard and not (queue.waiting and queue.waiting[0].shard is batch.shard):
                batch.shard.close()
            self.count += len(batch.slots) - len(batch.lost)
            self.nbytes += sum(values.size for values in batch.slots if values not in batch.lost)
            for reason in batch.lost.values():
                self._lost(reason)
            self._written(batch.resolve())


def _no_op(*_: object) -> None:
    pass


class ShardQueue:
    """A shard being filled, and the batches being written to it or to the one before it, in their order."""

    __slots__ = ("load", "shard", "waiting")

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.waiting: deque[ShardBatch] = deque()
        self.load = 0  # bytes of the batches


class ShardBatch:
    """Tensors that follow one another in a shard, and are entered into its header at once."""

    __slots__ = ("complete", "direct_bytes", "error", "jobs_left", "lost", "nbytes", "shard", "slots")

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.slots: dict[TensorBytes, ShardSlot] = {}
        self.nbytes = 0
        self.direct_bytes = 0  # bytes that may be written directly
        self.jobs_left = 0
        self.complete = False  # whether all its jobs were submitted
        self.error: Exception | None = None
        self.lost: dict[TensorBytes, str] = {}  # whose bytes never arrived, and why

    def add(self, values: TensorBytes) -> bool:
        """Assign a slot to a tensor; False when it needs the next shard."""
        slot = self.shard.allocate(values.name, values.dtype, values.shape, values.size, certain=values.source is None)
        if slot is not None:
            self.slots[values] = slot
            self.nbytes += slot.nbytes
            self.direct_bytes += slot.nbytes if slot.nbytes >= LARGE else 0
        return slot is not None

    def jobs(self, direct: bool) -> Iterator[WriteJob | None]:
        """The jobs that write the batch, cut so that memory is freed as it is written.

        A job is direct from its first byte on. None says that more will come later.
        """
        job: WriteJob | None = None
        for values, slot in self.slots.items():
            end, pages = slot.offset, direct and slot.nbytes >= LARGE
            for piece in self._pieces(values):
                full = job is not None and job.nbytes >= PIECE_BYTES
                if job is not None and (piece is None or full or (pages and not job.direct) or end - job.end >= PAGE):
                    yield job
                    job = None
                if piece is None:
                    yield None
                else:
                    job = job or WriteJob(self.shard.file, end, pages and end % PAGE == 0, self)
                    job.add(values, piece, end)
                    end = job.end
        if job is not None:
            yield job

    def _pieces(self, values: TensorBytes) -> Iterable[BytePiece | None]:
        if values.data is not None and values.size <= PIECE_BYTES:
            return (BytePiece(values.data),)
        return self._pieces_to_come(values)

    def _pieces_to_come(self, values: TensorBytes) -> Iterator[BytePiece | None]:
        try:
            yield from values.pieces()
        except Exception as error:  # noqa: BLE001 - these bytes are lost, and no others
            self.lost[values] = f"{type(error).__name__}: {error}"

    def finish(self, job: WriteJob) -> None:
        self.jobs_left -= 1
        self.error = self.error or job.error
        self.lost.update(job.lost)

    def publish(self) -> None:
        """Enter the tensors into the header."""
        self.shard.publish(self.slots.values(), [self.slots[values] for values in self.lost])

    def resolve(self) -> int:
        """Set the blob of each tensor; returns how many bytes of memory became free."""
        held = 0
        for values, slot in self.slots.items():
            held += values.held
            blob = Blob(self.shard.number, slot.offset, slot.nbytes, values.sampled, values.part)
            values.resolve(None if values in self.lost else blob)
        return held


class WriteModeChooser:
    """Which way of writing is faster now: through the page cache, or directly to the disk.

    Into free memory the kernel copies faster than any disk writes; once that is full, or shared with other processes,
    it is slower than direct writes. Neither can be known beforehand, so both are measured: the other way is probed
    again after a while, with a few bytes.
    """

    INITIAL_BYTES = 32 << 20  # buffered in any case: most recordings are shorter
    PROBE_BYTES = 32 << 20
    PROBE_INTERVAL_BYTES = 2 << 30, 16 << 30  # until the other way is probed again: at first, and at most
    AVERAGING_BYTES = 64 << 20  # bytes over which a speed is averaged

    def __init__(self) -> None:
        self.direct = False  # whether direct writes are faster, as far as is known
        self._direct_possible = True
        self._cost: dict[bool, float] = {}  # seconds per byte
        self._probing = False  # whether the other way is being measured
        self._left = self.INITIAL_BYTES  # bytes until that changes
        self._interval = self.PROBE_INTERVAL_BYTES[0]

    def disable_direct(self) -> None:
        """Direct writes are not possible."""
        self._direct_possible = self.direct = self._probing = False

    def choose(self, nbytes: int) -> bool:
        """Whether the next bytes should be written directly."""
        if not self._direct_possible:
            return False
        self._left -= nbytes
        if self._left < 0:
            self._probing = not self._probing
            self._left = self.PROBE_BYTES if self._probing else self._interval
            if not self._probing:
                self._interval = min(2 * self._interval, self.PROBE_INTERVAL_BYTES[1])
        if not self._probing:
            self._switch_if_faster()
        return self.direct != self._probing

    def record(self, direct: bool, nbytes: int, seconds: float) -> None:
        """Add a measurement: how long these bytes took."""
        weight = min(1.0, nbytes / self.AVERAGING_BYTES)
        cost = seconds / nbytes
        self._cost[direct] = cost * weight + self._cost.get(direct, cost) * (1 - weight)

    def _switch_if_faster(self) -> None:
        """Switch to the other way when that is faster, and then try both more often for a while."""
        if self._cost.get(not self.direct, float("inf")) < 0.9 * self._cost.get(self.direct, 0.0):
            self.direct = not self.direct
            self._left = self._interval = self.PROBE_INTERVAL_BYTES[0]
