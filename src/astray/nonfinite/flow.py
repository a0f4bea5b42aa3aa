"""Follows NaN and infinity through the calls of one step: which event each tensor that holds any got them from.

One pass over those tensors in the order of observation. A value that was seen before has them from there. An output has
them from the inputs of its call, that of a backward call also from what the forward call saw; `graph` says which call
made what. Where nothing explains them, something has just happened, and that is an `Event`: a possible origin. Where
only the gradients of parameters were read, `bounds_of` says between which calls that was.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from astray.nonfinite.step_rows import NO_ROW, StepView

EventKind = Literal["produced", "converted", "intended", "input", "weight", "memory", "inside", "outside", "unread"]

_INFINITE_CONSTANT = re.compile(r'"-?inf"')
_KEEPS_INFINITY = frozenset({"masked", "mask", "attn_mask", "attention_mask"})


class Event(NamedTuple):
    """Something that brought NaN or infinity into the step.

    produced: a call made them though all it took was finite. converted: a call made NaN of infinities, or let those
    that were meant to be there reach a result. intended: infinities that are there on purpose. input, weight, memory:
    they came with a tensor that no recorded call has made. inside: made by code of a module between the calls that were
    recorded. outside: a gradient came so from code that was not recorded. unread: the gradient of a parameter came so
    from a backward pass whose calls were not recorded.
    """

    kind: EventKind
    call: int
    row: int  # the tensor in which they show first
    sources: tuple[int, ...] = ()  # the tensors that a call converted


Events = frozenset[Event]


class NonFiniteFlow:
    """`events` has, for each tensor with NaN or infinity, what brought them; `before`, the tensors it has them from."""

    def __init__(self, rows: StepView) -> None:
        self.rows, self.graph = rows, rows.graph
        self.events: dict[int, Events] = {}
        self.before: dict[int, tuple[int, ...]] = {}
        self._sightings: dict[int, int] = {}  # of each value, the last one seen
        self._memories: dict[int, int] = {}  # the same for all views of a memory
        self._bad: defaultdict[int, list[int]] = defaultdict(list)  # of each call, those seen so far
        self._last_of: dict[tuple[str, str, int], int] = {}  # by module, phase and micro step, the last one seen
        self._given: list[int] = []  # outputs and gradients, those seen so far
        self._gradients: list[int] = []  # those of parameters
        for row in rows.bad:
            self._see(row)

    def _see(self, row: int) -> None:
        goes_in = self.rows.goes_in(row)
        event = self._entering(row) if goes_in else self._leaving(row)
        if event is not None:
            self.events[row] = frozenset((event,))
            self.before[row] = event.sources
        self._sightings[self.rows.shown(row)] = self._memories[int(self.graph.value[row])] = row
        call = self.rows.call_of[row]
        self._bad[call].append(row)
        if self.rows.kinds[call] != "parameter":
            self._last_of[self.rows.module(call), self.rows.phases[call], self.rows.micros[call]] = row
        if not goes_in:
            self._given.append(row)
        if self.rows.roles[row] == "gradient":
            self._gradients.append(row)

    def _carry(self, row: int, sources: Iterable[int]) -> None:
        """The tensor has what these have."""
        self.before[row] = tuple(sources)
        self.events[row] = frozenset().union(*(self.events[source] for source in self.before[row]))

    # What a call takes.

    def _entering(self, row: int) -> Event | None:
        seen = self._seen(row)
        if seen is None and self.rows.phases[self.rows.call_of[row]] == "backward":
            return self._gradient_entering(row)
        if seen is None and not self.graph.has_functions:
            seen = self._unrecorded(row)
        if seen is None:
            return self._from_outside(row)
        self._carry(row, [seen])
        return None

    def _seen(self, row: int) -> int | None:
        """The last sighting of this value, or of another part of its memory."""
        return self._sightings.get(self.rows.shown(row), self._memories.get(int(self.graph.value[row])))

    def _unrecorded(self, row: int) -> int | None:
        """The last tensor that code between modules, which may compute anything unseen, could have started from."""
        if self.rows.roles[row] != "input":
            return None
        outer = int(self.graph.enclosings[self.rows.call_of[row]])
        inside = (given for given in reversed(self._given) if self._lies_in(given, outer))
        return next(inside, next(iter(self._bad[outer]), None))

    def _lies_in(self, row: int, outer: int) -> bool:
        call = self.rows.call_of[row]
        return self.rows.phases[call] != "backward" and (outer < 0 or self.graph.is_inside(call, outer))

    def _gradient_entering(self, row: int) -> Event | None:
        """Gradients of a tensor that is used several times are added up unseen, and so is what the loss does."""
        rows, graph, call = self.rows, self.graph, self.rows.call_of[row]
        forward = rows.parents[call] if rows.kinds[call] != "op" else NO_ROW
        spoilt = [seen for seen in self._bad[forward] if not rows.goes_in(seen)] if forward >= 0 else []
        outer = int(graph.enclosings[call])
        around = self._bad[rows.parents[outer]] if outer >= 0 and not graph.has_functions else []
        shares = [share for share in graph.contributors(row).tolist() if share in self.events]
        arrived = shares or spoilt or self._last_backward(call) or around[-1:]
        if arrived:
            self._carry(row, arrived)
            return None
        # What arrives at a module's last part as it has arrived at the module itself was made by neither.
        while outer >= 0 and self._takes(outer, row):
            call, outer = outer, int(graph.enclosings[outer])
        return Event("inside", outer, row) if outer >= 0 and not graph.has_functions else Event("outside", call, row)

    def _takes(self, call: int, row: int) -> bool:
        """Whether a tensor arrives at this call, too."""
        return any(self.rows.shown(other) == self.rows.shown(row) for other in self.graph.inputs(call).tolist())

    def _last_backward(self, call: int) -> list[int]:
        """The last gradient that a call of the same micro step gave."""
        rows = self.rows
        calls = ((row, rows.call_of[row]) for row in reversed(self._given))
        found = (row for row, of in calls if rows.phases[of] == "backward" and rows.micros[of] == rows.micros[call])
        return [row for row in [next(found, None)] if row is not None]

    def _from_outside(self, row: int) -> Event | None:
        """An event for a tensor that no recorded call has made."""
        rows, call = self.rows, self.rows.call_of[row]
        if rows.phases[call] == "update" and (gradients := self._gradients_of(call, row)):
            self._carry(row, gradients)  # it was clipped or unscaled since it was recorded
            return None
        outer = int(self.graph.enclosings[call])
        if rows.roles[row] == "input" and outer >= 0 and not self.graph.has_functions:
            return Event("inside", outer, row)
        if self._is_mask(row):
            return Event("intended", call, row)
        if rows.roles[row] in ("parameter", "state") or bool(rows.tensors.numbers("requires_grad")[row]):
            return Event("weight", call, row)
        if rows.roles[row] == "input" and outer >= 0:
            return Event("memory", call, row)
        return Event("input", call, row)

    def _gradients_of(self, call: int, row: int) -> list[int]:
        sized = [seen for seen in self._gradients if self.rows.sizes[seen] == self.rows.sizes[row]]
        return self._gradients_at(self.rows.sites[call]) or sized[-1:]

    def _gradients_at(self, parameter: str) -> list[int]:
        return [seen for seen in self._gradients if self.rows.sites[self.rows.call_of[seen]] == parameter][-1:]

    def _is_mask(self, row: int) -> bool:
        """Whether the infinities of a tensor that came from outside are there on purpose.

        A mask holds zeros besides −inf, or nothing at all, or its name says that it is one, and it is not
        trained. A buffer with infinities is a mask or a running extreme.
        """
        rows = self.rows
        if rows.nan[row] or bool(rows.tensors.numbers("requires_grad")[row]):
            return False
        words = set(re.split(r"[.\d]+", rows.paths[row]))
        statistics = rows.statistics(row)
        only_zeros = statistics.absmax in (None, 0.0) and statistics.first_bad_value != math.inf
        return only_zeros or rows.roles[row] == "state" or bool(words & _KEEPS_INFINITY)

    # What a call gives.

    def _leaving(self, row: int) -> Event | None:
        rows, call = self.rows, self.rows.call_of[row]
        twin = self._sightings.get(rows.shown(row))
        if twin is not None and self._made_inside(twin, call):
            self._carry(row, [twin])
            return None
        sources = self._taken(row)
        if sources:
            return self._passing(row, sources)
        inner = self._ops_within(call) or self._last_inside(call)
        if inner:
            self._carry(row, inner)
            return None
        if rows.kinds[call] == "parameter" and not rows.has_call_gradients:
            saved = self._saved_for(row)
            return self._passing(row, saved) if saved else Event("unread", call, row)
        written = not rows.nan[row] and _INFINITE_CONSTANT.search(rows.calls["args"][call] or "")
        return Event("intended" if written else "produced", call, row)

    def _made_inside(self, twin: int, call: int) -> bool:
        """Whether an earlier sighting was the result of a call inside this one: then that one made it."""
        rows, other = self.rows, self.rows.call_of[twin]
        if rows.kinds[call] == "custom":
            return True
        if rows.goes_in(twin) or rows.phases[other] != rows.phases[call]:
            return False
        finer = rows.level(other) < rows.level(call)  # backward ops do not say which function's backward they are in
        return self.graph.is_inside(other, call) or (finer and rows.phases[call] != "forward")

    def _taken(self, row: int) -> list[int]:
        """All that a result's call started from and that was not finite, as far as it is known by now."""
        rows, call = self.rows, self.rows.call_of[row]
        taken = [row for row in self._bad[call] if rows.goes_in(row)]
        if rows.kinds[call] == "parameter":
            return self._gradient_of(row)
        if rows.kinds[call] == "optimizer" and not taken:
            return self._gradients_at(rows.sites[call])
        if rows.phases[call] == "backward" and rows.kinds[call] != "op" and not taken:
            taken = list(self._bad[rows.parents[call]])  # what autograd has saved of the forward call
        return taken

    def _gradient_of(self, row: int) -> list[int]:
        """Where the gradient of a parameter comes from: the call that gave it, its module's backward, or any last one.

        What was there before is a part of what has accumulated.
        """
        call = self.rows.call_of[row]
        told = [one for one in self.graph.explains(row).tolist() if one in self.events]
        told.sort(key=lambda one: (self.rows.phases[self.rows.call_of[one]] == "backward", one))
        module = [(self.rows.module(call), phase, self.rows.micros[call]) for phase in ("backward", "forward")]
        known = (self._last_of.get(place) for place in module)
        nearest = next((one for one in (*told[-1:], *known) if one is not None), None)
        return self._last_backward(call) if nearest is None else [nearest]

    def _saved_for(self, row: int) -> list[int]:
        """What the calls whose backward was not recorded saw in the forward pass that is bad, and not meant so."""
        bounds = bounds_of(self.rows, row)
        for calls in (bounds.candidates, bounds.behind):
            bad = (seen for call in calls for seen in self._bad[call])
            found = [seen for seen in bad if any(event.kind != "intended" for event in self.events[seen])]
            if found:
                return found
        return []

    def _passing(self, row: int, sources: list[int]) -> Event | None:
        """What a call gives that took infinities or NaN: the same, or something new."""
        rows = self.rows
        wanted = rows.nan if rows.nan[row] else rows.inf
        chosen = [source for source in sources if wanted[source]] or sources
        self._carry(row, chosen)
        meant = all(event.kind == "intended" for event in self.events[row])
        converted = bool(rows.nan[row]) and not any(rows.nan[source] for source in chosen)
        reduced = meant and rows.sizes[row] == 1 and any(rows.sizes[source] > 1 for source in chosen)
        reached_gradients = meant and rows.phases[rows.call_of[row]] == "backward"
        if converted or reduced or reached_gradients:
            return Event("converted", rows.call_of[row], row, tuple(chosen))
        return None

    def _ops_within(self, call: int) -> list[int]:
        """What ops gave while a function's backward ran: after its first gradient, in the module that called it.

        Backward ops do not say which function's backward they are part of.
        """
        rows, forward = self.rows, self.rows.parents[call]
        if rows.kinds[call] != "function" or rows.phases[call] != "backward" or forward < 0:
            return []
        began, module = rows.rows_of[call][0], int(self.graph.outer[forward])
        ops = ((row, rows.call_of[row]) for row in self._given if row > began)
        return [row for row, op in ops if self.graph.is_op[op] and rows.parents[op] == module]

    def _last_inside(self, call: int) -> list[int]:
        """The last result of a call inside this one, where it is not the very tensor that this one gives."""
        rows = self.rows
        for row in reversed(self._given):
            other = rows.call_of[row]
            if rows.kinds[other] == "parameter" or rows.phases[other] != rows.phases[call]:
                continue
            if self.graph.is_inside(other, call):
                return [row]
        return []


