"""Measures the tensors of a CUDA device with our kernels: device memory for their results, and one copy back per step.

A kernel is launched on the stream that the program is using, so it reads a tensor after the program has written it and
before the program changes it or frees its memory; nothing waits. Each program of a kernel leaves a partial row. At the
end of a step one more kernel merges the partial rows of every tensor, and one copy brings the results to pinned memory,
where the writer's thread reads them. The partial rows are then overwritten, which the order of a stream makes safe;
streams that are new since then wait for that moment. `Slots` count what is measured; native code takes from them too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from astray.device import layout, triton_kernels
from astray.device.launcher import CAPTURING, Kernel, NoKernelsError, kernel, relax_capture, unobserved
from astray.device.tickets import CAPTURED, SLOTS, WIDTH, ResultRows, Segment, Tickets
from astray.interrupts import interrupt_of, pass_interrupt
from astray.stats import ShardPosition, Strided

PARTIALS = 1 << 18
"""The most partial rows before results are fetched: 21 MB of device memory."""

_MAX_AGE_SECONDS = 0.5  # after which results are fetched though the step is not over
_MAX_LAUNCHES = 20_000  # that are cached
_MAX_LISTS = 32  # of tensors, kept on the device


class _Launch(NamedTuple):
    """How a tensor of one layout is measured."""

    launch: Callable[..., int]
    programs: int
    arguments: tuple[int, ...]


class _TensorList(NamedTuple):
    """Tensors that are measured together."""

    memories: list[Strided]
    kernel: Kernel
    programs: int
    words: torch.Tensor  # addresses and sizes, on the device


class CudaMeasurer:
    """The measurements of one device. Raises NoKernelsError when its kernels cannot run there."""

    def __init__(self, device: torch.device, tickets: Tickets) -> None:
        self._device = device
        self._index: int = device.index
        self._tickets = tickets
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Two 16-bit numbers in one instruction: the instructions that the kernels use came with sm_90.
        self._pairs = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
        self._merge_rows = kernel(triton_kernels.MERGE_ROWS, self._index)
        with unobserved():
            self._partials, self._table, self._results = (
                torch.empty(size, dtype=torch.int64, device=device)
                for size in (WIDTH * PARTIALS, 2 * SLOTS, WIDTH * SLOTS)
            )
        self._into = self._partials.data_ptr(), PARTIALS, self._table.data_ptr()
        self._slots = Slots(SLOTS, PARTIALS, self._partials.data_ptr(), self._table.data_ptr())
        self._kernels: dict[Any, Kernel] = {}
        self._launches: dict[Any, _Launch] = {}
        self._lists: dict[tuple[int, str, bool], _TensorList] = {}
        self._pinned: list[torch.Tensor] = []  # free host memory
        self._segment = tickets.open()
        self._slots.open(self._segment.number)
        self._opened = 0.0
        self._streams: dict[int, None] = {}  # those with kernels since the last merge, in order
        self._merged: torch.cuda.Event | None = None
        tickets.add(self)

    def measure(self, memory: Strided, shard: ShardPosition | None, statistics: bool) -> int | str:
        """Starts to measure a tensor of this device, and returns the ticket; a string says why that cannot be done."""
        address, dtype, shape, stride = memory
        key = (dtype, shape, stride, address % 16, shard, statistics)
        prepared = self._launches.get(key)
        if prepared is None:
            prepared = self._prepare(key)
        launch, programs, arguments = prepared
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._slots as slots:  # a segment must not be fetched while one of its kernels is being launched
            if stream not in self._streams and not self._join(stream):
                return CAPTURED
            slots.stream = stream
            if slots.count == SLOTS or slots.used + programs > PARTIALS or self._is_late():
                if torch.cuda.is_current_stream_capturing():
                    return CAPTURED
                self._send()
            partials, capacity, table = self._into
            code = launch(programs, stream, address, partials, capacity, slots.used, table, slots.count, *arguments)
            if code:
                return CAPTURED if code == CAPTURING else self._merge_rows.explain(code)
            return self._segment.ticket(slots.take(programs), statistics)

    def measure_together(self, memories: Sequence[Strided], statistics: bool) -> list[int] | None:
        """Measures tensors of one dtype in one launch, and returns their tickets. None where that cannot be done.

        They are dense and begin at multiples of 16 bytes. The same ones again, as the parameters of a model in every
        step, cost one launch and nothing else.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        with self._slots as slots:
            if stream not in self._streams and not self._join(stream):
                return None
            listed = self._listed(stream, memories, statistics)
            if listed is None or slots.count + len(memories) > SLOTS or slots.used + listed.programs > PARTIALS:
                return None
            slots.stream = stream
            if not slots.count:
                self._opened = time.monotonic()
            partials, capacity, table = self._into
            arguments = partials, capacity, slots.used, table, slots.count, len(memories)
            if listed.kernel.launch(listed.programs, stream, listed.words.data_ptr(), *arguments):
                return None
            segment, first = self._segment, slots.take(listed.programs, len(memories))
        return [segment.ticket(slot, statistics) for slot in range(first, first + len(memories))]

    def _listed(self, stream: int, memories: Sequence[Strided], statistics: bool) -> _TensorList | None:
        """The list of these tensors on the device. Each stream has its own, used in the order of the stream only."""
        dtype = memories[0][1]
        key = (stream, dtype, statistics)
        known = self._lists.get(key)
        if known is not None and known.memories == memories:
            return known
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            tensors = [(address, prod(shape)) for address, _, shape, _ in memories]
            plan = layout.plan_many(tensors, dtype, statistics, self._processors, self._pairs)
            loaded = kernel(plan.source, self._index)
        except (ValueError, NoKernelsError) as error:
            pass_interrupt(error)
            return None
        with unobserved():
            words = torch.from_numpy(plan.words).to(self._device)
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        listed = self._lists[key] = _TensorList(list(memories), loaded, plan.programs, words)
        return listed

    def _prepare(self, key: tuple[Any, ...]) -> _Launch:
        dtype, shape, stride, alignment, shard, statistics = key
        plan = layout.plan(shape, stride, dtype, alignment, shard, statistics, self._processors, self._pairs)
        known = self._kernels.get(id(plan.source))
        if known is None:
            known = self._kernels[id(plan.source)] = kernel(plan.source, self._index)
        if len(self._launches) > _MAX_LAUNCHES:  # shapes that change with every call
            self._launches.clear()
        prepared = self._launches[key] = _Launch(known.launch, plan.programs, plan.arguments)
        return prepared

    def _is_late(self) -> bool:
        """Whether the segment has been open for long; checked for every 64th measurement."""
        count = self._slots.count
        if not count:
            self._opened = time.monotonic()
        return count % 64 == 0 and time.monotonic() - self._opened > _MAX_AGE_SECONDS

    def _join(self, stream: int) -> bool:
        """Makes a stream wait that has launched nothing since the last merge: it must not overwrite what is merged.

        False when it is being captured: it cannot wait for anything outside of the graph.
        """
        with unobserved():
            joining = _stream(stream, self._device)
            if _is_captured(joining):
                return False
            if self._merged is not None:
                joining.wait_event(self._merged)
        self._streams[stream] = None
        return True

    def close(self) -> None:
        """Starts to fetch what was measured since the last time. Raises nothing."""
        with self._slots:
            self._send()

    def abandon(self, why: str) -> None:
        """Marks as lost what could not be fetched."""
        with self._slots as slots:
            if slots.count:
                self._segment.lose(why)
                self._next()

    def _send(self) -> None:
        segment = self._segment
        segment.count = self._slots.count
        if not segment.count:
            return
        interrupt = None
        try:
            with unobserved():
                sent = self._merge(segment)
        except Exception as error:  # noqa: BLE001 - a device that has failed must not end the program through us
            interrupt = interrupt_of(error)
            segment.lose(f"the device failed: {str(error).partition(chr(10))[0]}")
            sent = True
        if sent or segment.count == SLOTS:
            self._next()
        if interrupt is not None:
            raise interrupt

    def _next(self) -> None:
        segment = self._segment
        if not segment.is_due:
            segment.lose(CAPTURED)
        self._segment = self._tickets.open()
        self._slots.open(self._segment.number)
        self._tickets.sent(segment)

    def _merge(self, segment: Segment) -> bool:
        """Merges the partial rows of a segment and starts the copy of the results; False while a graph is captured."""
        *others, last = streams = [_stream(stream, self._device) for stream in self._streams]
        if any(map(_is_captured, streams)):
            return False
        with torch.cuda.stream(last):
            for other in others:
                last.wait_stream(other)
            partials, capacity, table = self._into
            code = self._merge_rows.launch(
                segment.count, last.cuda_stream, partials, capacity, table, self._results.data_ptr(), SLOTS
            )
            if code:
                raise RuntimeError(self._merge_rows.explain(code))
            host = (
                self._pinned.pop() if self._pinned else torch.empty(WIDTH * SLOTS, dtype=torch.int64, pin_memory=True)
            )
            host.copy_(self._results, non_blocking=True)
            arrived = self._merged = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._streams = {last.cuda_stream: None}
        self._slots.stream = last.cuda_stream
        count = segment.count

        def fetch() -> ResultRows:
            relax_capture()
            arrived.synchronize()
            rows: ResultRows = host.numpy().reshape(WIDTH, SLOTS)[:, :count].copy()
            self._pinned.append(host)
            return rows

        segment.send(fetch)
        return True


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _stream(raw: int, device: torch.device) -> torch.cuda.Stream:
    if not raw:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(raw, device)  # type: ignore[no-untyped-call]


