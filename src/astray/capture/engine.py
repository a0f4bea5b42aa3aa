"""Numbers the calls of a running program and hands their rows to the writer; `tensors` does the same for tensors.

Knows no framework: an adapter tells it when a call starts and ends. Everything here runs while the user's program
waits, possibly on several threads at once, so it is short and holds a lock only to number a call. Adapters catch
whatever goes wrong here and report it through `failed`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import weakref
from types import FrameType
from typing import Any

from astray.capture.observer import NOT_WRITTEN, Observer
from astray.capture.reading import TensorReader
from astray.capture.selection import Scope, Selection
from astray.capture.settings import Settings
from astray.capture.stacks import Stacks
from astray.record import Call, Kind, Phase
from astray.store import RunWriter

logger = logging.getLogger("astray")

NOTHING = "any call"
"""What was missed when the settings left nothing to record."""

_FEW = 5

_LEVEL_OF: dict[Kind, str] = {"module": "module", "function": "function", "collective": "function", "op": "op"}
"""Which level a kind of call belongs to. The others are recorded whatever the level."""


class Site:
    """A place in the program where calls happen.

    `root` is the outermost module it belongs to, `module` the name of the module itself, of the one that encloses a
    function, or of the one that owns a parameter. `wanted` was decided by `judge`, the selection of that time.
    `numbers` counts its calls, together with other sites of its name; `inside` are the sites of what is called in it.
    """

    __slots__ = ("inside", "judge", "kind", "module", "name", "numbers", "root", "type", "wanted")

    def __init__(self, name: str, type: str, root: str, kind: Kind = "module", module: str | None = None) -> None:
        self.name = name
        self.type = type
        self.root = root
        self.kind: Kind = kind
        self.module = name if module is None else module
        self.judge: Selection | None = None
        self.wanted = True
        self.numbers: Numbers | None = None
        self.inside: dict[Any, Site] = {}


Numbers = dict[str, list[int]]
"""For each phase the step and the micro step that are being counted in, and the next number."""

_AGAIN: dict[Phase, str] = {"forward": "forward again", "backward": "backward again", "update": "update again"}
"""What is done again, such as for a checkpoint, is counted apart."""


class OpenCall:
    """A call that has started: what the calls inside it and its backward need to know of it.

    `recorded` says whether anything of it is wanted, `seq` is the number of its row or NOT_WRITTEN. `anchor` is the
    number of the innermost call that has a row, this one or one around it.
    """

    __slots__ = (
        "adapter", "anchor", "frame", "inside", "micro", "number", "parent", "phase", "recompute", "recorded", "seq",
        "site", "stack", "step",
    )  # fmt: skip

    def __init__(
        self, site: Site, step: int, micro: int, phase: Phase, recompute: bool, parent: int | None,
        stack: int | None, frame: FrameType | None = None,
    ) -> None:  # fmt: skip
        self.site = site
        self.step = step
        self.micro = micro
        self.phase: Phase = phase
        self.recompute = recompute
        self.parent = self.anchor = parent
        self.stack = stack
        self.frame = frame
        self.recorded = False
        self.seq = NOT_WRITTEN
        self.number = 0
        self.adapter: Any = None  # the adapter's own, while the call runs
        self.inside: bool | None = None  # of a wrapper: whether what it wraps is running


class Engine:
    """One recording in progress.

    `recording` is False whenever a tap should cost nothing; `listening` stays True after `end_forward`, when gradients
    and updates are still taken.
    """

    def __init__(self, writer: RunWriter, settings: Settings, reader: TensorReader, internal: tuple[str, ...]) -> None:
        self._writer = writer
        self.tensors = Observer(writer, reader, settings)
        self._stacks = Stacks(writer.stack, internal)
        self._seq = itertools.count()
        self._local = threading.local()
        self._numbering = threading.Lock()
        self._micro: dict[str, int] = {}  # of the last outermost forward call of each root
        self.latest_micro = 0  # of the last outermost forward call of any root
        self._passing: dict[str, int] = {}  # of the call through which the backward pass came last
        self._numbers: dict[str, Numbers] = {}  # by the names of sites
        self._passed_over: dict[str, None] = {}  # a few sites that the settings did not ask for
        self._called: set[str] = set()  # the modules in which something was recorded in this step
        self.is_here = True  # False in a forked child, such as a DataLoader's worker, which must not record
        _engines.add(self)
        self._failed_once = False
        self._forward_ended = False
        self.paused = False
        self.step = 0
        self.apply(settings)

    # -- settings ------------------------------------------------------------------------------------------------

    def apply(self, settings: Settings) -> None:
        """Records by these settings from now on."""
        self.settings = settings
        self._selection = Selection(settings)
        self._scope = Scope(*settings.scope) if settings.scope is not None else None
        self._levels = frozenset(settings.level)
        self._phases = self._selection.phases
        self._by_module = bool(settings.classes) or self._scope is not None
        self.tensors.apply(settings)
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
        outer = open_calls[-1] if open_calls else None
        if outer is None:
            parent, stack = None, self._stacks.capture(frame)
        else:
            stack = self._stacks.capture(frame, outer.frame, outer.stack)
            if stack is None:  # it is not on this stack, such as one that was interrupted
                open_calls.pop().frame = None
                return self.enter(site, frame, phase=phase, recompute=recompute, micro=micro, row=row)
            parent = outer.anchor
        if micro is None:
            if outer is not None and (site.kind != "module" or outer.site.kind == "module"):
                micro = outer.micro
            else:
                micro = self._outermost(site.root, recompute) if site.kind == "module" else self.latest_micro
        call = OpenCall(site, self.step, micro, phase, recompute, parent, stack, frame)
        if row:
            self._admit(call)
        open_calls.append(call)
        return call

    def enter_backward(self, site: Site, forward: OpenCall | None, micro: int) -> OpenCall:
        """A call starts that the backward pass makes: inside the backward of `forward`, when that is known."""
        parent, stack = (None, None) if forward is None else (forward.anchor, forward.stack)
        call = OpenCall(site, self.step, micro, "backward", False, parent, stack)
        self._admit(call)
        self._open_calls().append(call)
        return call

    def _admit(self, call: OpenCall) -> None:
        """Decides whether a call is recorded, and numbers it: among those of its site, recorded or not."""
        site, phase, scope = call.site, call.phase, self._scope
        call.number = self._number(site, call.micro, call.recompute, phase)
        if scope is not None:
            scope.entered(site.name)
            if not scope.is_open:
                self._pass_over(site)
                return
        if (self.recording or self._follows(call)) and self.wants(site):
            call.recorded = True
            self._called.add(site.module)
            if phase in self._phases:
                call.seq = call.anchor = next(self._seq)

    def _follows(self, call: OpenCall) -> bool:
        """Whether a call is taken after the end of the forward: only if it follows from what was before it."""
        follows = call.site.kind == "optimizer" or (call.phase == "backward" and call.site.module in self._called)
        return self.listening and follows

    def begin(self, call: OpenCall, args: str | None) -> None:
        """Writes the row of a call that has one. `args` is the structure of its arguments."""
        site = call.site
        self._writer.call_row((
            call.seq, call.step, call.micro, site.kind, site.name, site.type, call.number, call.phase, call.parent,
            call.stack, args, call.recompute,
        ))  # fmt: skip

    def leave(self, call: OpenCall) -> None:
        """A call ends; calls inside it that an exception left open end with it."""
        open_calls = self._open_calls()
        if open_calls and open_calls[-1] is call:
            open_calls.pop()
            call.frame = None  # a frame holds everything its function does
        else:
            while call in open_calls:
                open_calls.pop().frame = None
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
        self._writer.call_row((
            seq, forward.step, forward.micro, site.kind, site.name, site.type, forward.number, "backward",
            forward.seq if forward.seq != NOT_WRITTEN else None, forward.stack, None, forward.recompute,
        ))  # fmt: skip
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
        course = _AGAIN[phase] if recompute else phase
        step = self.step
        with self._numbering:
            if site.numbers is None:
                site.numbers = self._numbers.setdefault(site.name, {})
            counting = site.numbers.get(course)
            if counting is None:
                counting = site.numbers[course] = [step, micro, 0]
            elif counting[1] != micro or counting[0] != step:
                # Earlier micro steps are not kept: a generation loop may have millions.
                counting[:] = step, micro, 0
            number = counting[2]
            counting[2] = number + 1
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

    # -- the course of the recording -----------------------------------------------------------------------------

    def next_step(self) -> None:
        """The step is over: numbering starts anew, and what was recorded goes to disk."""
        self.step += 1
        self._micro.clear()
        self.latest_micro = 0
        self._passing.clear()
        self._called.clear()
        self.tensors.next_step()
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
        for what, why, count in self.tensors.quota.left_out():
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
        return self.is_here

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


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _leave_the_child_alone() -> None:
    for engine in _engines:
        engine.is_here = False


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_leave_the_child_alone)
