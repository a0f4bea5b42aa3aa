"""Follows NaN and infinity through the calls of one step, to the events that brought them.

One pass over those tensors in the order of observation. A value that was seen before has them from its last sighting.
An output has them from the inputs of its call, that of a backward call also from the tensors of the forward call;
`graph` says which call made what. Where nothing explains them there is a new `Event`: a possible origin. Where only the
gradients of parameters were read, `bounds_of` says between which calls the event was.
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

    produced: a call with finite inputs made them. converted: a call made NaN of infinities, or passed intended ones on
    to a result. intended: infinities that are there on purpose. input, weight, memory: they are in a tensor that no
    recorded call has made. inside: made by code of a module between the calls that were recorded. outside: they are in
    a gradient that arrives from code that was not recorded. unread: they are in the gradient of a parameter, and the
    calls of the backward pass were not recorded.
    """

    kind: EventKind
    call: int
    row: int  # the tensor in which they show first
    sources: tuple[int, ...] = ()  # the tensors that a call converted


Events = frozenset[Event]


class NonFiniteFlow:
    """For each row with NaN or infinity: the `events` that brought them, and its `sources`, the tensors before it."""

    def __init__(self, rows: StepView) -> None:
        self.rows, self.graph = rows, rows.graph
        self.events: dict[int, Events] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        # Rows of bad tensors that were visited so far:
        self._last_with_value: dict[int, int] = {}  # by value
        self._last_in_memory: dict[int, int] = {}  # by memory, over all its views
        self._last_of_module: dict[tuple[str, str, int], int] = {}  # by module, phase and micro step
        self._bad: defaultdict[int, list[int]] = defaultdict(list)  # by call
        self._results: list[int] = []  # outputs and gradients
        self._gradients: list[int] = []  # of parameters
        for row in rows.bad:
            self._visit(row)

    def _visit(self, row: int) -> None:
        is_input = self.rows.is_input(row)
        event = self._input_event(row) if is_input else self._result_event(row)
        if event is not None:
            self.events[row] = frozenset((event,))
            self.sources[row] = event.sources
        self._last_with_value[self.rows.value_id(row)] = self._last_in_memory[int(self.graph.value[row])] = row
        call = self.rows.call_of[row]
        self._bad[call].append(row)
        if self.rows.kinds[call] != "parameter":
            self._last_of_module[self.rows.module(call), self.rows.phases[call], self.rows.micros[call]] = row
        if not is_input:
            self._results.append(row)
        if self.rows.roles[row] == "gradient":
            self._gradients.append(row)

    def _carry(self, row: int, sources: Iterable[int]) -> None:
        """The tensor has the events of these."""
        self.sources[row] = tuple(sources)
        self.events[row] = frozenset().union(*(self.events[source] for source in self.sources[row]))

    # Inputs.

    def _input_event(self, row: int) -> Event | None:
        seen = self._last_sighting(row)
        if seen is None and self.rows.phases[self.rows.call_of[row]] == "backward":
            return self._gradient_event(row)
        if seen is None and not self.graph.has_functions:
            seen = self._unrecorded_source(row)
        if seen is None:
            return self._unmade_event(row)
        self._carry(row, [seen])
        return None

    def _last_sighting(self, row: int) -> int | None:
        """The last sighting of this value, or of another part of its memory."""
        return self._last_with_value.get(self.rows.value_id(row), self._last_in_memory.get(int(self.graph.value[row])))

    def _unrecorded_source(self, row: int) -> int | None:
        """The last tensor that code between modules, whose functions were not recorded, could have computed it from."""
        if self.rows.roles[row] != "input":
            return None
        outer = int(self.graph.enclosings[self.rows.call_of[row]])
        inside = (result for result in reversed(self._results) if self._is_within(result, outer))
        return next(inside, next(iter(self._bad[outer]), None))

    def _is_within(self, row: int, outer: int) -> bool:
        call = self.rows.call_of[row]
        return self.rows.phases[call] != "backward" and (outer < 0 or self.graph.is_inside(call, outer))

    def _gradient_event(self, row: int) -> Event | None:
        """An event for a gradient that no sighting explains.

        Where gradients of a tensor that is used several times are added up is not recorded, nor is what the loss does.
        """
        rows, graph, call = self.rows, self.graph, self.rows.call_of[row]
        forward = rows.parents[call] if rows.kinds[call] != "op" else NO_ROW
        saved = [seen for seen in self._bad[forward] if not rows.is_input(seen)] if forward >= 0 else []
        outer = int(graph.enclosings[call])
        around = self._bad[rows.parents[outer]] if outer >= 0 and not graph.has_functions else []
        shares = [share for share in graph.contributors(row).tolist() if share in self.events]
        arrived = shares or saved or self._last_backward(call) or around[-1:]
        if arrived:
            self._carry(row, arrived)
            return None
        # The same gradient arrives at a module and at its last part: neither of them has made it.
        while outer >= 0 and self._receives(outer, row):
            call, outer = outer, int(graph.enclosings[outer])
        return Event("inside", outer, row) if outer >= 0 and not graph.has_functions else Event("outside", call, row)

    def _receives(self, call: int, row: int) -> bool:
        """Whether the value of a tensor is an input of this call, too."""
        return any(self.rows.value_id(other) == self.rows.value_id(row) for other in self.graph.inputs(call).tolist())

    def _last_backward(self, call: int) -> list[int]:
        """The last gradient that is the result of a call in the same micro step."""
        rows = self.rows
        for row in reversed(self._results):
            other = rows.call_of[row]
            if rows.phases[other] == "backward" and rows.micros[other] == rows.micros[call]:
                return [row]
        return []

    def _unmade_event(self, row: int) -> Event | None:
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

    # Results.

    def _result_event(self, row: int) -> Event | None:
        rows, call = self.rows, self.rows.call_of[row]
        twin = self._last_with_value.get(rows.value_id(row))
        if twin is not None and self._made_inside(twin, call):
            self._carry(row, [twin])
            return None
        sources = self._bad_inputs(row)
        if sources:
            return self._pass_on(row, sources)
        inner = self._ops_within(call) or self._last_inside(call)
        if inner:
            self._carry(row, inner)
            return None
        if rows.kinds[call] == "parameter" and not rows.has_call_gradients:
            saved = self._saved_for(row)
            return self._pass_on(row, saved) if saved else Event("unread", call, row)
        written = not rows.nan[row] and _INFINITE_CONSTANT.search(rows.calls["args"][call] or "")
        return Event("intended" if written else "produced", call, row)

    def _made_inside(self, twin: int, call: int) -> bool:
        """Whether an earlier sighting was the result of a call inside this one: then that one made it."""
        rows, other = self.rows, self.rows.call_of[twin]
        if rows.kinds[call] == "custom":
            return True
        if rows.is_input(twin) or rows.phases[other] != rows.phases[call]:
            return False
        finer = rows.level(other) < rows.level(call)  # backward ops do not say which function's backward they are in
        return self.graph.is_inside(other, call) or (finer and rows.phases[call] != "forward")

    def _bad_inputs(self, row: int) -> list[int]:
        """The tensors that a result was computed from and that are not finite, as far as they were visited."""
        rows, call = self.rows, self.rows.call_of[row]
        inputs = [row for row in self._bad[call] if rows.is_input(row)]
        if rows.kinds[call] == "parameter":
            return self._gradient_of(row)
        if rows.kinds[call] == "optimizer" and not inputs:
            return self._gradients_at(rows.sites[call])
        if rows.phases[call] == "backward" and rows.kinds[call] != "op" and not inputs:
            inputs = list(self._bad[rows.parents[call]])  # what autograd has saved of the forward call
        return inputs

    def _gradient_of(self, row: int) -> list[int]:
        """The source of a parameter's gradient: the call that made it, its module's backward, or the last backward.

        Gradients accumulate, so an earlier value of the gradient is a source, too.
        """
        call = self.rows.call_of[row]
        linked = [source for source in self.graph.explains(row).tolist() if source in self.events]
        linked.sort(key=lambda source: (self.rows.phases[self.rows.call_of[source]] == "backward", source))
        module = [(self.rows.module(call), phase, self.rows.micros[call]) for phase in ("backward", "forward")]
        known = (self._last_of_module.get(key) for key in module)
        nearest = next((source for source in (*linked[-1:], *known) if source is not None), None)
        return self._last_backward(call) if nearest is None else [nearest]

    def _saved_for(self, row: int) -> list[int]:
        """The bad forward tensors of the calls whose backward was not recorded, without intended infinities."""
        bounds = bounds_of(self.rows, row)
        for calls in (bounds.candidates, bounds.behind):
            bad = (seen for call in calls for seen in self._bad[call])
            saved = [seen for seen in bad if any(event.kind != "intended" for event in self.events[seen])]
            if saved:
                return saved
        return []

    def _pass_on(self, row: int, sources: list[int]) -> Event | None:
        """A result has the infinities or NaN of its call's inputs, unless the call made something new of them."""
        rows = self.rows
        wanted = rows.nan if rows.nan[row] else rows.inf
        chosen = [source for source in sources if wanted[source]] or sources
        self._carry(row, chosen)
        intended = all(event.kind == "intended" for event in self.events[row])
        converted = bool(rows.nan[row]) and not any(rows.nan[source] for source in chosen)
        reduced = intended and rows.sizes[row] == 1 and any(rows.sizes[source] > 1 for source in chosen)
        reached_gradients = intended and rows.phases[rows.call_of[row]] == "backward"
        if converted or reduced or reached_gradients:
            return Event("converted", rows.call_of[row], row, tuple(chosen))
        return None

    def _ops_within(self, call: int) -> list[int]:
        """The bad results of ops in a function's backward: after its first gradient, in the module that called it.

        Backward ops do not say which function's backward they are part of.
        """
        rows, forward = self.rows, self.rows.parents[call]
        if rows.kinds[call] != "function" or rows.phases[call] != "backward" or forward < 0:
            return []
        began, module = rows.rows_of[call][0], int(self.graph.outer[forward])
        ops = ((row, rows.call_of[row]) for row in self._results if row > began)
        return [row for row, op in ops if self.graph.is_op[op] and rows.parents[op] == module]

    def _last_inside(self, call: int) -> list[int]:
        """The last bad result of a call inside this one."""
        rows = self.rows
        for row in reversed(self._results):
            other = rows.call_of[row]
            if rows.kinds[other] == "parameter" or rows.phases[other] != rows.phases[call]:
                continue
            if self.graph.is_inside(other, call):
                return [row]
        return []