class PythonSlots:
    """The slots of the open segment, counted by the measurer and by native code together.

    The native `Slots` do the same. It is a lock, to be held for any use. There may be `most` measurements in a segment,
    whose kernels leave at most `partials` rows: at `rows_at` on the device, with a table of them at `table_at`.
    """

    def __init__(self, most: int, partials: int, rows_at: int, table_at: int) -> None:
        self.most, self.partials, self.rows_at, self.table_at = most, partials, rows_at, table_at
        self.number = 0  # of the segment
        self.count = 0  # measurements in it
        self.used = 0  # partial rows
        self.stream: int | None = None
        """A stream that may launch without `_join`; mostly the one that did so last."""
        self._lock = threading.Lock()

    def __enter__(self) -> PythonSlots:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def open(self, number: int) -> None:
        """Begin the segment of that number."""
        self.number, self.count, self.used = number, 0, 0

    def take(self, programs: int, slots: int = 1) -> int:
        """Take the next slots, of which the first is returned, and so many partial rows for them."""
        first = self.count
        self.count, self.used = first + slots, self.used + programs
        return first


if TYPE_CHECKING:
    Slots = PythonSlots
else:
    try:
        from astray.device._launch import Slots
    except ImportError:  # installed where there was no compiler
        Slots = PythonSlots
