"""Records the tensors of calls: measures each memory once, and hands rows to the writer.

`Engine`, which makes one, numbers the calls. Runs while the user's program waits, possibly on several threads at once.
A row describes the tensor; its statistics are known at once, or come later for a ticket that the writer redeems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.capture.adapters import SlowPath, TensorIdentity, TensorReader, TensorReading
from astray.capture.measurement_cache import CachedMeasurement, MeasurementCache, UnfilledMemory
from astray.capture.nonfinite_values import NonFiniteKeeper, ObservedTensor, has_nonfinite
from astray.capture.selection import Quota, RecordedBytes
from astray.capture.settings import Settings
from astray.interrupts import pass_interrupt
from astray.part import Part
from astray.records import Role
from astray.stats import Strided, gather, measure, pack
from astray.stats.dtypes import DTYPES
from astray.store import BackgroundWriter, TensorBytes

_VALUES = CachedMeasurement._fields.index("values")

NO_ROW = -1
"""The number of a call that has no row, because the settings exclude it."""


class Observer:
    """The tensors of one recording in progress.

    The adapter's native code observes plain tensors; the methods here observe the others.
    """

    observe: Callable[[int, Role, str, Any], bool | None]
    """Records one tensor of a call as it is now: number of the call, role, path, tensor.

    True when it is known already to hold NaN or infinities, and a guard keeps such calls: the caller then calls
    `on_nonfinite`.
    """

    observe_unread: Callable[[int, Role, str, Any], bool | None]
    """The same for a tensor whose memory may not have been filled yet, or only a part of it.

    Its numbers are not read, since they would differ in each run. It is never recorded as an input.
    """

    written: Callable[[Any], None]
    """A call has written into this tensor."""

    changed: Callable[[Any], None]
    """A call wrote into this tensor, perhaps without its version counter changing."""

    def __init__(self, writer: BackgroundWriter, reader: TensorReader, settings: Settings) -> None:
        self.reader = reader
        self.forget_count = 0  # how often everything known of memory was forgotten
        self.quota = Quota(settings)
        self._writer = writer
        self._measurements = MeasurementCache()
        self._unfilled = UnfilledMemory()
        slow_path = SlowPath(
            self._observe_unusual,
            self._observe_unread,
            self._written,
            self._changed,
            self._measure_first,
            self._unfilled,
            writer,
        )
        self.native = native = reader.native_observer(slow_path)
        self.observe, self.observe_unread = native.observe, native.observe_unread
        self.written, self.changed = native.written, native.changed
        self._nonfinite_keeper = NonFiniteKeeper(writer, reader) if writer.catches else None
        native.report_nonfinite(self._nonfinite_keeper is not None)
        reader.start(self._clear, writer.waited, settings.queue_bytes)
        self.apply(settings)

    @property
    def recorded(self) -> RecordedBytes:
        """What was recorded so far."""
        self.quota.count(self.native.take_row_count())
        return self.quota.recorded

    def apply(self, settings: Settings) -> None:
        """Records by these settings from now on."""
        self.quota.count(self.native.take_row_count())
        self.quota.change(settings)
        self._roles = settings.roles
        self._ops = "op" in settings.level
        self._statistics = settings.wants_statistics
        self._keeps_tensors = "tensors" in settings.keep
        self._keeps_sample = "sample" in settings.keep
        self._samples = settings.samples
        self._part: Part | None = settings.slice
        self._clear()  # other values may have to be kept now
        plain = not self.quota.is_limited and self._part is None
        self.native.apply(plain, self._roles, self._statistics, self._keeps_tensors or self._keeps_sample, self._ops)

    def _clear(self) -> None:
        """Forgets all measurements; the numbers of values stay."""
        self._measurements.clear()
        self.native.clear()

    def _observe_unusual(self, seq: int, role: Role, path: str, tensor: Any) -> bool | None:
        if seq == NO_ROW or role not in self._roles or not self.quota.row():
            return None
        reader = self.reader
        identity = reader.identity(tensor)
        number = None
        if identity is not None:
            owner, key, _, dtype, shape, stride, version = identity
            if self._unfilled:
                self._unfilled.discard(owner)
            if self._part is not None:
                key = (key, shape)  # another shape has another part
            measurement = self._measurements.find(owner, key)
            if measurement is None or (measurement[_VALUES] is not None and measurement[_VALUES].stale):
                measurement = self._measure(tensor, reader.read(tensor, identity, self._statistics), seq, role, path)
                self._measurements.add(owner, key, measurement)
            number = self.native.value_number(owner, version)
        else:
            reading = reader.read(tensor, None, self._statistics)
            dtype, shape, stride = reading.dtype, reading.shape, reading.stride
            measurement = self._measure(tensor, reading, seq, role, path)
        statistics, fingerprint, values, placement, note = measurement
        self._writer.tensor_row(
            (
                seq, role, path, dtype, shape, stride, reader.device(tensor), reader.requires_grad(tensor),
                statistics, fingerprint, values, placement, note, number,
            )
        )  # fmt: skip
        return True if self._nonfinite_keeper is not None and has_nonfinite(statistics) else None

    def on_nonfinite(self, seq: int, tensors: list[ObservedTensor], args: str | None) -> None:
        """A call has returned NaN or infinities. tensors: those of the call. args: its arguments as text."""
        if self._nonfinite_keeper is None or self._keeps_tensors or self._keeps_sample:  # else values are kept already
            return
        try:
            self._nonfinite_keeper.examine(seq, tensors, args)
        except Exception as error:  # noqa: BLE001 - the rows of the call are there all the same
            pass_interrupt(error)
            self._writer.missed("the tensors of a call that gave NaN or infinity", f"{type(error).__name__}: {error}")

    def _measure_first(
        self, tensor: Any, identity: TensorIdentity, seq: int, role: Role, path: str
    ) -> CachedMeasurement:
        """Measures a memory that is not in the cache, for native code."""
        return self._measure(tensor, self.reader.read(tensor, identity, self._statistics), seq, role, path)

    def _measure(self, tensor: Any, reading: TensorReading, seq: int, role: Role, path: str) -> CachedMeasurement:
        values = fingerprint = None
        statistics: tuple[Any, ...] | int | None = None
        if reading.memory is not None:
            memory = reading.memory if reading.box is None else reading.box
            measured, fingerprint = measure(memory, statistics=self._statistics, shard=reading.shard)
            # The garbage collector does not visit plain tuples of numbers.
            statistics = None if measured is None else tuple(measured)
            if self._keeps_tensors or self._keeps_sample:
                values = self._values(reading.memory, f"{seq}.{role}.{path}")
        elif reading.ticket is not None:
            statistics = reading.ticket
            if self._keeps_tensors or self._keeps_sample:
                values = self._fetch(tensor, reading, f"{seq}.{role}.{path}")
        else:
            self._writer.missed(f"the numbers of a {reading.dtype} tensor", reading.note or "unknown")
        return CachedMeasurement(statistics, fingerprint, values, reading.placement, reading.note)

    def _values(self, memory: Strided, name: str) -> TensorBytes | None:
        """The values of a tensor that are kept, queued for the writer; None when `max_bytes` is spent."""
        kept = self._selected(memory)
        if kept is None:
            return None
        memory, part, positions = kept
        if positions is None:
            buffer = self._writer.take_buffer(memory.size * DTYPES[memory.dtype].itemsize)
            pack(memory, buffer.array)
            return self._writer.values(buffer, name, memory.dtype, memory.shape, part=part)
        sampled = len(positions)
        return self._writer.values(gather(memory, positions), name, memory.dtype, (sampled,), sampled, part)

    def _fetch(self, tensor: Any, reading: TensorReading, name: str) -> TensorBytes | None:
        """The same for a tensor on a device."""
        kept = self._selected(Strided(0, reading.dtype, reading.shape, reading.stride))
        if kept is None:
            return None
        memory, part, positions = kept
        source = self.reader.fetch(tensor, memory, positions)
        if isinstance(source, str):
            self._writer.missed(f"the values of a {reading.dtype} tensor", source)
            return None
        sampled = None if positions is None else len(positions)
        shape = memory.shape if sampled is None else (sampled,)
        return self._writer.values(source, name, memory.dtype, shape, sampled, part)

    def _selected(self, memory: Strided) -> tuple[Strided, str | None, npt.NDArray[np.int64] | None] | None:
        """The part of a tensor that is kept, its name, and which elements of it; None when `max_bytes` is spent."""
        part = None
        if self._part is not None:
            memory, part = _slice(memory, self._part)
        sampled = memory.size if self._keeps_tensors else min(memory.size, self._samples)
        if not self.quota.values(sampled * DTYPES[memory.dtype].itemsize):
            return None
        return memory, part, None if self._keeps_tensors else self._writer.positions(memory.size, self._samples)

    def _observe_unread(self, seq: int, role: Role, path: str, tensor: Any) -> bool | None:
        if not self._unfilled or self.reader.owner(tensor) not in self._unfilled:
            return self.observe(seq, role, path, tensor)
        if role != "input" and seq != NO_ROW and role in self._roles and self.quota.row():
            reader = self.reader
            identity = reader.identity(tensor)
            what = reader.read(tensor, None, False) if identity is None else identity
            self._writer.tensor_row(
                (
                    seq, role, path, what.dtype, what.shape, what.stride, reader.device(tensor),
                    reader.requires_grad(tensor), None, None, None, None, "only a part of it has been filled yet", None,
                )
            )  # fmt: skip
        return None

    def allocated(self, tensor: Any) -> None:
        """Memory was allocated and not filled."""
        owner = self.reader.owner(tensor)
        if owner is not None:
            self._unfilled.add(owner)

    def _written(self, tensor: Any) -> None:
        self._changed(tensor)
        if self._ops:
            identity = self.reader.identity(tensor)
            if identity is not None:
                self.native.written_ahead(identity.owner, identity.version)
        if self._unfilled and self.reader.is_whole(tensor):
            self._unfilled.discard(self.reader.owner(tensor))

    def _changed(self, tensor: Any) -> None:
        owner = self.reader.owner(tensor)
        if owner is not None:
            self._measurements.changed(owner)
            self.native.forget(owner)

    def forget(self) -> None:
        """Forgets all measurements: summed gradients, and writes through `.data`, bypass version counters."""
        self.forget_count += 1
        self._measurements.clear()
        self.native.renumber()

    def next_step(self) -> None:
        """The step is over."""
        self._measurements.clear()
        self.native.next_step()
        self.quota.next_step()
        if self._nonfinite_keeper is not None:
            self._nonfinite_keeper.next_step()


def _slice(memory: Strided, part: Part) -> tuple[Strided, str | None]:
    """The part of a tensor that is to be kept, and its name; the whole when the part does not fit."""
    cut = part.apply_shape(memory.shape, memory.stride)
    if cut is None:
        return memory, None
    offset, shape, stride = cut
    itemsize = DTYPES[memory.dtype].itemsize
    return Strided(memory.address + offset * itemsize, memory.dtype, shape, stride), str(part)
