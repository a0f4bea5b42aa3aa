"""Numbers the calls of a running program, measures their tensors once, and hands rows to the writer.

Knows no framework: an adapter tells it when a call starts and ends, and reads tensors for it. Everything here runs
while the user's program waits, possibly on several threads at once, so it is short and holds a lock only to
number a call. Adapters catch whatever goes wrong here and report it through `failed`.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from types import FrameType
from typing import Any, NamedTuple, Protocol

from astray.capture.settings import Settings
from astray.capture.sightings import Sighting, Sightings
from astray.capture.stacks import Stacks
from astray.record import Call, Kind, Role, Tensor
from astray.stats import Strided, gather, measure, pack, sample_positions
from astray.store import RunWriter, Values

logger = logging.getLogger("astray")


class Reading(NamedTuple):
    """A tensor as its adapter sees it. `memory` is None when its numbers cannot be read; `note` then says why."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    memory: Strided | None
    owner: Any = None  # keeps `memory` alive, when that is a copy of the tensor
    placement: str | None = None
    note: str | None = None


Identity = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Version, address, shape and stride: what changes whenever a tensor's numbers may have."""


class TensorReader(Protocol):
    """What the engine asks of an adapter."""

    def identity(self, tensor: Any) -> Identity | None:
        """None when it cannot be told whether the tensor has changed."""

    def requires_grad(self, tensor: Any) -> bool: ...

    def read(self, tensor: Any, identity: Identity | None) -> Reading:
        """`identity` is what this reader said of the tensor a moment ago."""


class Site(NamedTuple):
    """A place in the program where calls happen. `root` is the outermost module it belongs to."""

    name: str
    type: str
    root: str
    kind: Kind = "module"


class OpenCall:
    """A forward call that has started: what the calls inside it and its backward need to know of it."""

    __slots__ = ("adapter", "frame", "micro", "number", "recompute", "seq", "site", "stack", "step")

    def __init__(self, seq: int, step: int, micro: int, site: Site, number: int, recompute: bool) -> None:
        self.seq = seq
        self.step = step
        self.micro = micro
        self.site = site
        self.number = number
        self.recompute = recompute
        self.stack: int | None = None
        self.frame: FrameType | None = None
        self.adapter: Any = None  # the adapter's own, while the call runs


