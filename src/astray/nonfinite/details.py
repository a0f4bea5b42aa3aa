"""Origins of one step → alarms: looks up the stacks, the numbers and the values that describe them.

The first bad element of a tensor is in its row. Runs recorded before format version 3 lack it; there it is searched in
the kept values, where all of them were kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.nonfinite.alarm import Alarm, CallLocation, Element, TensorSummary
from astray.nonfinite.flow import CallInterval, Event, bounds_of
from astray.nonfinite.kinds import OriginCase, arguments, kind_of
from astray.nonfinite.origins import Origins, Trace
from astray.nonfinite.step_rows import NO_ROW, StepView, function_of, joined
from astray.part import whole_shape
from astray.records import Frame
from astray.stats import dtypes

ReadStack = Callable[[int], list[Frame]]

ReadValues = Callable[[int], npt.NDArray[Any] | None]
"""The values of a row of the step's tensors as they were stored; None when they were not kept."""

MOST_CALLS = 8
"""The most calls of a chain that are listed: half next to the origin, half next to where it surfaced."""

_NO_BOUNDS = CallInterval()
_SHRINKING = frozenset({"mul", "pow", "square", "exp", "half", "to", "div", "softmax", "sigmoid", "type", "bfloat16"})


def describe_origins(origins: Origins, rank: int, stacks: ReadStack | None, values: ReadValues | None) -> list[Alarm]:
    """One alarm for each origin of a step, the earliest first."""
    describer = _OriginDescriber(origins, stacks, values)
    return [describer.alarm(trace, rank) for trace in origins.traces]


class _OriginDescriber:
    def __init__(self, origins: Origins, stacks: ReadStack | None, values: ReadValues | None) -> None:
        self.origins, self.rows = origins, origins.rows
        self._stacks, self._values = stacks, values

    def alarm(self, trace: Trace, rank: int) -> Alarm:
        rows, event = self.rows, trace.event
        calls = rows.calls
        chain = self._chain(event, trace.surfaces[0][0])
        head, tail = MOST_CALLS // 2, MOST_CALLS - MOST_CALLS // 2
        skipped = max(len(chain) - MOST_CALLS, 0)
        offenders = tuple(self._summary(row) for row in self._offenders(event))
        given = tuple(self._given(event))
        bounds = bounds_of(rows, event.row) if event.kind == "unread" else _NO_BOUNDS
        return Alarm(
            step=int(calls.numbers("step")[event.call]),
            micro=int(calls.numbers("micro")[event.call]),
            rank=rank,
            ranks=(rank,),
            origin=self._location(event.call, self._origin_stack(event)),
            kind=kind_of(self._case(event, offenders, given, bounds.before)),
            offenders=offenders,
            given=given,
            chain=tuple(self._location(call) for call in (chain[:head] + chain[-tail:] if skipped else chain)),
            skipped=skipped,
            surfaced=tuple(dict.fromkeys(surfaced for _, surfaced in trace.surfaces)),
            enclosing=tuple(self._enclosing(event.call)),
            candidates=tuple(self._location(call) for call in bounds.candidates),
        )

    def _case(
        self, event: Event, offenders: tuple[TensorSummary, ...], inputs: tuple[TensorSummary, ...], before: str
    ) -> OriginCase:
        rows, forward = self.rows, self._forward(event.call)
        return OriginCase(
            event=event.kind,
            function=function_of(rows.types[event.call]),
            phase=rows.phases[event.call],
            given=[tensor for tensor in inputs if not tensor.forward],
            forward=[tensor for tensor in inputs if tensor.forward],
            made=offenders,
            args=rows.calls["args"][event.call if forward == NO_ROW else forward],
            flushed=self._underflow(event.call) if event.kind == "produced" else "",
            weight=self._weight(event) if event.kind == "weight" else "",
            before=before,
        )

    def _weight(self, event: Event) -> str:
        """The name of a weight. A function's argument is the parameter of its module that has the same shape."""
        rows = self.rows
        module, path = rows.module(event.call), rows.paths[event.row]
        if rows.roles[event.row] != "input":
            return joined(module, path)
        shapes = rows.tensors["shape"]
        names = {
            rows.sites[call]
            for row, call in enumerate(rows.call_of)
            if call >= 0
            and rows.kinds[call] == "parameter"
            and rows.module(call) == module
            and shapes[row] == shapes[event.row]
        }
        return names.pop() if len(names) == 1 else ""

    def _offenders(self, event: Event) -> list[int]:
        """The bad tensors of the origin: its results, or the bad input where the call has not made NaN or infinity."""
        if event.kind in ("produced", "converted"):
            rows = [
                row for row in self.rows.rows_of[event.call] if not self.rows.is_input(row) and self.rows.is_bad(row)
            ]
            return [event.row, *(row for row in rows if row != event.row)]
        return [event.row]

    def _given(self, event: Event) -> Iterator[TensorSummary]:
        """The inputs of the origin; of a backward call also the tensors of its forward call."""
        # A bad input is among the offenders already; the event may be of a call inside this one.
        listed = {self.rows.value_id(event.row)} if self.rows.is_input(event.row) else set()
        for row in self.rows.rows_of.get(event.call, ()):
            if self.rows.is_input(row) and self.rows.value_id(row) not in listed:
                yield self._summary(row)
        for row in self.rows.rows_of.get(self._forward(event.call), ()):
            yield self._summary(row, forward=True)

    def _forward(self, call: int) -> int:
        if self.rows.phases[call] != "backward" or self.rows.kinds[call] == "op":
            return NO_ROW
        return self.rows.parents[call]

    def _summary(self, row: int, forward: bool = False) -> TensorSummary:
        tensors = self.rows.tensors
        return TensorSummary(
            role=self.rows.roles[row],
            path=self.rows.paths[row],
            dtype=tensors["dtype"][row],
            shape=tensors["shape"][row],
            statistics=self.rows.statistics(row),
            forward=forward,
            first=first_bad(self.rows, row, self._values) if self.rows.is_bad(row) else None,
        )

    def _location(self, call: int, stack: tuple[Frame, ...] | None = None) -> CallLocation:
        rows = self.rows
        return CallLocation(
            site=rows.sites[call],
            type=rows.types[call],
            call=int(rows.calls.numbers("call")[call]),
            phase=rows.phases[call],
            kind=rows.kinds[call],
            stack=self._stack(call) if stack is None else stack,
            args=rows.calls["args"][call],
        )

    def _stack(self, call: int) -> tuple[Frame, ...]:
        number = int(self.rows.calls.numbers("stack")[call])
        return tuple(self._stacks(number)) if self._stacks is not None and number >= 0 else ()

    def _origin_stack(self, event: Event) -> tuple[Frame, ...]:
        """The stack of the origin; of a backward op, of the function whose backward it is part of, if that is known."""
        rows = self.rows
        if rows.phases[event.call] == "backward" and rows.kinds[event.call] == "op":
            for row in rows.bad:  # a function's gradients are seen right after the ops that computed them
                call = rows.call_of[row]
                is_result = (
                    rows.kinds[call] == "function" and rows.phases[call] == "backward" and not rows.is_input(row)
                )
                if is_result and row > event.row and event in self.origins.origins_of(row):
                    return self._stack(call)
        return self._stack(event.call)

    def _enclosing(self, call: int) -> Iterator[tuple[str, str]]:
        yield from ((self.rows.sites[outer], self.rows.types[outer]) for outer in self.rows.graph.around(call))

    def _chain(self, event: Event, row: int) -> list[int]:
        """The calls on the way from an origin to where it surfaced, both included, each once."""
        calls = (self.rows.call_of[each] for each in self.origins.path(event, row))
        return list(dict.fromkeys([event.call, *calls]))

    def _underflow(self, call: int) -> str:
        """A sentence about an input that the call that made it has rounded to zero; empty if there is none."""
        rows = self.rows
        for row in rows.rows_of.get(call, ()):
            if not rows.is_input(row) or not rows.statistics(row).zeros:
                continue
            maker = int(rows.graph.source_call[row])
            sources = [source for source in rows.rows_of.get(maker, ()) if rows.is_input(source)]
            if maker < 0 or not sources or function_of(rows.types[maker]) not in _SHRINKING:
                continue
            if 0 in arguments(rows.calls["args"][maker]):
                continue  # times zero: not a rounding
            statistics = [rows.statistics(source) for source in sources]
            if (
                all(each.absmax and not each.zeros for each in statistics)
                and rows.tensors["dtype"][row] in dtypes.DTYPES
            ):
                return _underflow_sentence(rows, maker, row, self._stack(maker))
        return ""


