"""Which events of a step are origins: those whose NaN or infinities reach something that matters.

What matters is the result of an outermost module, the loss, the gradient of a parameter, a weight, and the state of an
optimizer. What never gets there was removed on the way (by a mask, a `where`, a softmax over −inf): no alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from astray.nonfinite.alarm import SurfacePoint
from astray.nonfinite.flow import Event, NonFiniteFlow
from astray.nonfinite.step_rows import NO_ROW, StepView, function_of, joined
from astray.records import ROOT

_MASKING = frozenset({"softmax", "log_softmax", "logsumexp", "softmin", "gumbel_softmax", "multihead_attention"})
_MASKED_ATTENTION = "attention"
_IGNORES_VALUES = ("_like", "isnan", "isinf", "isfinite", "isneginf", "isposinf")


@dataclass(frozen=True)
class Trace:
    """An origin and the tensors in which it came to light, in the order of observation."""

    event: Event
    surfaces: tuple[tuple[int, SurfacePoint], ...]


class Origins:
    """The origins of a step; `harmless` are the events that never surfaced, without those that were intended.

    `stopped`: the program went no further than the last tensor that is bad, which counts as surfaced.
    """

    def __init__(self, rows: StepView, stopped: bool = False) -> None:
        self.rows = rows
        self._last = rows.bad[-1] if stopped and len(rows.bad) else NO_ROW
        self.flow = NonFiniteFlow(rows)
        self._resolved: dict[Event, frozenset[Event]] = {}

    @cached_property
    def traces(self) -> list[Trace]:
        """A trace for each origin, the earliest first."""
        surfaces: dict[Event, list[tuple[int, SurfacePoint]]] = {}
        for row in self.rows.bad:
            surfaced = self._surfaced(row)
            if surfaced is not None:
                for event in self.origins_of(row):
                    surfaces.setdefault(event, []).append((row, surfaced))
        return [Trace(event, tuple(surfaces[event])) for event in sorted(surfaces, key=lambda event: event.row)]

    @cached_property
    def harmless(self) -> list[Event]:
        """Events that made NaN or infinities which reached nothing that matters."""
        surfaced = {trace.event for trace in self.traces}
        events = {event for row in self.rows.bad for event in self.origins_of(row)}
        return sorted(events - surfaced, key=lambda event: event.row)

    def origins_of(self, row: int) -> frozenset[Event]:
        """The origins of the NaN and infinities of a tensor; none if they were intended."""
        return frozenset(origin for event in self.flow.events[row] for origin in self._resolve(event))

    def _resolve(self, event: Event) -> frozenset[Event]:
        if event not in self._resolved:
            self._resolved[event] = self._resolve_uncached(event)
        return self._resolved[event]

    def _resolve_uncached(self, event: Event) -> frozenset[Event]:
        if event.kind == "intended":
            return frozenset()
        if event.kind != "converted":
            return frozenset((event,))
        inputs = {source for row in event.sources for source in self.flow.events[row]}
        if _is_masking(function_of(self.rows.types[event.call])):
            # Infinities that came from outside and end in a softmax are a mask, whatever they look like.
            inputs = {each for each in inputs if each.kind not in ("input", "weight") or self.rows.nan[each.row]}
        origins = frozenset(origin for each in inputs for origin in self._resolve(each))
        return origins or frozenset((event,))

    def path(self, event: Event, row: int) -> list[int]:
        """The tensors from an origin's first to the one where it surfaced."""
        path = [row]
        while path[-1] != event.row:
            sources = [source for source in self.flow.sources[path[-1]] if event in self.origins_of(source)]
            if not sources:
                break
            path.append(sources[0])
        return path[::-1]

    def _surfaced(self, row: int) -> SurfacePoint | None:
        rows, call = self.rows, self.rows.call_of[row]
        kind, phase, role, path = rows.kinds[call], rows.phases[call], rows.roles[row], rows.paths[row]
        if kind == "parameter":
            return SurfacePoint("gradient", rows.sites[call], path)
        if role in ("parameter", "state") and kind == "module":
            return SurfacePoint("weight" if role == "parameter" else "buffer", joined(rows.sites[call], path), path)
        if phase == "update" and not rows.is_input(row):
            return SurfacePoint("state" if path.startswith("state") else "update", rows.sites[call], path)
        if phase == "forward" and not rows.is_input(row) and self._is_result(row, call):
            return SurfacePoint("loss" if rows.sizes[row] == 1 else "output", rows.sites[call], path)
        return SurfacePoint("output", rows.sites[call], path) if row == self._last else None

    def _is_result(self, row: int, call: int) -> bool:
        rows = self.rows
        if rows.kinds[call] == "module":
            return rows.parents[call] == NO_ROW and not rows.calls.numbers("recompute")[call]
        if row in self._used or row in self._of_gradients:
            return False
        if rows.sizes[row] == 1 and self._has_backward_pass:
            return rows.graph.backward[call] >= 0 or rows.value_id(row) in self._seeds
        if self._has_modules:
            return False
        return rows.module(call) in ("", ROOT) or (not self._has_backward_pass and call in self._last_calls)

    @cached_property
    def _last_calls(self) -> set[int]:
        """The last call in any module of each micro step: its result is all that is known of a module's result."""
        micros = self.rows.calls.numbers("micro").tolist()
        last = {micro: call for call, micro in enumerate(micros) if self.rows.module(call)}
        return set(last.values())

    @cached_property
    def _has_modules(self) -> bool:
        return "module" in self.rows.kinds

    @cached_property
    def _has_backward_pass(self) -> bool:
        return "backward" in self.rows.phases

    @cached_property
    def _of_gradients(self) -> set[int]:
        """Tensors that were computed from gradients: by the backward pass, and by clipping and unscaling after it."""
        rows: set[int] = set()
        for row in self.rows.bad:
            backward = self.rows.phases[self.rows.call_of[row]] == "backward"
            if backward or not rows.isdisjoint(self.flow.sources[row]):
                rows.add(row)
        return rows

    @cached_property
    def _used(self) -> set[int]:
        """Results whose values are an input of a later call."""
        used: set[int] = set()
        unused: dict[int, list[int]] = {}  # by value
        for row in self.rows.bad:
            call, value = self.rows.call_of[row], self.rows.value_id(row)
            if not self.rows.is_input(row):
                unused.setdefault(value, []).append(row)
            elif not function_of(self.rows.types[call]).endswith(_IGNORES_VALUES):
                used.update(result for result in unused.pop(value, ()) if self.rows.phases[call] == "forward")
        return used

    @cached_property
    def _seeds(self) -> set[int]:
        """The tensors that a backward pass started from: at op level, `ones_like` of the loss begins it."""
        return {
            self.rows.value_id(row)
            for row in self.rows.bad
            if self.rows.is_input(row) and function_of(self.rows.types[self.rows.call_of[row]]) == "ones_like"
        }


def _is_masking(function: str) -> bool:
    return function in _MASKING or _MASKED_ATTENTION in function
