"""How each row of the reference came about (its `Provenance`), and the earlier rows that this links it to.

Reads the pairs and the calls of the reference; `sources` builds on it. A row is one pair of tensors, named by its
number; −1 stands for none. The kinds of provenance:

- `SEEN_BEFORE`: an earlier row of the step holds the same value in both runs. It is as right or wrong as that row.
- `CALL`: the result of a recorded call.
- `CODE`: an input that no recorded call made, so the code of the enclosing call did.
- `GRADIENT`: of a parameter.
- `WEIGHT`, `BUFFER`: a parameter or buffer that an earlier step may have changed; it has a previous sighting.
- `START`: nothing recorded led to it: weights and buffers of the first step, and the program's inputs.

A row is compared only with rows of its own *plane* (modules, functions, ops; see `calls`), so that recording functions
beside modules does not change what is said of modules.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from astray.comparison.judge.calls import CallColumns, read_calls
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Ints
from astray.graph import graph_of
from astray.graph.keys import mixed_key, one_key

OPERAND_ROLES = ("input", "parameter", "state")
"""The roles of what a call takes; `state` is a buffer."""

RESULT_ROLES = ("output", "gradient")


class Provenance(IntEnum):
    """How a row came about."""

    NONE = 0
    SEEN_BEFORE = 1
    CALL = 2
    CODE = 3
    GRADIENT = 4
    WEIGHT = 5
    BUFFER = 6
    START = 7


class RowProvenance:
    """Columns over the pairs of one rank, or of some of its steps: call, role, plane, kind, links to earlier rows."""

    def __init__(self, evidence: Evidence, comparable: Bools, calls: CallColumns | None = None) -> None:
        """comparable: pairs whose shapes and dtypes agree. calls: those of the pairs; None reads all of the rank."""
        assert evidence.reference.run is not None, "pairs have both sides"
        self.evidence, self.run = evidence, evidence.reference.run
        self.calls = calls or read_calls(self.run)
        rows = evidence.pairs.reference
        self.comparable: Bools = comparable & evidence.pairs.matched
        index = np.full(len(self.run.calls) + 1, -1)  # of each row of the run's table of calls, in `calls`
        index[self.calls.rows] = np.arange(self.calls.count)
        self.call: Ints = np.where(self.comparable, index[np.append(evidence.reference.call_row, -1)[rows]], -1)
        self.role = self._tensor_column("role", rows)
        self.path = self._tensor_column("path", rows)
        self.is_operand = self.comparable & self._has_role(*OPERAND_ROLES)
        self.is_result = self.comparable & self._has_role(*RESULT_ROLES)
        self.step = self._call_column(self.calls.step)
        self.plane = self._call_column(self.calls.plane)
        self.backward = self._call_flag(self.calls.backward)
        self.site = self._call_column(self.calls.site)
        self.enclosing = self._call_column(self.calls.enclosing)
        self.in_update = self._call_flag(self.calls.update)
        self.of_optimizer = self._call_flag(self.calls.is_optimizer)
        paths = evidence.paths
        self.is_update = self.of_optimizer & (self.path == (paths.index("update") if "update" in paths else -2))

    def _tensor_column(self, name: str, rows: Ints) -> Ints:
        """A column of the reference's tensors at each pair; `rows` are those of the pairs."""
        return np.append(self.evidence.reference.columns[name], -1)[rows]

    def _call_column(self, column: Ints) -> Ints:
        """A column of `calls` at each pair's call."""
        return np.append(column, np.array(-1, column.dtype))[self.call]

    def _call_flag(self, column: Bools) -> Bools:
        """The same for a column of flags."""
        return np.append(column, False)[self.call]

    def _has_role(self, *roles: str) -> Bools:
        words = self.evidence.roles
        return np.array([*(word in roles for word in words), False])[self.role]

    def has_role(self, role: str) -> Bools:
        """Comparable rows in a role."""
        return self.comparable & self._has_role(role)

    def has_provenance(self, *kinds: Provenance) -> Bools:
        """Rows of one of these kinds."""
        return np.array([kind in kinds for kind in Provenance])[self.provenance]

    @cached_property
    def is_vector(self) -> Bools:
        """Comparable rows of tensors of one dimension."""
        shape = self.run.tensors.coded("shape")
        one_dimensional = np.array([*(len(sizes) == 1 for sizes in shape.values), False])[shape.codes]
        is_vector = np.append(one_dimensional[self.evidence.reference.tensor], False)[self.evidence.pairs.reference]
        return np.asarray(is_vector & self.comparable)

    # -- kinds -----------------------------------------------------------------------------------------------------

    @cached_property
    def provenance(self) -> Ints:
        """How each row came about."""
        kind = np.full(len(self.call), Provenance.NONE, np.int8)
        kind[self.is_result] = Provenance.CALL
        kind[self.is_parameter_gradient] = Provenance.GRADIENT
        inputs, buffers = self.has_role("input"), self.has_role("state")
        kind[inputs] = Provenance.CODE
        kind[inputs & self._is_program_input] = Provenance.START
        kind[self.is_weight | buffers] = Provenance.START
        has_history = (self.last_seen >= 0) | self._starts_late
        kind[self.is_weight & has_history] = Provenance.WEIGHT
        kind[buffers & has_history] = Provenance.BUFFER
        kind[inputs & self.of_optimizer] = Provenance.CODE
        kind[self.first_seen >= 0] = Provenance.SEEN_BEFORE
        return kind

    @property
    def is_label(self) -> Bools:
        """Inputs of losses that no recorded call made."""
        return np.asarray((self.provenance == Provenance.CODE) & self._call_flag(self.calls.is_loss))

    @cached_property
    def is_weight(self) -> Bools:
        """Parameters of modules; arguments of functions that require a gradient and only an optimizer has written."""
        arguments = self.has_role("input") & ~self.backward & ((self.plane == 1) | (self.plane == 2))
        is_weight = self.has_role("parameter")
        at = np.flatnonzero(arguments)
        if len(at):
            tensor = self.evidence.reference.tensor[self.evidence.pairs.reference[at]]
            requires = self.run.tensors.numbers("requires_grad")[tensor] > 0
            maker = graph_of(self.run).maker[tensor]
            phase = self.run.calls.coded("phase")
            updating = np.append(phase.codes == phase.code("update"), True)
            by_optimizer = updating[np.where(maker >= 0, self.run.call_rows[maker], -1)]
            is_weight[at] = requires & by_optimizer
        return is_weight

    @property
    def _starts_late(self) -> bool:
        """Whether the first compared step is not 0, so that steps which are not compared have changed the weights."""
        return self.evidence.first_step > 0

    @cached_property
    def _is_program_input(self) -> Bools:
        """Inputs of outermost forward calls before which the step has no result."""
        outermost = self.comparable & ~self.backward & (self.enclosing < 0)
        outermost &= self._call_flag(self.calls.forward)
        return np.asarray(outermost & (self._results_before() == 0))

    def _results_before(self) -> Ints:
        """How many results of outermost calls of the same plane and step came before each row."""
        count = np.zeros(len(self.call), np.int64)
        at = np.flatnonzero(self.comparable & (self.call >= 0) & (self.enclosing < 0))
        if not len(at):
            return count
        group = one_key([self.step[at], self.plane[at]])
        order = np.argsort(group, kind="stable")
        made = self.is_result[at[order]].astype(np.int64)
        total = np.cumsum(made) - made
        begins = np.concatenate([[True], group[order][1:] != group[order][:-1]])
        count[at[order]] = total - total[begins][np.cumsum(begins) - 1]
        return count

    @cached_property
    def first_seen(self) -> Ints:
        """The first row of the same plane and step that holds the same value in both runs; −1 for that row itself."""
        found = np.full(len(self.call), -1)
        values, distinctive = self._same_value
        at = np.flatnonzero(distinctive & (self.plane >= 0))
        if not len(at):
            return found
        key = mixed_key([values[at], self.step[at], self.plane[at]])
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        source = self._outermost(at, number, at[first])[number]
        later = source != at
        found[at[later]] = source[later]
        # Equal bits alone do not make a result a repetition: only a call that returns what was given to it, or made
        # inside of it, repeats a value.
        found[self.is_result & (found >= 0) & ~self._is_passed_on(found)] = -1
        weights = self.is_weight | self.has_role("state")
        found[weights & (found >= 0) & ~weights[found]] = -1
        return found

    @cached_property
    def first_seen_in_any_plane(self) -> Ints:
        """The same among the rows of all planes."""
        found = np.full(len(self.call), -1)
        values, distinctive = self._same_value
        at = np.flatnonzero(distinctive)
        if len(at):
            key = mixed_key([values[at], self.step[at]])
            _, first, number = np.unique(key, return_index=True, return_inverse=True)
            source = at[first][number]
            found[at[source != at]] = source[source != at]
        return found

    @cached_property
    def reused_from(self) -> Ints:
        """For forward inputs whose value the reference has shown before, whatever the candidate has: that row."""
        found = np.full(len(self.call), -1)
        evidence = self.evidence
        at = np.flatnonzero(self.comparable & (self.plane >= 0))
        held = graph_of(self.run).contents
        tensor = evidence.reference.tensor[evidence.pairs.reference[at]]
        at, tensor = at[held.distinctive[tensor]], tensor[held.distinctive[tensor]]
        if not len(at):
            return found
        key = mixed_key([held.code[tensor], self.step[at], self.plane[at]])
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        source = at[first][number]
        new = (source < at) & self.has_role("input")[at] & ~self.backward[at]
        found[at[new]] = source[new]
        return found

    def _outermost(self, at: Ints, number: Ints, first: Ints) -> Ints:
        """The first row of each value; for an arriving gradient the row of the outermost call that it arrives at.

        A gradient may reach a call and those around it at once, in any order.
        """
        arrives = self.backward & self.has_role("input")
        values = np.flatnonzero(arrives[first])
        places = np.flatnonzero(arrives[at] & np.isin(number, values))
        if not len(places):
            return first
        depth = self.calls.depth[self.call[at[places]]]
        order = np.lexsort((at[places], depth, number[places]))
        distinct, begin = np.unique(number[places][order], return_index=True)
        outermost = first.copy()
        outermost[distinct] = at[places][order][begin]
        return outermost

    def _is_passed_on(self, source: Ints) -> Bools:
        """Whether a row's value, first shown by the row `source`, was given to the row's call or made inside of it."""
        call, source_call = self.call, np.where(source >= 0, self.call[source], -1)
        return np.asarray((call == source_call) | self.calls.is_inside(source_call, call))

    @cached_property
    def _same_value(self) -> tuple[npt.NDArray[np.uint64], Bools]:
        """A number for each pair of values, equal where both runs repeat theirs; and where the bits are known."""
        evidence, at = self.evidence, np.flatnonzero(self.comparable)
        found, known = np.zeros(len(self.call), np.uint64), np.zeros(len(self.call), np.bool_)
        if not len(at) or not evidence.same_fingerprint_kind:
            return found, known
        codes, distinctive = [], np.ones(len(at), np.bool_)
        for rows, side in (
            (evidence.reference, evidence.pairs.reference),
            (evidence.candidate, evidence.pairs.candidate),
        ):
            assert rows.run is not None, "pairs have both sides"
            held, tensor = graph_of(rows.run).contents, rows.tensor[side[at]]
            codes.append(held.code[tensor])
            distinctive &= held.distinctive[tensor]
        found[at], known[at] = mixed_key(codes), distinctive
        return found, known

    # -- history ---------------------------------------------------------------------------------------------------

    @cached_property
    def last_seen(self) -> Ints:
        """For parameters and buffers the first row in their last step before; later in a step, the first of that step.

        −1 where there is none.
        """
        found = np.full(len(self.call), -1)
        at = np.flatnonzero(self.is_weight | self.has_role("state"))
        if not len(at):
            return found
        # Each call of a function may be given another weight.
        number = np.where(self.has_role("input"), self._call_column(self.calls.call_number), 0)
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
    def applied_gradient(self) -> Ints:
        """For weights the gradient applied since `last_seen`, for optimizer rows the one of their step; −1 for none."""
        found = np.full(len(self.call), -1)
        weights = np.flatnonzero(self.is_weight & (self.last_seen >= 0))
        stepping = np.flatnonzero((self.has_role("input") | self.is_result) & self.of_optimizer)
        found[weights] = self._gradient(self._parameter_site(weights), self.step[self.last_seen[weights]])
        found[stepping] = self._gradient(self.site[stepping], self.step[stepping])
        return found

    @cached_property
    def stepped_weight(self) -> Ints:
        """For results of an optimizer's step the row of the weight, or of the first argument, that it changes."""
        found = np.full(len(self.call), -1)
        if not self.in_update.any():
            return found
        paths = [number for number, path in enumerate(self.evidence.paths) if path in ("weight", "0")]
        changed = np.flatnonzero(self.in_update & self.is_operand & ~self.has_role("state") & np.isin(self.path, paths))
        of_call = np.full(self.calls.count, -1)
        of_call[self.call[changed]] = changed
        results = np.flatnonzero(self.in_update & self.is_result)
        found[results] = of_call[self.call[results]]
        return found

    def _parameter_site(self, rows: Ints) -> Ints:
        """The site at which the gradients of some parameters are recorded."""
        if not len(rows):
            return rows
        numbers = {name: number for number, name in enumerate(self.calls.sites)}
        paths = self.evidence.paths
        key = self.site[rows].astype(np.int64) * len(paths) + self.path[rows]
        distinct, inverse = np.unique(key, return_inverse=True)
        codes = (divmod(one, len(paths)) for one in distinct.tolist())
        names = [numbers.get(self.calls.parameter_name(site, paths[path]), -1) for site, path in codes]
        of_module = np.array(names)[inverse.ravel()]
        of_module = np.where(self.has_role("input")[rows], self._sites_by_shape(rows), of_module)
        return np.where(self.of_optimizer[rows], self.site[rows], of_module)

    def _sites_by_shape(self, rows: Ints) -> Ints:
        """The parameter of a function's module that has the shape of an argument; −1 where none or several have."""
        shape = np.append(self.evidence.reference.columns["shape"], -1)[self.evidence.pairs.reference]
        gradients = np.flatnonzero(self.is_parameter_gradient)
        owner = self._call_column(self.calls.owner)[gradients]
        known: dict[tuple[int, int], int] = {}
        for module, size, site in zip(
            owner.tolist(), shape[gradients].tolist(), self.site[gradients].tolist(), strict=True
        ):
            known[module, size] = site if known.get((module, size), site) == site else -1
        modules = self._call_column(self.calls.module)[rows].tolist()
        return np.array([known.get(key, -1) for key in zip(modules, shape[rows].tolist(), strict=True)], np.int64)

    @cached_property
    def is_parameter_gradient(self) -> Bools:
        """Rows that are gradients of parameters."""
        return self.is_result & self._call_flag(self.calls.is_parameter)

    def _gradient(self, sites: Ints, steps: Ints) -> Ints:
        """The last gradient of each of these parameters in a step; −1 where there is none."""
        rows = np.flatnonzero(self.has_role("gradient") & self._call_flag(self.calls.is_parameter))
        if not len(rows) or not len(sites):
            return np.full(len(sites), -1)
        steps_in_all = int(self.calls.step.max()) + 1
        key = self.site[rows].astype(np.int64) * steps_in_all + self.step[rows]
        order = np.argsort(key, kind="stable")
        wanted = sites.astype(np.int64) * steps_in_all + steps
        place = np.maximum(np.searchsorted(key[order], wanted, side="right") - 1, 0)
        return np.where((sites >= 0) & (key[order][place] == wanted), rows[order][place], -1)
