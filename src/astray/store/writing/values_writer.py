"""Writes the bytes of tensors as they come, by several threads, into shards that are whole at every moment.

The writer's thread assigns slots in the shards and updates their headers; in between the threads of
`run_format/disk_io.py` write the bytes. A file takes buffered bytes from one thread at a time, so when the program is
far ahead several shards are filled side by side, each by a `ShardQueue` of batches. A tensor is settled once the header
lists it; its row waits for that.
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
from astray.store.run_format.disk_io import WriteRequest, WriterThreads
from astray.store.run_format.shard_file import LARGE, ShardFile, ShardSlot, shard_name

SHARD_BYTES = 1 << 30
HEADER_BYTES = 128 << 10, 4 << 20
"""Bytes for a shard's header: of the first shard, and at most. It doubles, so that short runs stay small."""

THREADS = max(4, min(8, os.cpu_count() or 1))
"""More would not speed up copying into the page cache, or a disk on the network. They run only while values wait."""

BATCH_BYTES = 8 << 20
"""Tensors are written and entered into the header in batches of this size, unless they are larger themselves."""

AHEAD_BYTES = 256 << 20
"""The most that the threads have at a time: large tensors for each, but not more than should be written in one way
before its speed is known."""

LANE_BYTES = 32 << 20
"""How many bytes have to wait for one shard before another is filled beside it."""


