"""The call to blame for a wrong row, and the tensor that entered it wrong.

Reads the judged pairs of one rank and the call tree of the reference, feeds `first` and `sentences`. In order of
observation a call's inputs come before its results, and the results of the calls inside it before its own. So the
earliest wrong row decides:

- It is a result: its call had right inputs, and is the culprit. The calls around it finish later and are not blamed.
- It is a parameter: the weights were different before anything was computed with them.
- It is the input of a call inside another: no recorded call produced it, so the code of the enclosing call did, unless
  that was given wrong inputs itself (in backward the same gradient reaches a call and the one around it at once).
- It is the input of an outermost call: the difference comes from outside.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from astray.comparison.blame.weights import STATE_ROLES, has_role, weight_of
from astray.comparison.divergence import Cause, TensorPlace
from astray.comparison.rows import Bools, Ints
from astray.comparison.verdict import Verdict
from astray.graph import graph_of
from astray.records import ROOT
from astray.stats import dtypes
from astray.store import RankRun, Table

RESULT_ROLES = ("output", "gradient")


class Culprit:
    """The call to blame, by its row in the reference's table of calls. Tensors are named by their row of the pairs.

    wrong: the rows that are wrong.
    start: the earliest of them, or another that nothing before it explains.
    cause: why it is wrong, as in `Divergence`.
    entry: the tensor that entered the call wrong; `start` where none did.
    shown: the tensor to show. shows_own: whether it is one of the call's.
    """

    def __init__(
        self, pairs: Table, rank: int, reference: RankRun, candidate: RankRun, wrong: Bools, start: int
    ) -> None:
        self.pairs, self.rank = pairs, rank
        self.reference, self.candidate = reference, candidate
        self.wrong, self.start = wrong, start
        self.matched: Bools = (pairs["row_reference"] >= 0) & (pairs["row_candidate"] >= 0)
        self.graph = graph_of(reference)
        self.call_of_row: Ints = pairs.numbers("call_reference")
        self.cause, self.call, self.entry = self._blame()
        self.shown = self._row_to_show()
        self.shows_own = int(self.call_of_row[self.shown]) == self.call

    def _blame(self) -> tuple[Cause, int, int]:
        """Why the earliest wrong tensor is wrong, the call to blame, and the tensor that entered it wrong."""
        call, entry = int(self.call_of_row[self.start]), self.start
        role = self.pairs["role"][self.start]
        if role in STATE_ROLES or self.is_weight(self.start):
            return "parameter", call, entry
        if role != "input":
            state = self._state_without_partner(call, int(self.pairs["call_candidate"][self.start]))
            if state is None:
                return "computation", self._stopped_gradient(call), entry
            return "parameter", call, state
        if self.pairs["phase"][self.start] == "update":
            return "input", call, entry
        producer = self._producer_without_partner()
        if producer is not None:
            return "computation", producer, entry
        while True:
            outer = self.graph.enclosing(call)
            if outer is None:
                return "input", call, entry
            inputs = np.flatnonzero(self.wrong & (self.call_of_row == outer) & self.has_role("input"))
            if not len(inputs):
                return "computation", self._stopped_gradient(outer), entry
            call, entry = outer, int(inputs[0])

    def _producer_without_partner(self) -> int | None:
        """The call that made a wrong input in the reference, where the candidate has no such call."""
        producer = self.producer_in("reference", self.reference, Verdict.ONLY_IN_REFERENCE)
        if producer < 0:
            return None
        call = int(self.reference.call_rows[producer])
        of_call = self.call_of_row == call
        return None if call < 0 or np.any(of_call & self.matched) or not of_call.any() else call

    def _stopped_gradient(self, call: int) -> int:
        """A call directly inside that receives a gradient and passes it on in the reference alone; else the call."""
        if self.pairs["phase"][self.start] != "backward":
            return call
        verdict = self.pairs.coded("verdict").codes[: self.start]
        phase = self.pairs.coded("phase").codes
        unmatched = (verdict == Verdict.ONLY_IN_REFERENCE) & self.has_role("output")[: self.start]
        unmatched &= phase[: self.start] == phase[self.start]
        for row in np.flatnonzero(unmatched)[::-1].tolist():
            inner = int(self.call_of_row[row])
            if self.graph.enclosing(inner) == call and not self._is_unreached(inner) and self._passes_on_less(inner):
                return inner
        return call

    def _passes_on_less(self, call: int) -> bool:
        """Whether the candidate's call passes on fewer gradients; one may have another name, as its argument has."""
        verdict, call_candidate = self.pairs.coded("verdict").codes, self.pairs.numbers("call_candidate")
        matched = np.flatnonzero((self.call_of_row == call) & self.matched)
        partner = int(call_candidate[matched[0]]) if len(matched) else -1
        outputs = self.has_role("output")
        missing = outputs & (verdict == Verdict.ONLY_IN_REFERENCE) & (self.call_of_row == call)
        added = outputs & (verdict == Verdict.ONLY_IN_CANDIDATE) & (call_candidate == partner) & (call_candidate >= 0)
        return int(np.sum(missing)) > int(np.sum(added))

    def _is_unreached(self, call: int) -> bool:
        """Whether no gradient arrives at a backward call in one of the runs: it stopped before."""
        inputs = (self.call_of_row == call) & self.has_role("input")
        return bool(inputs.any()) and not np.any(inputs & self.matched)

    def _state_without_partner(self, call: int, call_candidate: int) -> int | None:
        """A parameter, buffer or state of a call that only one of the runs has."""
        verdict = self.pairs.coded("verdict").codes
        unmatched = (verdict == Verdict.ONLY_IN_REFERENCE) & (self.call_of_row == call)
        unmatched |= (verdict == Verdict.ONLY_IN_CANDIDATE) & (self.pairs.numbers("call_candidate") == call_candidate)
        rows = np.flatnonzero(unmatched & self.has_role(*STATE_ROLES)).tolist()
        return next((row for row in rows if self._is_missing(row)), None)

    def _is_missing(self, row: int) -> bool:
        """Whether the run without this tensor has others in its role: some tools record no parameters or buffers."""
        side = "row_candidate" if self.pairs["row_candidate"][row] < 0 else "row_reference"
        return bool(np.any((self.pairs[side] >= 0) & self.has_role(self.pairs["role"][row])))

    def _row_to_show(self) -> int:
        """The tensor to show: the culprit's first wrong result, or what entered it wrong where it has none."""
        if self.cause == "input":
            return self.entry
        results = np.flatnonzero(self.wrong & (self.call_of_row == self.call) & self.has_role(*RESULT_ROLES))
        return int(results[0]) if len(results) else self.entry

    # -- what is known of it ------------------------------------------------------------------------------------------

    def place(self) -> TensorPlace:
        """The tensor to show, at the call to blame."""
        place = self.place_of(self.shown)
        if self.shows_own:
            return place
        call = self.reference.calls.row(self.call)
        names = ("step", "micro", "site", "call", "phase", "recompute")
        of_call = {name: call[name] for name in names}
        return replace(place, **of_call, type=call["type"] or "", role="", path="", weight=False)

    def place_of(self, row: int) -> TensorPlace:
        """The place of a row. What is a parameter is called so, whatever its role."""
        return replace(TensorPlace.of(self.pairs, row), weight=self.is_weight(row))

    def places(self, call: int, *roles: str) -> list[TensorPlace]:
        """The tensors of a call in some roles; a weight that a function takes as an input is a parameter."""
        rows = np.flatnonzero((self.call_of_row == call) & self.has_role("input", *roles))
        places = [self.place_of(row) for row in rows.tolist()]
        return [place for place in places if ("parameter" if place.weight else place.role) in roles]

    def is_weight(self, row: int) -> bool:
        """Whether a row is a parameter that a function takes as an input."""
        return self._weight_of(row) is not None

    def _weight_of(self, row: int) -> str | None:
        """The parameter that a function takes in this row, empty where it is not known which."""
        at = int(self.pairs["row_reference"][row])
        return weight_of(self.reference, at) if at >= 0 and self.pairs["role"][row] == "input" else None

    def is_integer(self, row: int) -> bool:
        """Whether a row holds whole numbers."""
        at = int(self.pairs["row_reference"][row])
        dtype = dtypes.DTYPES.get(self.reference.tensors["dtype"][at]) if at >= 0 else None
        return dtype is not None and dtype.kind == "int"

    def parameter_name(self) -> str:
        """The parameter that entered the culprit wrong."""
        entry = TensorPlace.of(self.pairs, self.entry)
        name = entry.path if entry.site == ROOT else f"{entry.site}.{entry.path}"
        return self._weight_of(self.entry) or name

    def name_of(self, call: int) -> tuple[str, str]:
        """The site and the class of a call."""
        return self.reference.calls["site"][call], self.reference.calls["type"][call] or ""

    def producer_in(self, side: str, run: RankRun, only: Verdict) -> int:
        """The row of the run's result that is the wrong value; −1 for none, or if all its tensors have partners."""
        row = int(self.pairs[f"row_{side}"][self.start])
        if row < 0 or not np.any(self.pairs.coded("verdict").codes[: self.start] == only):
            return -1
        return int(graph_of(run).producer[row])

    def has_role(self, *roles: str) -> Bools:
        """Rows in one of these roles."""
        return has_role(self.pairs, *roles)
