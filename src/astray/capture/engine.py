"""Numbers the calls of a running program, measures their tensors once, and hands rows to the writer.

Knows no framework: an adapter tells it when a call starts and ends, and reads tensors for it. Everything here runs
while the user's program waits, possibly on several threads at once, so it is short and holds a lock only to
number a call. Adapters catch whatever goes wrong here and report it through `failed`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Hashable
from types import FrameType
from typing import Any, NamedTuple, Protocol

from astray.capture.selection import Quota, Scope, Selection
from astray.capture.settings import Settings
from astray.capture.sightings import Sighting, Sightings, Unfilled
from astray.capture.stacks import Stacks
from astray.record import Call, Kind, Phase, Role, Tensor
from astray.stats import Shard, Strided, gather, measure, pack, sample_positions
from astray.stats.dtypes import DTYPES
from astray.store import RunWriter, Values

logger = logging.getLogger("astray")

NOT_WRITTEN = -1
"""The number of a call that has no row, because it was not asked for."""

NOTHING = "any call"
"""What was missed when the settings left nothing to record."""

_FEW = 5

_LEVEL_OF: dict[Kind, str] = {"module": "module", "function": "function", "collective": "function", "op": "op"}
"""Which level a kind of call belongs to. The others are recorded whatever the level."""


class Identity(NamedTuple):
    """What a tensor is right now, as far as it can be told without reading its numbers.

    `owner` is the living object that owns the memory; `key` changes whenever the numbers may have, and is the same for
    two tensors that hold the same numbers in the same order. `address` is 0 where the memory cannot be read directly.
    """

    owner: Any
    key: Hashable
    address: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Reading(NamedTuple):
    """A tensor as its adapter sees it. `memory` is None when its numbers cannot be read; `note` then says why."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    memory: Strided | None
    owner: Any = None  # keeps `memory` alive, when that is a copy of the tensor
    box: Strided | None = None  # the same memory, shaped as `shard` has it
    shard: Shard | None = None
    placement: str | None = None
    note: str | None = None


class TensorReader(Protocol):
    """What the engine asks of an adapter."""

    def identity(self, tensor: Any) -> Identity | None:
        """None when it cannot be told whether the tensor has changed."""

    def requires_grad(self, tensor: Any) -> bool: ...

    def device(self, tensor: Any) -> str: ...

    def owner(self, tensor: Any) -> Any:
        """The object that owns its memory; None when there is none to name."""

    def is_whole(self, tensor: Any) -> bool:
        """Whether it is all of the memory that its owner has."""

    def read(self, tensor: Any, identity: Identity | None) -> Reading:
        """`identity` is what this reader said of the tensor a moment ago."""


class Site:
    """A place in the program where calls happen.

    `root` is the outermost module it belongs to, `module` the name of the module itself, of the one that encloses a
    function, or of the one that owns a parameter. `wanted` was decided by `judge`, the selection of that time.
    """

    __slots__ = ("judge", "kind", "module", "name", "root", "type", "wanted")

    def __init__(self, name: str, type: str, root: str, kind: Kind = "module", module: str | None = None) -> None:
        self.name = name
        self.type = type
        self.root = root
        self.kind: Kind = kind
        self.module = name if module is None else module
        self.judge: Selection | None = None
        self.wanted = True


class OpenCall:
    """A call that has started: what the calls inside it and its backward need to know of it.

    `recorded` says whether anything of it is wanted, `seq` is the number of its row or NOT_WRITTEN. `anchor` is the
    number of the innermost call that has a row, this one or one around it.
    """

    __slots__ = (
        "adapter", "anchor", "frame", "inside", "micro", "number", "parent", "phase", "recompute", "recorded", "seq",
        "site", "stack", "step",
    )  # fmt: skip

    def __init__(self, site: Site, step: int, micro: int, phase: Phase, recompute: bool, parent: int | None) -> None:
        self.site = site
        self.step = step
        self.micro = micro
        self.phase: Phase = phase
        self.recompute = recompute
        self.parent = self.anchor = parent
        self.recorded = False
        self.seq = NOT_WRITTEN
        self.number = 0
        self.stack: int | None = None
        self.frame: FrameType | None = None
        self.adapter: Any = None  # the adapter's own, while the call runs
        self.inside: bool | None = None  # of a wrapper: whether what it wraps is running