class Engine:
    """One recording in progress. `recording` is False whenever a tap should cost nothing."""

    def __init__(self, writer: RunWriter, settings: Settings, reader: TensorReader, internal: tuple[str, ...]) -> None:
        self._writer = writer
        self._settings = settings
        self.reader = reader
        self._stacks = Stacks(writer.stack, internal)
        self._sightings = Sightings()
        self._seq = itertools.count()
        self._local = threading.local()
        self._numbering = threading.Lock()
        self._micro: dict[str, int] = {}  # of the last outermost forward call of each root
        self._passing: dict[str, int] = {}  # of the call through which the backward pass came last
        self._numbers: dict[tuple[str, bool], tuple[int, int]] = {}  # micro step and next number of a site
        self._process = os.getpid()
        self._statistics = settings.wants_statistics
        self._whole = "tensors" in settings.keep
        self._sample = "sample" in settings.keep
        self._failed_once = False
        self.step = 0
        self.recording = 0 in settings.steps

    # -- calls ---------------------------------------------------------------------------------------------------

    def enter(self, site: Site, frame: FrameType | None, args: str | None, *, recompute: bool = False) -> OpenCall:
        """A forward call starts. `frame` is the innermost frame of the call that the stack should start from."""
        open_calls = self._open_calls()
        stack = self._stack(frame, open_calls)
        outer = open_calls[-1] if open_calls else None
        micro = outer.micro if outer is not None else self._outermost(site.root, recompute)
        number = self._number(site.name, micro, recompute)
        call = OpenCall(next(self._seq), self.step, micro, site, number, recompute)
        call.frame, call.stack = frame, stack
        open_calls.append(call)
        parent = outer.seq if outer is not None else None
        self._writer.call(
            Call(
                call.seq, call.step, micro, site.kind, site.name, site.type, number, "forward",
                parent, call.stack, args, recompute,
            )
        )  # fmt: skip
        return call

    def _stack(self, frame: FrameType | None, open_calls: list[OpenCall]) -> int | None:
        """The Python stack of a call that starts; drops open calls that are not on it, such as interrupted ones."""
        while open_calls:
            outer = open_calls[-1]
            stack = self._stacks.capture(frame, outer.frame, outer.stack)
            if stack is not None:
                return stack
            open_calls.pop().frame = None
        return self._stacks.capture(frame)

    def leave(self, site: Site) -> OpenCall | None:
        """The innermost open call of `site` ends; calls inside it that an exception left open end with it."""
        open_calls = self._open_calls()
        for depth in range(len(open_calls) - 1, -1, -1):
            if open_calls[depth].site is site:
                call = open_calls[depth]
                for ended in open_calls[depth + 1 :]:
                    ended.frame = None  # a frame holds everything its function does
                del open_calls[depth:]
                return call
        return None

    def backward(self, forward: OpenCall) -> int:
        """The backward of a forward call starts; returns its number."""
        seq = next(self._seq)
        site = forward.site
        self._passing[site.root] = forward.micro
        self._writer.call(
            Call(
                seq, forward.step, forward.micro, site.kind, site.name, site.type, forward.number, "backward",
                forward.seq, forward.stack, None, forward.recompute,
            )
        )  # fmt: skip
        return seq

    def event(self, site: Site, phase: Any) -> int:
        """Something happened that is no call of a function, such as a parameter receiving its gradient."""
        seq = next(self._seq)
        micro = self._passing.get(site.root, self._micro.get(site.root, 0))
        number = self._number(site.name, micro, False)
        self._writer.call(Call(seq, self.step, micro, site.kind, site.name, site.type, number, phase))
        return seq

    def _number(self, site: str, micro: int, recompute: bool) -> int:
        """Which call of its site this is, in its micro step. Work done again is numbered apart."""
        key = (site, recompute)
        with self._numbering:
            counted, number = self._numbers.get(key, (micro, 0))
            if counted != micro:  # earlier micro steps are not kept: a generation loop may have millions
                number = 0
            self._numbers[key] = (micro, number + 1)
        return number

    def _open_calls(self) -> list[OpenCall]:
        try:
            return self._local.open_calls  # type: ignore[no-any-return]
        except AttributeError:
            calls: list[OpenCall] = []
            self._local.open_calls = calls
            return calls

    def _outermost(self, root: str, recompute: bool) -> int:
        """The micro step of an outermost call: each counts one further, but work done again for a backward is its."""
        if recompute:
            return self._passing.get(root, self._micro.get(root, 0))
        micro = self._micro[root] = self._micro.get(root, -1) + 1
        return micro

    # -- tensors -------------------------------------------------------------------------------------------------

    def observe(self, seq: int, role: Role, path: str, tensor: Any) -> None:
        """Records one tensor of a call as it is now."""
        identity = self.reader.identity(tensor)
        seen = self._sightings.find(tensor, identity) if identity is not None else None
        if seen is None:
            seen = self._measure(tensor, identity, f"{seq}.{role}.{path}")
            if identity is not None:
                self._sightings.add(tensor, seen)
        self._writer.tensor(
            Tensor(
                seq, role, path, seen.dtype, seen.shape, seen.stride, seen.device, self.reader.requires_grad(tensor),
                seen.statistics, seen.fingerprint, None, seen.placement, seen.note,
            ),
            seen.values,
        )  # fmt: skip

    def _measure(self, tensor: Any, identity: Identity | None, name: str) -> Sighting:
        reading = self.reader.read(tensor, identity)
        statistics = fingerprint = values = None
        if reading.memory is not None:
            statistics, fingerprint = measure(reading.memory, statistics=self._statistics)
            values = self._values(reading, reading.memory, name)
        else:
            self.missed(f"the numbers of a {reading.dtype} tensor", reading.note or "unknown")
        return Sighting(
            weakref.ref(tensor) if identity is not None else None, identity, reading.dtype, reading.shape,
            reading.stride, reading.device, statistics, fingerprint, values, reading.placement, reading.note,
        )  # fmt: skip

    def _values(self, reading: Reading, memory: Strided, name: str) -> Values | None:
        if self._whole:
            return self._writer.values(pack(memory), name, reading.dtype, reading.shape)
        if self._sample:
            positions = sample_positions(memory.size, self._settings.samples)
            kept = gather(memory, positions)
            return self._writer.values(kept, name, reading.dtype, (len(positions),), sampled=len(positions))
        return None

    # -- the course of the recording -----------------------------------------------------------------------------

    def next_step(self) -> None:
        """The step is over: numbering starts anew, and what was recorded goes to disk."""
        self.step += 1
        self._micro.clear()
        self._passing.clear()
        self._numbers.clear()
        self._sightings.clear()
        self._writer.step_done()
        self.recording = self.step in self._settings.steps

    @property
    def has_open_calls(self) -> bool:
        """Whether a call that was recorded at its start has not ended yet, on this thread."""
        return bool(self._open_calls())

    def belongs_here(self) -> bool:
        """False in a forked child, such as a DataLoader's worker, which must not record."""
        return os.getpid() == self._process

    def missed(self, what: str, why: str) -> None:
        """Something could not be observed. It is counted, and listed in the run."""
        self._writer.missed(what, why)

    def failed(self, doing: str, error: Exception) -> None:
        """Something inside astray went wrong. The program goes on; the run says so, and the user is told once."""
        self.missed(doing, f"{type(error).__name__}: {error}")
        if not self._failed_once:
            self._failed_once = True
            logger.warning(
                "astray could not record %s (%s: %s). The program is not affected; what is missing is listed in the "
                "run's end.json.", doing, type(error).__name__, error,
            )  # fmt: skip
