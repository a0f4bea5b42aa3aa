"""The rows that each row came from, whose errors may explain its own; and the families of siblings it is compared with.

Reads `provenance`, feeds `bases` and `surprise`. "Input error" in the judgement is `Sources.largest(error)`. The
sources of a row, by its provenance:

- `SEEN_BEFORE`: the first row with this value.
- `CALL`: what the call was given and the results of the calls directly inside it; for a backward call also what its
  forward call was given and made.
- `CODE`: what the enclosing call was given and the results inside it so far.
- `GRADIENT`: what its module was given, forward and backward.
- `WEIGHT`, `BUFFER`: the same tensor in the step before. What an optimizer adds is a term of the base, not an error
  that passes through.
- `START`: none.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.provenance import Provenance, RowProvenance
from astray.comparison.judge.siblings import running_maximum
from astray.comparison.rows import Bools, Floats, Ints
from astray.graph import graph_of
from astray.graph.keys import mixed_key, one_key


class Sources(RowProvenance):
    """What the rows of one rank came from: `largest` looks one call back."""

    def largest(self, column: Floats) -> Floats:
        """For each row the largest number of a column among its sources; 0 where there are none."""
        calls, provenance = self.calls, self.provenance
        largest = np.zeros(len(self.call))
        if not column.any():
            return largest
        # By call: of what it was given, of that and the results inside it, and of all that a backward call may use.
        operands, results = self._largest_operand(column), self.largest_by_call(column, self.is_result)
        taken = np.maximum(operands, calls.largest_inside(results))
        taken_and_made = np.maximum(taken, results)

        rows = np.flatnonzero(provenance == Provenance.CALL)
        call = self.call[rows]
        largest[rows] = np.maximum(taken[call], _lookup(taken_and_made, calls.forward_of[call]))
        updates = rows[self.applied_gradient[rows] >= 0]
        largest[updates] = np.maximum(largest[updates], column[self.applied_gradient[updates]])

        # A result of a call that shows no inputs is explained as an input would be that its enclosing code made.
        bare = rows[~self._call_has_sources[call] & (self.applied_gradient[rows] < 0)]
        code = np.concatenate([np.flatnonzero(provenance == Provenance.CODE), bare])
        if len(code):
            outer = calls.enclosing[self.call[code]]
            before = self._largest_result_before(column)[code]
            forward = np.where(outer >= 0, _lookup(calls.forward_of, outer, -1), calls.forward_of[self.call[code]])
            around = _lookup(operands, outer), _lookup(taken_and_made, forward)
            largest[code] = np.fmax.reduce([largest[code], before, *around])
            largest[code] = np.maximum(largest[code], _lookup(column, self.applied_gradient[code]))
            reused = self.reused_from[code]
            largest[code] = np.where(reused >= 0, _lookup(column, reused), largest[code])

        gradients = np.flatnonzero(provenance == Provenance.GRADIENT)
        if len(gradients):
            largest[gradients] = self._largest_of_owner(taken_and_made)[gradients]

        rows = np.flatnonzero(self.has_provenance(Provenance.WEIGHT, Provenance.BUFFER))
        largest[rows] = _lookup(column, self.last_seen[rows])
        buffers = np.flatnonzero(provenance == Provenance.BUFFER)  # which its call has updated from its inputs
        call_before = _lookup(self.call, self.last_seen[buffers], -1)
        largest[buffers] = np.maximum(largest[buffers], _lookup(operands, call_before))

        rows = np.flatnonzero(provenance == Provenance.SEEN_BEFORE)
        largest[rows] = column[self.first_seen[rows]]
        return largest

    def largest_of_ancestors(self, column: Floats, rows: Bools) -> Floats:
        """For each of some rows the largest number of itself and of its ancestors among these rows."""
        largest = np.where(rows, column, 0.0)
        for _ in range(t.MAX_CHAIN):
            further = np.where(rows, np.maximum(largest, self.largest(largest)), 0.0)
            if np.array_equal(further, largest):
                break
            largest = further
        return largest

    def smallest_operand(self, column: Floats) -> Floats:
        """For each result the smallest positive number among what its call was given; 0 where there is none."""
        rows = self.is_operand & (column > 0)
        smallest = np.full(self.calls.count, np.inf)
        np.minimum.at(smallest, self.call[rows], column[rows])
        smallest[np.isinf(smallest)] = 0.0
        return np.where(self.is_result, _lookup(smallest, self.call), 0.0)

    @cached_property
    def _call_has_sources(self) -> Bools:
        """Calls with recorded inputs, or with recorded calls inside. Weights alone explain no result."""
        inputs = self.largest_by_call(np.ones(len(self.call)), self.has_role("input"))
        results = self.largest_by_call(np.ones(len(self.call)), self.is_result)
        return np.asarray(np.maximum(inputs, self.calls.largest_inside(results)) > 0)

    @cached_property
    def is_innermost(self) -> Bools:
        """Rows of calls that have no other call of their plane inside."""
        encloses = np.zeros(self.calls.count, np.bool_)
        encloses[self.calls.enclosing[self.calls.enclosing >= 0]] = True
        return self._call_flag(~encloses)

    @cached_property
    def has_sources(self) -> Bools:
        """Rows that came from something that was recorded."""
        return np.asarray(self.largest(np.ones(len(self.call))) > 0)

    def _largest_operand(self, column: Floats) -> Floats:
        """For each call the largest number among what it was given, its module's weights of that step included."""
        rows = self.is_module_state
        of_group = np.zeros(int(self.calls.state_group.max(initial=-1)) + 1)
        np.maximum.at(of_group, self.calls.state_group[self.call[rows]], column[rows])
        return np.maximum(self.largest_by_call(column, self.is_operand), of_group[self.calls.state_group])

    @cached_property
    def is_module_state(self) -> Bools:
        """Rows of parameters and buffers of modules."""
        return self.has_role("parameter") | self.has_role("state")

    def largest_by_call(self, column: Floats, rows: Bools) -> Floats:
        """For each call the largest number of a column among some of its rows."""
        largest = np.zeros(self.calls.count)
        positive = np.flatnonzero(rows & (column > 0))
        np.maximum.at(largest, self.call[positive], column[positive])
        return largest

    def _largest_of_owner(self, by_call: Floats) -> Floats:
        """For each gradient of a parameter the largest number among the calls of its module in that step."""
        calls = self.calls
        found = np.zeros(len(self.call))
        gradients = np.flatnonzero(self.provenance == Provenance.GRADIENT)
        step, steps = self._call_column(calls.step_number), int(calls.step_number.max(initial=0)) + 1
        missing = np.ones(len(gradients), np.bool_)
        for plane in calls.planes_of_owners:  # the first plane with calls of the module explains all of its gradients
            users = np.flatnonzero(calls.plane == plane)
            of_module = np.full((len(calls.modules) + 1) * steps, -1.0)  # by module and step; −1 where it has no call
            np.maximum.at(of_module, calls.module[users] * steps + calls.step_number[users], by_call[users])
            owner = calls.owner[self.call[gradients]]
            largest = np.where(owner >= 0, of_module[owner * steps + step[gradients]], -1.0)
            found[gradients] = np.where(missing & (largest >= 0), largest, found[gradients])
            missing &= largest < 0
            for rows, modules in self._tied_weights:  # the gradient of a tied weight is a sum over all its modules
                users = np.array(sorted(modules)) * steps + step[rows[0]]
                found[rows] = np.maximum(found[rows], of_module[users].max())
        if missing.any():  # a weight under a name that no module was called by: any call may have used it
            of_step = np.zeros(steps)
            users = np.flatnonzero(calls.plane == calls.planes_of_owners[0])
            np.maximum.at(of_step, calls.step_number[users], by_call[users])
            found[gradients[missing]] = np.maximum(found[gradients[missing]], of_step[step[gradients[missing]]])
        return found

    @cached_property
    def _tied_weights(self) -> list[tuple[Ints, set[int]]]:
        """For each weight that several modules share, and each step: the rows of its gradients, and the modules."""
        weights = np.flatnonzero(self.has_role("parameter") & (self.plane == 0) & ~self.backward)
        gradients = np.flatnonzero(self.provenance == Provenance.GRADIENT)
        if not len(weights) or not len(gradients):
            return []
        tensor = self.evidence.reference.tensor[self.evidence.pairs.reference[weights]]
        value = one_key([graph_of(self.run).value[tensor], self.step[weights]])
        module = self._call_column(self.calls.module)[weights]
        order = np.argsort(value, kind="stable")
        tied: list[tuple[Ints, set[int]]] = []
        for group in np.split(order, np.flatnonzero(np.diff(value[order])) + 1):
            modules = set(module[group].tolist())
            if len(modules) > 1:
                sites = list(set(self._parameter_site(weights[group]).tolist()) - {-1})
                of_weight = np.isin(self.site[gradients], sites)
                of_weight &= self.step[gradients] == self.step[weights[group[0]]]
                if of_weight.any():
                    tied.append((gradients[of_weight], modules))
        return tied

    def largest_arriving_gradient(self, column: Floats) -> Floats:
        """For each gradient of a parameter the largest number among the gradients that arrive at its module."""
        return self._largest_of_owner(self.largest_by_call(column, self.is_operand & self.backward))

    def largest_module_input(self, column: Floats) -> Floats:
        """For each gradient of a parameter the largest number among the inputs of its module."""
        return self._largest_of_owner(self.largest_by_call(column, self.has_role("input") & ~self.backward))

    @cached_property
    def enclosing_group(self) -> Ints:
        """A number for the code around a row: of its enclosing call, or of its plane and micro step."""
        outermost = one_key([self.step, self._call_column(self.calls.micro), self.plane])
        return np.where(self.enclosing >= 0, self.enclosing, self.calls.count + outermost)

    def _largest_result_before(self, column: Floats) -> Floats:
        """For each row the largest number among the earlier results of its `enclosing_group`."""
        largest = np.zeros(len(column))
        order, number, begins = self._rows_by_group
        if len(order):
            numbers = np.where(self.is_result[order], column[order], 0.0)
            largest[order] = running_maximum(numbers, number, begins)
        return largest

    @cached_property
    def _rows_by_group(self) -> tuple[Ints, Ints, Bools]:
        """Rows sorted by `enclosing_group`, the number of each one's group, and where groups begin.

        Groups in which code explains nothing are left out.
        """
        rows = np.flatnonzero(self.comparable & (self.call >= 0))
        by_code = self.provenance[rows] == Provenance.CODE
        by_code |= (self.provenance[rows] == Provenance.CALL) & ~self._call_has_sources[self.call[rows]]
        group = self.enclosing_group[rows]
        has_code = np.zeros(int(group.max(initial=0)) + 1, np.bool_)
        has_code[group[by_code]] = True
        rows = rows[has_code[group]]
        order = rows[np.argsort(self.enclosing_group[rows], kind="stable")]
        group = self.enclosing_group[order]
        begins = np.concatenate([[True], group[1:] != group[:-1]])[: len(order)]
        return order, np.cumsum(begins) - 1, begins

    # -- families --------------------------------------------------------------------------------------------------

    @cached_property
    def families(self) -> tuple[Ints, Ints]:
        """Two numbers for each row: of its near family, the same position in other layers, and of all its kind."""
        calls = self.calls
        near = one_key([self.position_in_layer, self.step])
        by_code = self.provenance == Provenance.CODE
        type = np.where(by_code, -1, self._type_of_module)
        enclosing_type = np.where(by_code, np.append(calls.type, -1)[self.enclosing], -1)
        named = by_code | (self.provenance == Provenance.GRADIENT)
        name = np.where(named, self._call_column(calls.last_name), -1)
        columns = [type, enclosing_type, name, self.role, self.path, self._call_column(calls.phase)]
        return near, one_key([*columns, self.plane, self.provenance, self.step])

    @cached_property
    def position_in_layer(self) -> Ints:
        """A number for all rows at the same position of any layer, in any step."""
        calls = self.calls
        columns = [self._call_column(column) for column in (calls.site_pattern, calls.type, calls.phase)]
        return one_key([*columns, self.role, self.path, self._type_of_module, self.plane, self.provenance])

    @cached_property
    def _type_of_module(self) -> Ints:
        calls, is_gradient = self.calls, self.provenance == Provenance.GRADIENT
        return np.where(is_gradient, self._call_column(calls.owner_type), self._call_column(calls.type))

    @cached_property
    def call_shapes(self) -> npt.NDArray[np.uint64]:
        """A number for each row's call: which tensors it has, and their shapes."""
        shape = np.append(self.evidence.reference.columns["shape"], -1)[self.evidence.pairs.reference]
        by_call = np.zeros(self.calls.count + 1, np.uint64)
        keys = np.where(self.comparable, mixed_key([self.role, self.path, shape]), np.uint64(0))
        np.add.at(by_call, self.call, keys)
        return by_call[self.call]

    @cached_property
    def tensor_key(self) -> Ints:
        """A number for all rows of one tensor of one call, in any step."""
        columns = [self._call_column(column) for column in (self.calls.site, self.calls.call_number, self.calls.phase)]
        return one_key([*columns, self.role, self.path, self.plane])


def _lookup(column: npt.NDArray[Any], rows: Ints, default: float = 0.0) -> npt.NDArray[Any]:
    """The column at some rows; the default where the row is −1."""
    return np.append(column, np.array(default, column.dtype))[rows]
