"""One recording in progress: which calls are recorded, and steps, pauses and the end. `Observer` records tensors.

An adapter calls it when a call starts and ends. The hot path is C++ (`Calls` in native/), which each adapter compiles
into its own module; `engine_for` joins the two. This module has what depends on the settings. Runs while the user's
program waits, possibly on several threads at once. Adapters catch exceptions raised here and report them through
`failed`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from astray.capture.adapters import Adapter
from astray.capture.observer import Observer
from astray.capture.selection import RecordingSelection, Scope
from astray.capture.settings import Settings
from astray.capture.setup_log import SetupLog
from astray.capture.stacks import Stacks
from astray.interrupts import interrupt_of
from astray.log import logger
from astray.process import WeakRegistry
from astray.records import ANY_CALL, Call, Kind
from astray.store import BackgroundWriter

if TYPE_CHECKING:
    from astray.capture.native.core import Calls, OpenCall, Site
else:
    Calls = object  # `engine_for` adds the compiled class

_SITES_NAMED = 5

_LEVEL_OF: dict[Kind, str] = {"module": "module", "function": "function", "collective": "function", "op": "op"}
"""Which level a kind of call belongs to. The others are recorded whatever the level."""


class Engine(Calls):
    """One recording in progress.

    `recording` is False whenever a hook should cost nothing; `listening` stays True after `end_forward`, when gradients
    and updates are still recorded.
    """

    def __init__(self, writer: BackgroundWriter, settings: Settings, adapter: Adapter) -> None:
        stacks = Stacks(adapter.native.StackWalk, writer.stack, adapter.internal, adapter.spell)
        super().__init__(writer, stacks.capture)
        self.tensors = Observer(writer, adapter.reader, settings)
        self._set_observer(self.tensors.native)
        self.setup = SetupLog(writer.setup)
        self.on_outermost: Callable[[str], None] | None = None  # called at each call of an outermost module
        self._unmatched: dict[str, None] = {}  # a few sites that the settings did not ask for
        _engines.add(self)
        self._has_warned = False
        self._has_ended = False
        self.remarks: list[str] = []  # sentences about what the recording has changed in the program, for the end
        self.scaled = False  # whether a loss of this step was scaled, so that gradients may overflow
        self.optimizer_sites: set[Site] = set()  # functions and ops that optimizers call in their steps
        self.apply(settings)

    # -- settings ------------------------------------------------------------------------------------------------

    def apply(self, settings: Settings) -> None:
        """Records by these settings from now on."""
        self.settings = settings
        self._selection = RecordingSelection(settings)
        self._scope = Scope(*settings.scope) if settings.scope is not None else None
        self._levels = frozenset(settings.level)
        self._phases = self._selection.phases
        self._by_module = bool(settings.classes) or self._scope is not None
        self.tensors.apply(settings)
        self._update_flags()

    def _update_flags(self) -> None:
        self.listening = not self.paused and self.step in self.settings.steps
        self.recording = self.listening and not self._forward_ended

    def wants(self, site: Site) -> bool:
        """Whether the settings select this site. Decided once for each site and selection."""
        if site.decided_by is not self._selection:
            site.decided_by = self._selection
            level = _LEVEL_OF.get(site.kind)
            of_level = level is None or level in self._levels
            if site in self.optimizer_sites and site.kind in ("function", "op"):
                of_level = of_level and "calls" in self.settings.optimizer
            site.wanted = of_level and self._selection.wants_site(site.name, site.type, site.kind)
            if of_level and not site.wanted:
                self._note_unmatched(site)
        return site.wanted

    def _note_unmatched(self, site: Site) -> None:
        """Remembers the first sites that were left out, to name them should nothing be recorded at all."""
        if len(self._unmatched) < _SITES_NAMED:
            self._unmatched.setdefault(site.name)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _is_in_scope(self, call: OpenCall) -> bool:
        """Whether a call is recorded when there is a scope, which it may open."""
        scope = self._scope
        if scope is not None:
            scope.on_call_start(call.site.name)
            if not scope.is_open:
                self._note_unmatched(call.site)
                return False
        return self.recording or self._follows_recorded(call)

    def _follows_recorded(self, call: OpenCall) -> bool:
        """Whether a call is recorded after the end of the forward: the backward and update of recorded modules are."""
        follows = call.site.kind == "optimizer" or (
            call.phase == "backward" and call.site.module in self._called_modules
        )
        return self.listening and follows

    def note(self, site: str, what: dict[str, Any]) -> None:
        """Writes a row about the recording itself, such as a change of settings, at the point where it happened."""
        self._writer.call(
            Call(self._next_seq(), self.step, 0, "custom", site, "astray", 0, "forward", args=json.dumps(what))
        )

    def _outermost_micro(self, root: str, recompute: bool) -> int:
        """The micro step of an outermost call: the next one, or that of the first forward for a recomputation."""
        if recompute:
            return self._backward_micro.get(root, self._micro.get(root, 0))
        if self.on_outermost is not None:
            self.on_outermost(root)
        micro = self.latest_micro = self._micro[root] = self._micro.get(root, -1) + 1
        return micro

    # -- steps, pauses, the end ----------------------------------------------------------------------------------

    def next_step(self) -> None:
        """The step is over: numbering starts anew, and what was recorded goes to disk."""
        self.step += 1
        self._end_interrupted()
        self._micro.clear()
        self.latest_micro = 0
        self._backward_micro.clear()
        self._called_modules.clear()
        self.scaled = False
        self.tensors.next_step()
        if self._scope is not None:
            self._scope.reset()
        self._writer.step_done()
        self._forward_ended = False
        self._update_flags()

    def _end_interrupted(self) -> None:
        """Ends calls of a backward pass that a signal handler's exception has left open: no call outlives its step.

        Calls that have a frame are ended elsewhere, when their frame is found not to be running any more.
        """
        for call in reversed(self._open_calls()):
            if call.phase != "backward" or call.frame is not None:
                break
            self.leave(call)

    def end_forward(self) -> None:
        """Calls that start from here on are not recorded in this step; the backward of earlier ones still is."""
        self._forward_ended = True
        self._update_flags()

    def pause(self, paused: bool = True) -> None:
        self.paused = paused
        self._update_flags()

    def finish(self, nothing: str | None = None) -> None:
        """Ends the recording: writes what limits left out. `nothing`: the reason to give if no call was recorded."""
        self.recording = self.listening = False
        self._has_ended = True
        if self._next_seq() == 0:
            why = self._why_empty() or nothing
            if why is not None:
                self.missed(ANY_CALL, why)
        for what, why, count in self.tensors.quota.left_out():
            self._writer.missed(what, why, count)

    def _why_empty(self) -> str | None:
        """Why no call was recorded, if the settings explain it."""
        settings = self.settings
        if self._unmatched:
            unmatched = ", ".join(self._unmatched)
            return f"match, ignore, classes or scope leave out all there were, such as {unmatched}"
        if not any(step in settings.steps for step in range(self.step + 1)):
            return f"steps {settings.steps} were asked for, and the program ended in step {self.step}"
        if settings.phases == {"update"}:
            return "only updates were asked for, and no optimizer stepped"
        return None

    @property
    def has_begun(self) -> bool:
        """Whether an outermost module was called in this step."""
        return bool(self._micro)

    @property
    def has_open_calls(self) -> bool:
        """Whether a call that was recorded at its start has not ended yet, on this thread."""
        return bool(self._open_calls())

    @property
    def is_in_module(self) -> bool:
        """Whether a module of this recording is running, on this thread. One that an exception has left stays open."""
        return not self._has_ended and any(call.site.kind == "module" for call in self._open_calls())

    def note_exception(self, site: Site, frame: FrameType | None) -> None:
        """Reports that a call ended by an exception, if the one being handled passed through its frame."""
        error = sys.exc_info()[1]
        traceback = None if error is None else error.__traceback__
        while traceback is not None:
            if traceback.tb_frame is frame:
                self.missed(f"the output of {site.name}", f"it raised {type(error).__name__}")
                return
            traceback = traceback.tb_next

    def missed(self, what: str, why: str, count: int = 1) -> None:
        """Something could not be observed. It is counted and listed in the run."""
        self._writer.missed(what, why, count)

    def failed(self, doing: str, error: Exception) -> None:
        """Something inside astray went wrong. The program goes on; the run lists it, and the user is warned once.

        Raises an exception again that one of the program's signal handlers raised while our code ran.
        """
        interrupt = interrupt_of(error)
        if interrupt is not None:
            self.missed(doing, f"a signal handler of the program raised {type(interrupt).__name__}")
            raise interrupt
        self.missed(doing, f"{type(error).__name__}: {error}")
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "astray could not record %s (%s: %s). The program is not affected; what is missing is listed in the "
                "run's end.json.", doing, type(error).__name__, error,
            )  # fmt: skip


def engine_for(adapter: Adapter, writer: BackgroundWriter, settings: Settings) -> Engine:
    """The engine of a recording, on the compiled module of its adapter."""
    return _engine_class(adapter.native)(writer, settings, adapter)


@cache
def _engine_class(native: ModuleType) -> type[Engine]:
    return type("Engine", (Engine, native.Calls), {})


_engines: WeakRegistry[Engine] = WeakRegistry()


def _stop_in_forked_child() -> None:
    for engine in _engines:
        engine.in_own_process = False


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_stop_in_forked_child)