class CallInterval(NamedTuple):
    """Between which calls NaN or infinity was born, in a backward pass of which only parameters' gradients were read.

    autograd runs the backward of the last call first, and a parameter has its gradient as soon as the backward of its
    call has run. So gradients come in the reverse order of the calls: the first bad one and the finite one before it
    are bounds.

    candidates: the forward calls of whose backward one did it, in the order of the backward pass.
    behind: the other forward calls that ran later; where a model branches, a gradient may have come from these.
    before: the parameter whose gradient came last before it, and is finite; empty when it is the first of all.
    """

    candidates: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    before: str = ""


def bounds_of(rows: StepView, row: int) -> CallInterval:
    """Where the gradient of a parameter, the first that is bad in its backward pass, may have become so."""
    call = rows.call_of[row]
    before = _finite_before(rows, row)
    forward = _forward_calls(rows, rows.micros[call])
    first = _first_of(rows, forward, call)
    last = _first_of(rows, forward, before) if before != NO_ROW else NO_ROW
    name = "" if before == NO_ROW else rows.sites[before]
    if first == NO_ROW:  # the module was not recorded
        return CallInterval(before=name)
    around = _around(rows, first, last)
    later = [one for one in reversed(forward) if one >= first or one in around]
    candidates = tuple(
        one for one in later if one in around or last == NO_ROW or one <= last or rows.graph.is_inside(one, last)
    )
    return CallInterval(candidates, tuple(one for one in later if one not in candidates), name)