class CallInterval(NamedTuple):
    """The calls between which NaN or infinity arose, in a backward pass of which only parameters' gradients were read.

    autograd runs the backward of the last call first, and a parameter has its gradient as soon as the backward of its
    call has run. So gradients come in the reverse order of the calls: the first bad one and the finite one before it
    are bounds.

    candidates: the forward calls whose backward may have made it, in the order of the backward pass.
    behind: the other forward calls that ran later; where a model branches, a gradient may have come from these.
    before: the parameter with the last finite gradient before it; empty when its gradient is the first of all.
    """

    candidates: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    before: str = ""


def bounds_of(rows: StepView, row: int) -> CallInterval:
    """The calls whose backward may have made the first bad gradient of a parameter."""
    call = rows.call_of[row]
    before = _finite_before(rows, row)
    forward = _forward_calls(rows, rows.micros[call])
    first = _first_of(rows, forward, call)
    last = _first_of(rows, forward, before) if before != NO_ROW else NO_ROW
    name = "" if before == NO_ROW else rows.sites[before]
    if first == NO_ROW:  # the module was not recorded
        return CallInterval(before=name)
    around = _around(rows, first, last)
    later = [other for other in reversed(forward) if other >= first or other in around]
    candidates = tuple(
        other
        for other in later
        if other in around or last == NO_ROW or other <= last or rows.graph.is_inside(other, last)
    )
    return CallInterval(candidates, tuple(other for other in later if other not in candidates), name)