def _underflow_sentence(rows: StepView, maker: int, row: int, stack: tuple[Frame, ...]) -> str:
    name, dtype = rows.sites[maker], rows.tensors["dtype"][row]
    smallest = dtypes.find(dtype).tiny * dtypes.find(dtype).eps
    line = f" (line {stack[0].line})" if stack else ""
    return (
        f"{name}{line} made them of numbers that were not zero, for what it computes is below {smallest:.3g},"
        f" the smallest {dtype}."
    )


_CELLS = ("dtype", "shape", "first_bad", "first_bad_value", "placement")


def first_bad(rows: StepView, row: int, values: ReadValues | None) -> Element | None:
    """The first element of a tensor that is not finite; None where that is not known."""
    return recorded_element(rows.tensors[list(_CELLS)].row(row)) or _element_in_values(rows, row, values)


def recorded_element(cells: Mapping[str, Any]) -> Element | None:
    """The first bad element as a row has it; None where all elements are finite, or it is not recorded."""
    position = cells["first_bad"]
    if position is None or position < 0:
        return None
    whole = None if cells["placement"] is None else whole_shape(cells["placement"])
    shape = cells["shape"] if whole is None else whole
    value = cells["first_bad_value"]
    value = math.nan if value is None else value  # NaN is null in a table without a mask
    dtype = dtypes.DTYPES.get(cells["dtype"])
    is_complex = dtype is not None and dtype.kind == "complex"
    if position >= prod(shape) * (1 + is_complex):  # the row contradicts itself
        return None
    if not is_complex:
        return Element(_unravelled(position, shape), value, whole=whole)
    position, imaginary = divmod(position, 2)
    return Element(_unravelled(position, shape), value, "imaginary" if imaginary else "real", whole)


def _element_in_values(rows: StepView, row: int, values: ReadValues | None) -> Element | None:
    tensors = rows.tensors
    is_partial = tensors.valid("part")[row] or int(tensors.numbers("sampled")[row]) >= 0
    raw = values(row) if values is not None and not is_partial else None
    if raw is None:
        return None
    numbers = raw if raw.dtype.kind in "fc" else dtypes.decode(raw, str(tensors["dtype"][row]))
    bad = np.flatnonzero(~np.isfinite(numbers))
    if not len(bad):
        return None
    value, index = numbers.reshape(-1)[bad[0]], _unravelled(int(bad[0]), numbers.shape)
    if value.dtype.kind != "c":
        return Element(index, float(value))
    real = not np.isfinite(value.real)
    return Element(index, float(value.real if real else value.imag), "real" if real else "imaginary")


def _unravelled(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(each) for each in np.unravel_index(position, shape))