class ValuesWriter:
    """Writes tensors into the shards of one rank's folder. All of its methods are for one thread."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, threads: int = THREADS) -> None:
        self.count = 0
        self.nbytes = 0
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._header_bytes = HEADER_BYTES[0]
        self._shards: list[ShardFile] = []
        self._lanes: list[ShardQueue] = []
        self._threads = threads
        self._hands = WriterThreads(threads)
        self._pace = WriteModeChooser()
        self._waiting: deque[ShardBatch] = deque()  # to be given to the threads, in their order
        self._under_way = 0  # jobs that the threads have
        self._ahead = 0  # bytes of these jobs
        self._growing: dict[ShardBatch, Iterator[WriteRequest | None]] = {}  # jobs that are still to come
        self._written: Callable[[int], None] = _nothing
        self._lost: Callable[[str], None] = _nothing

    def connect(self, wake: Callable[[], None], written: Callable[[int], None], lost: Callable[[str], None]) -> None:
        """`wake` is called, from any thread, when there is something to `collect`. While collecting, `written` gets the
        bytes of the queue's memory that became free, and `lost` the reason why a tensor's bytes never came."""
        self._hands.wake, self._written, self._lost = wake, written, lost

    def write(self, group: Sequence[TensorBytes]) -> None:
        """Begin to write a group of tensors. Raises the disk's error on it or those before."""
        try:
            self._distribute(group)
        except Exception:  # a full disk, or no memory
            sent = {values for lane in self._lanes for batch in lane.waiting for values in batch.places}
            self._drop([values for values in group if values not in sent and not values.settled])
            raise
        self.collect()

    def collect(self) -> None:
        """Enter what has been written meanwhile into the headers. Raises the disk's error on it."""
        self._hands.check()
        while self._under_way and self._hands.has_finished:
            self._finish(self._hands.finished())
        growing, self._growing = self._growing, {}
        for batch, jobs in growing.items():
            self._go_on(batch, jobs)
        self._start()
        for lane in self._lanes:
            self._publish(lane)

    @property
    def is_growing(self) -> bool:
        """Whether a tensor is so large that more of it will come, as memory becomes free.

        That may need later tensors to be written first, so the writer's thread must not wait for it.
        """
        return bool(self._growing)

    def settle(self) -> None:
        """Wait until everything that is there is written. Raises the disk's error on it."""
        while self._under_way:
            self._finish(self._hands.finished())
            self._start()
        self.collect()

    def abandon(self) -> None:
        """Settle everything: what is written with its blob, the rest without one."""
        self._waiting.clear()
        self._growing.clear()
        with contextlib.suppress(RuntimeError):  # a thread has died, and its job with it
            while self._under_way:
                self._finish(self._hands.finished())
        self._under_way = 0
        for lane in self._lanes:
            with contextlib.suppress(Exception):  # the other shards are still written
                self._publish(lane)
            while lane.waiting:
                self._drop(lane.waiting.popleft().places)

    def close(self) -> None:
        """Cut every shard where its data ends, each of them even if another cannot be."""
        self.abandon()
        self.end_threads()
        with contextlib.ExitStack() as closing:
            for shard in self._shards:
                closing.callback(shard.trim)

    def end_threads(self) -> None:
        """End the threads that write, once their jobs are done."""
        self._hands.close()

    def _distribute(self, group: Sequence[TensorBytes]) -> None:
        """Assign a slot to each tensor, in batches, and send these."""
        lane: ShardQueue | None = None
        batch: ShardBatch | None = None
        for values in group:
            if lane is None or batch is None or batch.nbytes + values.size > BATCH_BYTES:
                self._send(lane, batch)
                lane = self._next_lane(values.size)
                batch = ShardBatch(lane.shard)
            if not batch.add(values):
                self._send(lane, batch)
                lane.shard = self._add_shard(values.size)
                batch = ShardBatch(lane.shard)
                batch.add(values)
        self._send(lane, batch)

    def _next_lane(self, size: int) -> ShardQueue:
        """The queue with the fewest bytes, or a new one. Direct writes to one file run in parallel: they add none."""
        lane = min(self._lanes, key=attrgetter("load"), default=None)
        crowded = lane is not None and lane.load >= LANE_BYTES and not self._pace.direct
        if lane is None or (crowded and len(self._lanes) < self._threads):
            lane = ShardQueue(self._add_shard(size))
            self._lanes.append(lane)
        return lane

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
        """Settle values that will not be written."""
        for values in group:
            held = values.held
            values.settle(None)
            self._written(held)

    def _send(self, lane: ShardQueue | None, batch: ShardBatch | None) -> None:
        """Queue the bytes of a batch for writing."""
        if lane is None or batch is None or not batch.places:
            return
        lane.waiting.append(batch)
        lane.load += batch.nbytes
        self._waiting.append(batch)
        self._start()

    def _start(self) -> None:
        """Give the threads up to AHEAD_BYTES."""
        while self._waiting and self._ahead < AHEAD_BYTES:
            batch = self._waiting.popleft()
            direct = batch.large > 0 and self._pace.choose(batch.large)
            self._go_on(batch, batch.jobs(direct))

    def _go_on(self, batch: ShardBatch, jobs: Iterator[WriteRequest | None]) -> None:
        """Give the jobs of a batch to the threads, as far as its bytes are there or will come by themselves."""
        for job in jobs:
            if job is None:
                self._growing[batch] = jobs
                return
            self._under_way += 1
            self._ahead += job.nbytes
            batch.left += 1
            self._hands.give(job)
        batch.complete = True

    def _finish(self, job: WriteRequest) -> None:
        self._under_way -= 1
        self._ahead -= job.nbytes
        job.owner.finish(job)
        if job.nbytes >= BATCH_BYTES // 2 and job.error is None:
            self._pace.took(job.direct, job.nbytes, job.seconds)
        if job.file.refused:
            self._pace.refuse()

    def _publish(self, lane: ShardQueue) -> None:
        """Enter the written batches of a queue into the headers of their shards, and settle their tensors."""
        while lane.waiting and lane.waiting[0].complete and not lane.waiting[0].left:
            batch = lane.waiting[0]
            if batch.error is not None:
                raise batch.error
            batch.publish()
            lane.waiting.popleft()
            lane.load -= batch.nbytes
            if batch.shard is not lane.shard and not (lane.waiting and lane.waiting[0].shard is batch.shard):
                batch.shard.close()
            self.count += len(batch.places) - len(batch.lost)
            self.nbytes += sum(values.size for values in batch.places if values not in batch.lost)
            for reason in batch.lost.values():
                self._lost(reason)
            self._written(batch.settle())