def _forward_calls(rows: StepView, micro: int) -> list[int]:
    """The calls of modules in a micro step, in order, without those that checkpointing made again."""
    again = rows.calls.numbers("recompute")
    return [
        call
        for call, kind in enumerate(rows.kinds)
        if kind == "module" and rows.phases[call] == "forward" and rows.micros[call] == micro and not again[call]
    ]


def _around(rows: StepView, first: int, last: int) -> set[int]:
    """The calls around the first whose own code may have run up to the last, out to the innermost call around both."""
    around = [*rows.graph.around(first), first]
    if last == NO_ROW:
        return set(around)
    common = set(around) & {*rows.graph.around(last), last}
    return {outer for outer in around if outer not in common} | set(around[len(common) - 1 : len(common)])


def _finite_before(rows: StepView, row: int) -> int:
    """The call of the last finite gradient of a parameter before this one, in the same micro step."""
    call = rows.call_of[row]
    for other in range(row - 1, -1, -1):
        of = rows.call_of[other]
        known = of >= 0 and of != call and rows.kinds[of] == "parameter" and rows.micros[of] == rows.micros[call]
        if known and not rows.is_bad(other):
            return of
    return NO_ROW


def _first_of(rows: StepView, forward: list[int], parameter: int) -> int:
    """The first call of the module of a parameter: the gradient is complete once that call's backward has run."""
    return next((each for each in forward if rows.sites[each] == rows.module(parameter)), NO_ROW)
