"""What each tensor came from: the rows whose error may explain its own, and the family it is compared with.

Reads the calls of the reference, feeds `surprise`. Each row came about in one way, its `Producer`:

- `CARRIED`: a value that was seen before in both runs. It is as right or wrong as it was there.
- `CALL`: a result. It came from what its call was given and from the results of the calls directly inside it; in
  backward also from what the forward call saw.
- `CODE`: an input that no recorded call made. Code of the enclosing call did, from what that was given and from the
  results inside it so far.
- `GRADIENT`: of a parameter. It came from what its module was given, forward and backward.
- `WEIGHT`, `BUFFER`: what a module starts from. They have a history: the sighting before, and what moved them since.
- `START`: it came from nowhere: weights and buffers of the first step, and the program's inputs.

Modules are explained by modules alone, functions by functions, ops by ops (their *plane*): so a row is judged alike
whatever else was recorded.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.judge.calls import CallColumns, read_calls
from astray.comparison.judge.siblings import running_maximum
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Floats, Ints
from astray.graph import graph_of
from astray.graph.keys import mixed_key, one_key

GIVEN = ("input", "parameter", "state")
RESULTS = ("output", "gradient")


class Producer(IntEnum):
    """How a row came about."""

    NONE = 0
    CARRIED = 1
    CALL = 2
    CODE = 3
    GRADIENT = 4
    WEIGHT = 5
    BUFFER = 6
    START = 7


class Sources:
    """Where the rows of one rank came from. Rows are pairs, given and found by their number; −1 stands for none."""

    def __init__(self, evidence: Evidence, comparable: Bools, calls: CallColumns | None = None) -> None:
        """calls: those of the pairs, where they are some of the rank's; else all are read."""
        assert evidence.reference.run is not None, "pairs have both sides"
        self.evidence, self.run = evidence, evidence.reference.run
        self.calls = calls or read_calls(self.run)
        rows = evidence.pairs.reference
        self.known: Bools = comparable & evidence.pairs.matched
        place = np.full(len(self.run.calls) + 1, -1)
        place[self.calls.rows] = np.arange(self.calls.count)
        self.call: Ints = np.where(self.known, place[np.append(evidence.reference.call_row, -1)[rows]], -1)
        self.role = self._of_tensor("role", rows)
        self.path = self._of_tensor("path", rows)
        self.is_given = self.known & self._has_role(*GIVEN)
        self.is_result = self.known & self._has_role(*RESULTS)
        self.step = self._of_call(self.calls.step)
        self.plane = self._of_call(self.calls.plane)
        self.backward = self._is_call(self.calls.backward)
        self.site = self._of_call(self.calls.site)
        self.enclosing = self._of_call(self.calls.enclosing)
        self.in_update = self._is_call(self.calls.update)
        self.of_optimizer = self._is_call(self.calls.is_optimizer)
        words = evidence.paths
        self.is_update = self.of_optimizer & (self.path == (words.index("update") if "update" in words else -2))

    def _of_tensor(self, name: str, rows: Ints) -> Ints:
        return np.append(self.evidence.reference.columns[name], -1)[rows]

    def _of_call(self, column: Ints) -> Ints:
        return np.append(column, np.array(-1, column.dtype))[self.call]

    def _is_call(self, column: Bools) -> Bools:
        return np.append(column, False)[self.call]

    def _has_role(self, *roles: str) -> Bools:
        words = self.evidence.roles
        return np.array([*(word in roles for word in words), False])[self.role]

    def has_role(self, role: str) -> Bools:
        """Known rows in a role."""
        return self.known & self._has_role(role)

    def is_unit(self, *units: Producer) -> Bools:
        """Rows that came about in one of these ways."""
        return np.array([unit in units for unit in Producer])[self.unit]

    @cached_property
    def is_vector(self) -> Bools:
        """Known rows of tensors of one dimension."""
        shape = self.run.tensors.coded("shape")
        vectors = np.array([*(len(one) == 1 for one in shape.values), False])[shape.codes]
        found = np.append(vectors[self.evidence.reference.tensor], False)[self.evidence.pairs.reference]
        return np.asarray(found & self.known)

    # -- units -----------------------------------------------------------------------------------------------------

    @cached_property
    def unit(self) -> Ints:
        """How each row came about."""
        unit = np.full(len(self.call), Producer.NONE, np.int8)
        unit[self.is_result] = Producer.CALL
        unit[self.is_result & self._is_call(self.calls.is_parameter)] = Producer.GRADIENT
        entering = self.has_role("input")
        unit[entering] = Producer.CODE
        unit[entering & self._is_from_outside] = Producer.START
        moved = self.last_seen >= 0
        unit[self.is_weight | self.has_role("state")] = Producer.START
        unit[self.is_weight & (moved | self._has_history)] = Producer.WEIGHT
        unit[self.has_role("state") & (moved | self._has_history)] = Producer.BUFFER
        optimizer = self._is_call(self.calls.is_optimizer)
        unit[optimizer & entering] = Producer.CODE
        unit[self.carried_from >= 0] = Producer.CARRIED
        return unit

    @property
    def are_labels(self) -> Bools:
        """What losses are given that no call has made."""
        return np.asarray((self.unit == Producer.CODE) & self._is_call(self.calls.is_loss))

    @cached_property
    def is_weight(self) -> Bools:
        """Parameters, also as functions get them: they require a gradient; if anything made them, an optimizer did."""
        given = self.has_role("input") & ~self.backward & ((self.plane == 1) | (self.plane == 2))
        found = self.has_role("parameter")
        at = np.flatnonzero(given)
        if len(at):
            tensor = self.evidence.reference.tensor[self.evidence.pairs.reference[at]]
            requires = self.run.tensors.numbers("requires_grad")[tensor] > 0
            maker = graph_of(self.run).maker[tensor]
            phase = self.run.calls.coded("phase")
            updating = np.append(phase.codes == phase.code("update"), True)
            by_optimizer = updating[np.where(maker >= 0, self.run.call_rows[maker], -1)]
            found[at] = requires & by_optimizer
        return found

    @property
    def _has_history(self) -> bool:
        """Whether steps were run that are not compared: a first step that is not 0 starts from what they left."""
        return self.evidence.first_step > 0

    @cached_property
    def _is_from_outside(self) -> Bools:
        """Inputs of outermost forward calls before anything else was computed in that step."""
        outermost = self.known & ~self.backward & (self.enclosing < 0)
        outermost &= self._is_call(self.calls.forward)
        return np.asarray(outermost & (self._results_before() == 0))

    @cached_property
    def carried_from(self) -> Ints:
        """The first row of the same plane and step that has the same value, on both sides; −1 for what is new."""
        found = np.full(len(self.call), -1)
        values, telling = self._same_value
        at = np.flatnonzero(telling & (self.plane >= 0))
        if not len(at):
            return found
        key = mixed_key([values[at], self.step[at], self.plane[at]])
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        source = self._outermost(at, number, at[first])[number]
        later = source != at
        found[at[later]] = source[later]
        # A result is made by its call, whatever else is like it; only the call around it may hand it on unchanged.
        found[self.is_result & (found >= 0) & ~self._hands_on(found)] = -1
        weights = self.is_weight | self.has_role("state")
        found[weights & (found >= 0) & ~weights[found]] = -1
        return found

    @cached_property
    def seen_before(self) -> Ints:
        """The first row of the step that has the same value on both sides, of whatever plane; −1 for what is new."""
        found = np.full(len(self.call), -1)
        values, telling = self._same_value
        at = np.flatnonzero(telling)
        if len(at):
            key = mixed_key([values[at], self.step[at]])
            _, first, number = np.unique(key, return_index=True, return_inverse=True)
            source = at[first][number]
            found[at[source != at]] = source[source != at]
        return found

    @cached_property
    def handed_from(self) -> Ints:
        """For inputs that only the candidate computes anew: the first row of the value that the reference hands on."""
        found = np.full(len(self.call), -1)
        evidence = self.evidence
        at = np.flatnonzero(self.known & (self.plane >= 0))
        held = graph_of(self.run).contents
        tensor = evidence.reference.tensor[evidence.pairs.reference[at]]
        at, tensor = at[held.telling[tensor]], tensor[held.telling[tensor]]
        if not len(at):
            return found
        key = mixed_key([held.code[tensor], self.step[at], self.plane[at]])
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        source = at[first][number]
        new = (source < at) & self.has_role("input")[at] & ~self.backward[at]
        found[at[new]] = source[new]
        return found

    def _outermost(self, at: Ints, number: Ints, first: Ints) -> Ints:
        """The row that each value came by: the first, or, of gradients that arrive, the one at the outermost call.

        A gradient may reach a call and those around it at once, in any order.
        """
        arrives = self.backward & self.has_role("input")
        inner = np.flatnonzero(arrives[first])
        here = np.flatnonzero(arrives[at] & np.isin(number, inner))
        if not len(here):
            return first
        depth = self.calls.depth[self.call[at[here]]]
        order = np.lexsort((at[here], depth, number[here]))
        groups, begin = np.unique(number[here][order], return_index=True)
        found = first.copy()
        found[groups] = at[here][order][begin]
        return found

    def _hands_on(self, source: Ints) -> Bools:
        """Whether a row's value was made inside of its call, or was given to it."""
        own, other = self.call, np.where(source >= 0, self.call[source], -1)
        inside = self.calls.lies_in(other, own)
        return np.asarray((own == other) | inside)

    @cached_property
    def _same_value(self) -> tuple[npt.NDArray[np.uint64], Bools]:
        """A number for each value that both sides hold in the same places; and where it is known."""
        evidence, at = self.evidence, np.flatnonzero(self.known)
        found, known = np.zeros(len(self.call), np.uint64), np.zeros(len(self.call), np.bool_)
        if not len(at) or not evidence.same_prints:
            return found, known
        codes, telling = [], np.ones(len(at), np.bool_)
        for rows, side in (
            (evidence.reference, evidence.pairs.reference),
            (evidence.candidate, evidence.pairs.candidate),
        ):
            assert rows.run is not None, "pairs have both sides"
            held, tensor = graph_of(rows.run).contents, rows.tensor[side[at]]
            codes.append(held.code[tensor])
            telling &= held.telling[tensor]
        found[at], known[at] = mixed_key(codes), telling
        return found, known

    # -- history ---------------------------------------------------------------------------------------------------

    @cached_property
    def last_seen(self) -> Ints:
        """For parameters and buffers the sighting in the step before, −1 for the first; within a step the first."""
        found = np.full(len(self.call), -1)
        at = np.flatnonzero(self.is_weight | self.has_role("state"))
        if not len(at):
            return found
        number = np.where(self.has_role("input"), self._of_call(self.calls.number), 0)  # a function's calls differ
        name = one_key([self.site[at], self.path[at], self.role[at], self.plane[at], number[at]])
        order = np.lexsort((at, name))
        ordered, names, steps = at[order], name[order], self.step[at][order]
        begins = np.concatenate([[True], (names[1:] != names[:-1]) | (steps[1:] != steps[:-1])])
        group = np.cumsum(begins) - 1
        first = ordered[begins]
        earlier = np.concatenate([[-1], np.where(names[begins][1:] == names[begins][:-1], first[:-1], -1)])
        found[ordered] = np.where(begins, earlier[group], first[group])
        return found

    @cached_property
    def gradient_before(self) -> Ints:
        """The gradient that moved a parameter since its last sighting, or that its optimizer steps by; −1 for none."""
        found = np.full(len(self.call), -1)
        weights = np.flatnonzero(self.is_weight & (self.last_seen >= 0))
        given = np.flatnonzero((self.has_role("input") | self.is_result) & self._is_call(self.calls.is_optimizer))
        found[weights] = self._gradient(self._parameter_site(weights), self.step[self.last_seen[weights]])
        found[given] = self._gradient(self.site[given], self.step[given])
        return found

    @cached_property
    def stepped_from(self) -> Ints:
        """For what an optimizer's step makes: the weight, or the first argument of a function, that it changes."""
        found = np.full(len(self.call), -1)
        stepping = self.in_update
        if not stepping.any():
            return found
        paths = [number for number, path in enumerate(self.evidence.paths) if path in ("weight", "0")]
        changed = np.flatnonzero(stepping & self.is_given & ~self.has_role("state") & np.isin(self.path, paths))
        of_call = np.full(self.calls.count, -1)
        of_call[self.call[changed]] = changed
        made = np.flatnonzero(stepping & self.is_result)
        found[made] = of_call[self.call[made]]
        return found

    def _parameter_site(self, rows: Ints) -> Ints:
        """The site under which the gradients of some parameters stand."""
        if not len(rows):
            return rows
        numbers = {name: number for number, name in enumerate(self.calls.sites)}
        paths = self.evidence.paths
        key = self.site[rows].astype(np.int64) * len(paths) + self.path[rows]
        distinct, which = np.unique(key, return_inverse=True)
        places = (divmod(one, len(paths)) for one in distinct.tolist())
        names = [numbers.get(self.calls.parameter_name(site, paths[path]), -1) for site, path in places]
        of_module = np.array(names)[which.ravel()]
        of_module = np.where(self.has_role("input")[rows], self._sites_by_shape(rows), of_module)
        return np.where(self._is_call(self.calls.is_optimizer)[rows], self.site[rows], of_module)

    def _sites_by_shape(self, rows: Ints) -> Ints:
        """The parameter of a function's module that has the shape of an argument; −1 where none or several have."""
        shape = np.append(self.evidence.reference.columns["shape"], -1)[self.evidence.pairs.reference]
        gradients = np.flatnonzero(self.unit_of_gradients)
        owner = self._of_call(self.calls.owner)[gradients]
        known: dict[tuple[int, int], int] = {}
        for module, form, site in zip(
            owner.tolist(), shape[gradients].tolist(), self.site[gradients].tolist(), strict=True
        ):
            known[module, form] = site if known.get((module, form), site) == site else -1
        modules = self._of_call(self.calls.module)[rows].tolist()
        return np.array([known.get(key, -1) for key in zip(modules, shape[rows].tolist(), strict=True)], np.int64)

    @cached_property
    def unit_of_gradients(self) -> Bools:
        """Rows that are gradients of parameters."""
        return self.is_result & self._is_call(self.calls.is_parameter)

    def _gradient(self, sites: Ints, steps: Ints) -> Ints:
        """The last gradient of each of these parameters in a step; −1 where there is none."""
        rows = np.flatnonzero(self.known & self._has_role("gradient") & self._is_call(self.calls.is_parameter))
        if not len(rows) or not len(sites):
            return np.full(len(sites), -1)
        wide = int(self.calls.step.max()) + 1
        key = self.site[rows].astype(np.int64) * wide + self.step[rows]
        order = np.argsort(key, kind="stable")
        wanted = sites.astype(np.int64) * wide + steps
        place = np.maximum(np.searchsorted(key[order], wanted, side="right") - 1, 0)
        return np.where((sites >= 0) & (key[order][place] == wanted), rows[order][place], -1)

    # -- explanation -----------------------------------------------------------------------------------------------

    def largest(self, column: Floats) -> Floats:
        """For each row the largest number of a column among the rows that it came from; 0 where there are none."""
        calls, found = self.calls, np.zeros(len(self.call))
        if not column.any():
            return found
        given, made = self._given(column), self.by_call(column, self.is_result)
        inside = calls.spread(made)
        whole = np.maximum(given, inside)
        seen = np.maximum(whole, made)  # of a forward call, by its backward
        unit = self.unit
        at = np.flatnonzero(unit == Producer.CALL)
        call = self.call[at]
        found[at] = np.maximum(whole[call], _at(seen, calls.forward_of[call]))
        by_step = at[self.gradient_before[at] >= 0]
        found[by_step] = np.maximum(found[by_step], column[self.gradient_before[by_step]])
        lone = at[~self._is_explained[call] & (self.gradient_before[at] < 0)]
        code = np.concatenate([np.flatnonzero(unit == Producer.CODE), lone])
        if len(code):
            outer = calls.enclosing[self.call[code]]
            before = self._before(column)[code]
            forward = np.where(outer >= 0, _at(calls.forward_of, outer, -1), calls.forward_of[self.call[code]])
            found[code] = np.fmax.reduce([found[code], before, _at(given, outer), _at(seen, forward)])
            found[code] = np.maximum(found[code], _at(column, self.gradient_before[code]))
            handed = self.handed_from[code]
            found[code] = np.where(handed >= 0, _at(column, handed), found[code])
        gradient = np.flatnonzero(unit == Producer.GRADIENT)
        if len(gradient):
            found[gradient] = self._by_owner(seen)[gradient]
        at = np.flatnonzero((unit == Producer.WEIGHT) | (unit == Producer.BUFFER))
        found[at] = _at(column, self.last_seen[at])
        buffer = np.flatnonzero(unit == Producer.BUFFER)
        found[buffer] = np.maximum(found[buffer], _at(given, _at(self.call, self.last_seen[buffer], -1)))
        carried = np.flatnonzero(unit == Producer.CARRIED)
        found[carried] = column[self.carried_from[carried]]
        return found

    def smallest_given(self, column: Floats) -> Floats:
        """For each result the smallest number above zero among what its call was given; 0 where there is none."""
        rows = self.is_given & (column > 0)
        smallest = np.full(self.calls.count, np.inf)
        np.minimum.at(smallest, self.call[rows], column[rows])
        smallest[np.isinf(smallest)] = 0.0
        return np.where(self.is_result, _at(smallest, self.call), 0.0)

    @cached_property
    def _is_explained(self) -> Bools:
        """Calls whose inputs were recorded, or that have recorded calls inside. Weights alone explain no result."""
        some = self.by_call(np.ones(len(self.call)), self.has_role("input"))
        made = self.by_call(np.ones(len(self.call)), self.is_result)
        return np.asarray(np.maximum(some, self.calls.spread(made)) > 0)

    @cached_property
    def is_innermost(self) -> Bools:
        """Rows of calls that have no others of their plane inside."""
        outer = np.zeros(self.calls.count, np.bool_)
        outer[self.calls.enclosing[self.calls.enclosing >= 0]] = True
        return self._is_call(~outer)

    @cached_property
    def is_explained(self) -> Bools:
        """Rows that came from something that was recorded."""
        return np.asarray(self.largest(np.ones(len(self.call))) > 0)

    def _given(self, column: Floats) -> Floats:
        """The largest number of each call among what it was given, its module's weights of that step included."""
        rows = self.is_held
        held = np.zeros(int(self.calls.holder.max(initial=-1)) + 1)
        np.maximum.at(held, self.calls.holder[self.call[rows]], column[rows])
        return np.maximum(self.by_call(column, self.is_given), held[self.calls.holder])

    @cached_property
    def is_held(self) -> Bools:
        """What a module holds: its parameters and buffers."""
        return self.has_role("parameter") | self.has_role("state")

    def by_call(self, column: Floats, rows: Bools) -> Floats:
        """The largest number of each call among some rows."""
        found = np.zeros(self.calls.count)
        at = np.flatnonzero(rows & (column > 0))
        np.maximum.at(found, self.call[at], column[at])
        return found

    def _by_owner(self, seen: Floats) -> Floats:
        """For each gradient of a parameter the largest number of its module's calls in that step."""
        calls = self.calls
        found = np.zeros(len(self.call))
        at = np.flatnonzero(self.unit == Producer.GRADIENT)
        when, steps = self._of_call(calls.when), int(calls.when.max(initial=0)) + 1
        missing = np.ones(len(at), np.bool_)
        for plane in calls.planes_of_owners:  # the first that has the module explains all of its gradients
            users = np.flatnonzero(calls.plane == plane)
            largest = np.full((len(calls.modules) + 1) * steps, -1.0)
            np.maximum.at(largest, calls.module[users] * steps + calls.when[users], seen[users])
            owner = calls.owner[self.call[at]]
            level = np.where(owner >= 0, largest[owner * steps + when[at]], -1.0)
            found[at] = np.where(missing & (level >= 0), level, found[at])
            missing &= level < 0
            for rows, modules in self._tied:  # a weight with several users has a gradient of each
                users = np.array(sorted(modules)) * steps + when[rows[0]]
                found[rows] = np.maximum(found[rows], largest[users].max())
        if missing.any():  # a weight under a name that no module was called by: any of them may have used it
            anywhere = np.zeros(steps)
            users = np.flatnonzero(calls.plane == calls.planes_of_owners[0])
            np.maximum.at(anywhere, calls.when[users], seen[users])
            found[at[missing]] = np.maximum(found[at[missing]], anywhere[when[at[missing]]])
        return found

    @cached_property
    def _tied(self) -> list[tuple[Ints, set[int]]]:
        """Gradients of weights that several modules have, and those modules, for each weight and step."""
        weights = np.flatnonzero(self.has_role("parameter") & (self.plane == 0) & ~self.backward)
        gradients = np.flatnonzero(self.unit == Producer.GRADIENT)
        if not len(weights) or not len(gradients):
            return []
        tensor = self.evidence.reference.tensor[self.evidence.pairs.reference[weights]]
        memory = one_key([graph_of(self.run).value[tensor], self.step[weights]])
        module = self._of_call(self.calls.module)[weights]
        order = np.argsort(memory, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(memory[order])) + 1)
        found = []
        for group in groups:
            modules = set(module[group].tolist())
            if len(modules) > 1:
                names = set(self._parameter_site(weights[group]).tolist()) - {-1}
                here = np.isin(self.site[gradients], list(names)) & (
                    self.step[gradients] == self.step[weights[group[0]]]
                )
                if here.any():
                    found.append((gradients[here], modules))
        return found

    def arriving(self, column: Floats) -> Floats:
        """For each gradient of a parameter the largest number among the gradients that arrive at its module."""
        return self._by_owner(self.by_call(column, self.is_given & self.backward))

    def entering(self, column: Floats) -> Floats:
        """For each gradient of a parameter the largest number among the inputs of its module."""
        return self._by_owner(self.by_call(column, self.has_role("input") & ~self.backward))

    @cached_property
    def code_group(self) -> Ints:
        """The enclosing call; for outermost calls their plane, step and micro step."""
        calls = self.calls
        outer = self._of_call(calls.enclosing)
        top = one_key([self.step, self._of_call(calls.micro), self.plane])
        return np.where(outer >= 0, outer, calls.count + top)

    def _before(self, column: Floats) -> Floats:
        """For each row the largest number among the results of its group that came before it."""
        found = np.zeros(len(column))
        order, number, begins = self._in_groups
        if not len(order):
            return found
        numbers = np.where(self.is_result[order], column[order], 0.0)
        found[order] = running_maximum(numbers, number, begins)
        return found

    @cached_property
    def _in_groups(self) -> tuple[Ints, Ints, Bools]:
        """Rows in the order of their `code_group`s, of those with code in between: number and beginning of each."""
        at = np.flatnonzero(self.known & (self.call >= 0))
        wanted = (self.unit[at] == Producer.CODE) | (
            (self.unit[at] == Producer.CALL) & ~self._is_explained[self.call[at]]
        )
        group = self.code_group[at]
        largest = int(group.max(initial=0)) + 1
        has_code = np.zeros(largest, np.bool_)
        has_code[group[wanted]] = True
        at = at[has_code[group]]
        order = at[np.argsort(self.code_group[at], kind="stable")]
        group = self.code_group[order]
        begins = np.concatenate([[True], group[1:] != group[:-1]])[: len(order)]
        return order, np.cumsum(begins) - 1, begins

    def _results_before(self) -> Ints:
        """How many results of outermost calls of the same plane and step came before each row."""
        found = np.zeros(len(self.call), np.int64)
        at = np.flatnonzero(self.known & (self.call >= 0) & (self.enclosing < 0))
        if not len(at):
            return found
        group = one_key([self.step[at], self.plane[at]])
        order = np.argsort(group, kind="stable")
        made = self.is_result[at[order]].astype(np.int64)
        total = np.cumsum(made) - made
        begins = np.concatenate([[True], group[order][1:] != group[order][:-1]])
        found[at[order]] = total - total[begins][np.cumsum(begins) - 1]
        return found

    # -- families --------------------------------------------------------------------------------------------------

    @cached_property
    def families(self) -> tuple[Ints, Ints]:
        """Two numbers for each row: of its nearest siblings, at the same place of other layers, and of all its kind."""
        calls, of_module = self.calls, self._type_of_module
        near = one_key([self.kind, self.step])
        code = self.unit == Producer.CODE
        around = np.where(code, np.append(calls.type, -1)[self.enclosing], -1)
        named = np.where(code | (self.unit == Producer.GRADIENT), self._of_call(calls.last_name), -1)
        columns = [np.where(code, -1, of_module), around, named, self.role, self.path, self._of_call(calls.phase)]
        return near, one_key([*columns, self.plane, self.unit, self.step])

    @cached_property
    def kind(self) -> Ints:
        """A number for all rows at the same place of any layer, in whatever step."""
        calls = self.calls
        place = [self._of_call(column) for column in (calls.pattern, calls.type, calls.phase)]
        return one_key([*place, self.role, self.path, self._type_of_module, self.plane, self.unit])

    @cached_property
    def _type_of_module(self) -> Ints:
        calls = self.calls
        return np.where(self.unit == Producer.GRADIENT, self._of_call(calls.owner_type), self._of_call(calls.type))

    @cached_property
    def form(self) -> npt.NDArray[np.uint64]:
        """A number for each row's call: which tensors it has, and of which shapes."""
        shape = np.append(self.evidence.reference.columns["shape"], -1)[self.evidence.pairs.reference]
        found = np.zeros(self.calls.count + 1, np.uint64)
        np.add.at(found, self.call, np.where(self.known, mixed_key([self.role, self.path, shape]), np.uint64(0)))
        return found[self.call]

    @cached_property
    def place_in_any_step(self) -> Ints:
        """A number for each row's place, in whatever step."""
        place = [self._of_call(column) for column in (self.calls.site, self.calls.number, self.calls.phase)]
        return one_key([*place, self.role, self.path, self.plane])


def _at(column: npt.NDArray[Any], rows: Ints, nothing: float = 0.0) -> npt.NDArray[Any]:
    """The column at some rows, with nothing where the row is −1."""
    return np.append(column, np.array(nothing, column.dtype))[rows]