def _nothing(*_: object) -> None:
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

    __slots__ = ("complete", "error", "large", "left", "lost", "nbytes", "places", "shard")

    def __init__(self, shard: ShardFile) -> None:
        self.shard = shard
        self.places: dict[TensorBytes, ShardSlot] = {}
        self.nbytes = 0
        self.large = 0  # bytes that may be written directly
        self.left = 0  # jobs that are not done
        self.complete = False  # whether all its jobs were given to the threads
        self.error: Exception | None = None
        self.lost: dict[TensorBytes, str] = {}  # whose bytes never came, and why

    def add(self, values: TensorBytes) -> bool:
        """Assign a slot to a tensor; False when it needs the next shard."""
        place = self.shard.place(values.name, values.dtype, values.shape, values.size, certain=values.source is None)
        if place is not None:
            self.places[values] = place
            self.nbytes += place.nbytes
            self.large += place.nbytes if place.nbytes >= LARGE else 0
        return place is not None

    def jobs(self, direct: bool) -> Iterator[WriteRequest | None]:
        """The requests that write the batch, cut so that memory is freed as it is written.

        A request is direct from its first byte on. None says that more will come later.
        """
        job: WriteRequest | None = None
        for values, place in self.places.items():
            end, pages = place.offset, direct and place.nbytes >= LARGE
            for piece in self._pieces(values):
                full = job is not None and job.nbytes >= PIECE_BYTES
                if job is not None and (piece is None or full or (pages and not job.direct) or end - job.end >= PAGE):
                    yield job
                    job = None
                if piece is None:
                    yield None
                else:
                    job = job or WriteRequest(self.shard.file, end, pages and end % PAGE == 0, self)
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

    def finish(self, job: WriteRequest) -> None:
        self.left -= 1
        self.error = self.error or job.error
        self.lost.update(job.lost)

    def publish(self) -> None:
        """Enter the tensors into the header."""
        self.shard.publish(self.places.values(), [self.places[values] for values in self.lost])

    def settle(self) -> int:
        """Set where each tensor is; returns how many bytes of memory became free."""
        held = 0
        for values, place in self.places.items():
            held += values.held
            blob = Blob(self.shard.number, place.offset, place.nbytes, values.sampled, values.part)
            values.settle(None if values in self.lost else blob)
        return held


class WriteModeChooser:
    """Which way of writing is faster now: through the page cache, or directly to the disk.

    Into free memory the kernel copies faster than any disk writes; once that is full, or shared with others, it is
    slower than handing the disk the bytes themselves. Neither can be known beforehand, so both are measured: the other
    way is tried again after a while, with a few bytes.
    """

    FIRST = 32 << 20  # buffered in any case: most recordings are shorter
    TRIAL = 32 << 20
    AGAIN = 2 << 30, 16 << 30  # bytes until the other way is tried again: at first, and at most
    MEMORY = 64 << 20  # bytes over which a speed is averaged

    def __init__(self) -> None:
        self.direct = False  # whether direct writes are faster, as far as is known
        self._possible = True
        self._cost: dict[bool, float] = {}  # seconds per byte
        self._trying = False  # whether the other way is being tried
        self._left = self.FIRST  # bytes until that changes
        self._interval = self.AGAIN[0]

    def refuse(self) -> None:
        """Direct writes are not possible."""
        self._possible = self.direct = self._trying = False

    def choose(self, nbytes: int) -> bool:
        """Whether the next bytes should be written directly."""
        if not self._possible:
            return False
        self._left -= nbytes
        if self._left < 0:
            self._trying = not self._trying
            self._left = self.TRIAL if self._trying else self._interval
            if not self._trying:
                self._interval = min(2 * self._interval, self.AGAIN[1])
        if not self._trying:
            self._follow()
        return self.direct != self._trying

    def took(self, direct: bool, nbytes: int, seconds: float) -> None:
        """Add a measurement: how long these bytes took."""
        weight = min(1.0, nbytes / self.MEMORY)
        cost = seconds / nbytes
        self._cost[direct] = cost * weight + self._cost.get(direct, cost) * (1 - weight)

    def _follow(self) -> None:
        """Switch to the other way when that is faster, and then try both more often for a while."""
        if self._cost.get(not self.direct, float("inf")) < 0.9 * self._cost.get(self.direct, 0.0):
            self.direct = not self.direct
            self._left = self._interval = self.AGAIN[0]
