"""Numbers calls and writes their rows: the part of the engine that every call goes through, in Python.

It serves where the native one could not be built, or when ASTRAY_TAPS=python is in the environment. Both give the same
rows; this one says why things are as they are. `native` is the native module, None when it is not used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from astray.capture.observer import NOT_WRITTEN
from astray.capture.selection import Scope, Selection
from astray.interrupts import pass_interrupt
from astray.record import Kind, Phase
from astray.store import Intake

Walk = Callable[[FrameType | None, FrameType | None, int | None], int | None]
"""The id of the stack from a frame out to another whose stack is known; see `Stacks.capture`."""


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


class Calls:
    """The calls of one recording in progress.

    `recording` is False whenever a tap should cost nothing; `listening` stays True when only gradients and updates are
    still taken. Whatever depends on the settings is decided by the engine, which this is a part of.
    """

    def __init__(self, writer: Intake, walk: Walk, local: threading.local, seq: Iterator[int]) -> None:
        self._writer = writer
        self._walk = walk
        self._local = local
        self._seq = seq
        self._numbering = threading.Lock()
        self._micro: dict[str, int] = {}  # of the last outermost forward call of each root
        self.latest_micro = 0  # of the last outermost forward call of any root
        self._passing: dict[str, int] = {}  # of the call through which the backward pass came last
        self._numbers: dict[str, Numbers] = {}  # by the names of sites
        self._called: set[str] = set()  # the modules in which something was recorded in this step
        self._scope: Scope | None = None
        self._phases: frozenset[str] = frozenset()
        self.is_here = True  # False in a forked child, such as a DataLoader's worker, which must not record
        self.recording = self.listening = self.paused = False
        self._forward_ended = self._by_module = False
        self.step = 0

    if TYPE_CHECKING:  # the engine's
        _selection: Selection

        def wants(self, site: Site) -> bool: ...
        def _is_in_scope(self, call: OpenCall) -> bool: ...
        def _follows(self, call: OpenCall) -> bool: ...
        def _outermost(self, root: str, recompute: bool) -> int: ...

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
            parent, stack = None, self._walk(frame, None, None)
        else:
            stack = self._walk(frame, outer.frame, outer.stack)
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
        asked_for = self.recording or self._follows(call) if scope is None else self._is_in_scope(call)
        if asked_for and self.wants(site):
            call.recorded = True
            self._called.add(site.module)
            if phase in self._phases:
                call.seq = call.anchor = next(self._seq)

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

    def follows_gradients(self, call: OpenCall) -> bool:
        """Whether somebody should see the gradients that come to a forward call, where gradients are on.

        If nobody asked for backward, only an outermost call's: what checkpointing runs again inside that belongs to
        the micro step of the one through which the backward pass came last.
        """
        return call.parent is None or "backward" in self._phases

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
        self._writer.call_row((
            seq, self.step, micro, site.kind, site.name, site.type, number, phase, parent, stack, args, False,
        ))  # fmt: skip
        return seq

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
        except AttributeError as error:
            pass_interrupt(error)
            calls: list[OpenCall] = []
            self._local.open_calls = calls
            return calls


def _find_native() -> Any:
    if os.environ.get("ASTRAY_TAPS") == "python":
        return None
    try:
        from astray.capture import _calls  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _calls


native = _find_native()

if not TYPE_CHECKING and native is not None:
    Site, OpenCall, Calls = native.Site, native.OpenCall, native.Calls