def _forward_calls(rows: StepView, micro: int) -> list[int]:
    """The calls of modules in a micro step, in order, without those that checkpointing made again."""
    again = rows.calls.numbers("recompute")
    return [
        call
        for call, kind in enumerate(rows.kinds)
        if kind == "module" and rows.phases[call] == "forward" and rows.micros[call] == micro and not again[call]
    ]


def _around(rows: StepView, first: int, last: int) -> set[int]:
    """The calls around the first whose own code may have run up to the last: as far out as the one around both."""
    around = [*rows.graph.around(first), first]
    if last == NO_ROW:
        return set(around)
    common = set(around) & {*rows.graph.around(last), last}
    return {one for one in around if one not in common} | set(around[len(common) - 1 : len(common)])


def _finite_before(rows: StepView, row: int) -> int:
    """The call of the last gradient of a parameter that came before, in the same micro step, and is finite."""
    call = rows.call_of[row]
    for other in range(row - 1, -1, -1):
        of = rows.call_of[other]
        known = of >= 0 and of != call and rows.kinds[of] == "parameter" and rows.micros[of] == rows.micros[call]
        if known and not rows.is_bad(other):
            return of
    return NO_ROW


def _first_of(rows: StepView, forward: list[int], parameter: int) -> int:
    """The first call of the module that owns a parameter: its gradient is whole when that one's backward has run."""
    return next((one for one in forward if rows.sites[one] == rows.module(parameter)), NO_ROW)