class Engine:
    """One recording in progress.

    `recording` is False whenever a tap should cost nothing; `listening` stays True after `end_forward`, when gradients
    and updates are still taken.
    """

    def __init__(self, writer: RunWriter, settings: Settings, reader: TensorReader, internal: tuple[str, ...]) -> None:
        self._writer = writer
        self.reader = reader
        self._stacks = Stacks(writer.stack, internal)
        self._sightings = Sightings()
        self._unfilled = Unfilled()
        self._seq = itertools.count()
        self._local = threading.local()
        self._numbering = threading.Lock()
        self._micro: dict[str, int] = {}  # of the last outermost forward call of each root
        self.latest_micro = 0  # of the last outermost forward call of any root
        self._passing: dict[str, int] = {}  # of the call through which the backward pass came last
        self._numbers: dict[tuple[str, bool, Phase], tuple[int, int]] = {}  # micro step and next number, by site
        self._passed_over: dict[str, None] = {}  # a few sites that the settings did not ask for
        self._called: set[str] = set()  # the modules in which something was recorded in this step
        self._process = os.getpid()
        self._failed_once = False
        self._forward_ended = False
        self.paused = False
        self.forgotten = 0  # how often everything known of memory was
        self.step = 0
        self._quota = Quota(settings)
        self.apply(settings)

    # -- settings ------------------------------------------------------------------------------------------------

    def apply(self, settings: Settings) -> None:
        """Records by these settings from now on."""
        self.settings = settings
        self._selection = Selection(settings)
        self._scope = Scope(*settings.scope) if settings.scope is not None else None
        self._quota.change(settings)
        self._levels = frozenset(settings.level)
        self._phases = self._selection.phases
        self._roles = self._selection.roles
        self._statistics = settings.wants_statistics
        self._whole = "tensors" in settings.keep
        self._sample = "sample" in settings.keep
        self._sliced = settings.slice is not None
        self._by_module = bool(settings.classes) or self._scope is not None
        self._sightings.clear()  # what was kept of a tensor may be other than what is to be kept now
        self._decide()

    def _decide(self) -> None:
        self.listening = not self.paused and self.step in self.settings.steps
        self.recording = self.listening and not self._forward_ended

    def wants(self, site: Site) -> bool:
        """Whether the settings ask for calls of this site. Decided once for each site."""
        if site.judge is not self._selection:
            site.judge = self._selection
            level = _LEVEL_OF.get(site.kind)
            of_level = level is None or level in self._levels
            site.wanted = of_level and self._selection.wants_site(site.name, site.type, site.kind)
            if of_level and not site.wanted:
                self._pass_over(site)
        return site.wanted

    def _pass_over(self, site: Site) -> None:
        """Remembers the first sites that were left out, to name them should nothing be recorded at all."""
        if len(self._passed_over) < _FEW:
            self._passed_over.setdefault(site.name)

    # -- calls ---------------------------------------------------------------------------------------------------

    def enter(
        self,
        site: Site,
        frame: FrameType | None,
        *,
        phase: Phase = "forward",
        recompute: bool = False,
        micro: int | None = None,
        row: bool = True,
    ) -> OpenCall:
        """A call starts. `frame` is the innermost frame of the call that the stack should start from.

        What is inside it knows of it from now on. Its own row is written by `begin`, if it is `recorded`. `micro` is
        for when the caller knows the micro step better than the calls around. Without `row` it is a place for others
        and nothing more.
        """
        open_calls = self._open_calls()
        stack = self._stack(frame, open_calls)
        outer = open_calls[-1] if open_calls else None
        if micro is not None:
            pass
        elif outer is not None and (site.kind != "module" or outer.site.kind == "module"):
            micro = outer.micro
        elif site.kind == "module":
            micro = self._outermost(site.root, recompute)
        else:
            micro = self.latest_micro
        call = OpenCall(site, self.step, micro, phase, recompute, None if outer is None else outer.anchor)
        call.frame, call.stack = frame, stack
        if row:
            self._admit(call)
        open_calls.append(call)
        return call

    def enter_backward(self, site: Site, forward: OpenCall | None, micro: int) -> OpenCall:
        """A call starts that the backward pass makes: inside the backward of `forward`, when that is known."""
        call = OpenCall(site, self.step, micro, "backward", False, None if forward is None else forward.anchor)
        call.stack = None if forward is None else forward.stack
        self._admit(call)
        self._open_calls().append(call)
        return call

    def _admit(self, call: OpenCall) -> None:
        """Decides whether a call is recorded, and numbers it: among those of its site, recorded or not."""
        site = call.site
        scope = self._scope
        if scope is not None:
            scope.entered(site.name)
        call.number = self._number(site, call.micro, call.recompute, call.phase)
        if scope is not None and not scope.is_open:
            self._pass_over(site)
        elif self._takes(call) and self.wants(site):
            call.recorded = True
            self._called.add(site.module)
            if call.phase in self._phases:
                call.seq = call.anchor = next(self._seq)

    def _takes(self, call: OpenCall) -> bool:
        """Whether calls are taken now: after the end of the forward, only what follows from what was before it."""
        if self.recording:
            return True
        follows = call.site.kind == "optimizer" or (call.phase == "backward" and call.site.module in self._called)
        return self.listening and follows

    def begin(self, call: OpenCall, args: str | None) -> None:
        """Writes the row of a call that has one. `args` is the structure of its arguments."""
        site = call.site
        self._writer.call(
            Call(
                call.seq, call.step, call.micro, site.kind, site.name, site.type, call.number, call.phase,
                call.parent, call.stack, args, call.recompute,
            )
        )  # fmt: skip

    def _stack(self, frame: FrameType | None, open_calls: list[OpenCall]) -> int | None:
        """The Python stack of a call that starts; drops open calls that are not on it, such as interrupted ones."""
        while open_calls:
            outer = open_calls[-1]
            stack = self._stacks.capture(frame, outer.frame, outer.stack)
            if stack is not None:
                return stack
            open_calls.pop().frame = None
        return self._stacks.capture(frame)

    def leave(self, call: OpenCall) -> None:
        """A call ends; calls inside it that an exception left open end with it."""
        open_calls = self._open_calls()
        while call in open_calls:
            open_calls.pop().frame = None  # a frame holds everything its function does
        if self._scope is not None:
            self._scope.left(call.site.name)

    def innermost(self, site: Site) -> OpenCall | None:
        """The innermost open call of a site, on this thread."""
        for call in reversed(self._open_calls()):
            if call.site is site:
                return call
        return None

    @property
    def enclosing(self) -> OpenCall | None:
        """The innermost open call, on this thread."""
        open_calls = self._open_calls()
        return open_calls[-1] if open_calls else None

    def backward(self, forward: OpenCall) -> int:
        """The backward of a forward call starts; returns its number."""
        site = forward.site
        self._passing[site.root] = forward.micro
        if "backward" not in self._phases:
            return NOT_WRITTEN
        seq = next(self._seq)
        self._writer.call(
            Call(
                seq, forward.step, forward.micro, site.kind, site.name, site.type, forward.number, "backward",
                forward.seq if forward.seq != NOT_WRITTEN else None, forward.stack, None, forward.recompute,
            )
        )  # fmt: skip
        return seq

    def event(
        self, site: Site, phase: Phase, parent: int | None = None, *, stack: int | None = None, args: str | None = None
    ) -> int:
        """Something happened that is no call of a function, such as a parameter receiving its gradient.

        An update belongs to the whole step and to none of its micro steps: another program may have more or fewer.
        """
        micro = 0 if phase == "update" else self._passing.get(site.root, self._micro.get(site.root, 0))
        number = self._number(site, micro, False, phase)
        if phase not in self._phases or not self.wants(site):
            return NOT_WRITTEN
        of_parameter = site.kind in ("parameter", "optimizer") and site.module != site.name
        if (self._by_module or self._forward_ended) and of_parameter and site.module not in self._called:
            return NOT_WRITTEN
        seq = next(self._seq)
        self._writer.call(
            Call(seq, self.step, micro, site.kind, site.name, site.type, number, phase, parent, stack, args)
        )
        return seq

    def note(self, site: str, what: dict[str, Any]) -> None:
        """Writes something about the recording itself into it, such as a change of settings, where it happened."""
        self._writer.call(
            Call(next(self._seq), self.step, 0, "custom", site, "astray", 0, "forward", args=json.dumps(what))
        )

    def _number(self, site: Site, micro: int, recompute: bool, phase: Phase) -> int:
        """Which call of its site this is, in its micro step. Work done again is numbered apart."""
        key = (site.name, recompute, phase)
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
        micro = self.latest_micro = self._micro[root] = self._micro.get(root, -1) + 1
        return micro

    # -- tensors -------------------------------------------------------------------------------------------------

    def observe(self, seq: int, role: Role, path: str, tensor: Any) -> None:
        """Records one tensor of a call as it is now."""
        if seq == NOT_WRITTEN or role not in self._roles or not self._quota.row():
            return
        reader = self.reader
        identity = reader.identity(tensor)
        if identity is not None:
            owner, key, _, dtype, shape, stride = identity
            if self._unfilled:
                self._unfilled.discard(owner)
            if self._sliced:
                key = (key, shape)  # another shape has another part
            seen = self._sightings.find(owner, key)
            if seen is None:
                seen = self._measure(reader.read(tensor, identity), seq, role, path)
                self._sightings.add(owner, key, seen)
        else:
            reading = reader.read(tensor, None)
            dtype, shape, stride = reading.dtype, reading.shape, reading.stride
            seen = self._measure(reading, seq, role, path)
        self._writer.tensor(
            Tensor(
                seq, role, path, dtype, shape, stride, reader.device(tensor), reader.requires_grad(tensor),
                seen.statistics,  # type: ignore[arg-type]  # its fields
                seen.fingerprint, None, seen.placement, seen.note,
            ),
            seen.values,
        )  # fmt: skip

    def _measure(self, reading: Reading, seq: int, role: Role, path: str) -> Sighting:
        statistics = fingerprint = values = None
        if reading.memory is not None:
            memory = reading.memory if reading.box is None else reading.box
            statistics, fingerprint = measure(memory, statistics=self._statistics, shard=reading.shard)
            if self._whole or self._sample:
                values = self._values(reading.memory, f"{seq}.{role}.{path}")
        else:
            self.missed(f"the numbers of a {reading.dtype} tensor", reading.note or "unknown")
        plain = None if statistics is None else tuple(statistics)  # which the garbage collector need not look into
        return Sighting(plain, fingerprint, values, reading.placement, reading.note)

    def _values(self, memory: Strided, name: str) -> Values | None:
        """What of a tensor's values is to be kept, on its way to the disk; None when the budget is spent."""
        dtype, part = memory.dtype, None
        if self.settings.slice is not None:
            memory, part = _slice(memory, self.settings.slice)
        sampled = None if self._whole else min(memory.size, self.settings.samples)
        if not self._quota.values((memory.size if sampled is None else sampled) * DTYPES[dtype].itemsize):
            return None
        if sampled is None:
            return self._writer.values(pack(memory), name, dtype, memory.shape, part=part)
        positions = sample_positions(memory.size, self.settings.samples)
        kept = gather(memory, positions)
        return self._writer.values(kept, name, dtype, (len(positions),), sampled=len(positions), part=part)

    def observe_inputs(self, seq: int, inputs: list[tuple[str, Any]], unread: list[Any]) -> None:
        """Records the inputs of a call. It does not read the numbers of the `unread`."""
        for path, tensor in inputs:
            if unread and any(tensor is one for one in unread):
                self.observe_unread(seq, "input", path, tensor)
            else:
                self.observe(seq, "input", path, tensor)

    def observe_unread(self, seq: int, role: Role, path: str, tensor: Any) -> None:
        """Records a tensor whose memory may not have been filled yet, or only a part of it.

        Then its numbers are not read: in each run they would be others. As an input it is none.
        """
        if not self._unfilled or self.reader.owner(tensor) not in self._unfilled:
            self.observe(seq, role, path, tensor)
        elif role != "input" and seq != NOT_WRITTEN and role in self._roles and self._quota.row():
            reading = self.reader.read(tensor, None)
            self._writer.tensor(
                Tensor(
                    seq, role, path, reading.dtype, reading.shape, reading.stride, self.reader.device(tensor),
                    self.reader.requires_grad(tensor), note="only a part of it has been filled yet",
                )
            )  # fmt: skip

    def made(self, tensor: Any) -> None:
        """Memory was made that holds whatever lay there before."""
        owner = self.reader.owner(tensor)
        if owner is not None:
            self._unfilled.add(owner)

    def written(self, tensor: Any) -> None:
        """A call has written into this tensor."""
        self.changed(tensor)
        if self._unfilled and self.reader.is_whole(tensor):
            self._unfilled.discard(self.reader.owner(tensor))

    def changed(self, tensor: Any) -> None:
        """A call wrote into this tensor, perhaps without its version counter knowing."""
        owner = self.reader.owner(tensor)
        if owner is not None:
            self._sightings.changed(owner)

    def forget(self) -> None:
        """Much may have been written behind our back: gradients summed over ranks, weights through `.data`."""
        self.forgotten += 1
        self._sightings.clear()

    # -- the course of the recording -----------------------------------------------------------------------------

    def next_step(self) -> None:
        """The step is over: numbering starts anew, and what was recorded goes to disk."""
        self.step += 1
        self._micro.clear()
        self.latest_micro = 0
        self._passing.clear()
        self._numbers.clear()
        self._called.clear()
        self._sightings.clear()
        self._quota.next_step()
        if self._scope is not None:
            self._scope.reset()
        self._writer.step_done()
        self._forward_ended = False
        self._decide()

    def end_forward(self) -> None:
        """Nothing that starts from here on is recorded in this step; what comes back of the rest still is."""
        self._forward_ended = True
        self._decide()

    def pause(self, paused: bool = True) -> None:
        self.paused = paused
        self._decide()

    def finish(self) -> None:
        """The recording is over: what limits left out is written down."""
        self.recording = self.listening = False
        if self._passed_over and next(self._seq) == 0:
            met = ", ".join(self._passed_over)
            self.missed(NOTHING, f"match, ignore, classes or scope leave out all there were, such as {met}")
        for what, why, count in self._quota.left_out():
            self._writer.missed(what, why, count)

    @property
    def has_open_calls(self) -> bool:
        """Whether a call that was recorded at its start has not ended yet, on this thread."""
        return bool(self._open_calls())

    @property
    def is_in_a_module(self) -> bool:
        """Whether a module of this recording is running, on this thread."""
        return any(call.site.kind == "module" for call in self._open_calls())

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


def _slice(memory: Strided, part: Any) -> tuple[Strided, str | None]:
    """The part of a tensor that is to be kept, and its name; the whole when the part does not fit."""
    cut = part.apply_shape(memory.shape, memory.stride)
    if cut is None:
        return memory, None
    offset, shape, stride = cut
    itemsize = DTYPES[memory.dtype].itemsize
    return Strided(memory.address + offset * itemsize, memory.dtype, shape, stride), str(part)
