"""Finds the first divergence: the first call whose result is wrong while its inputs were still right.

Reads the judged pairs of one rank in order of observation. In that order a call's inputs come before its results, and
the results of the calls inside it before its own, so the earliest wrong tensor decides:

- It is a result: its call had right inputs, and is the culprit. The calls around it finish later and are not blamed.
- It is a parameter: the weights were different before anything was computed with them.
- It is the input of a call inside another: no observed call produced it, so the code of the enclosing call did, unless
  that was given wrong inputs itself (in backward the same gradient reaches a call and the one around it at once).
- It is the input of an outermost call: the difference comes from outside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from astray.comparison.blame import clues, weights
from astray.comparison.blame import clues as micro_clues
from astray.comparison.blame.detours import healed
from astray.comparison.blame.explanation import furthest_slice
from astray.comparison.blame.setup_causes import effects, explaining
from astray.comparison.blame.weights import GIVEN, OtherWeights, has_role
from astray.comparison.divergence import Cause, Divergence, Side, TensorPlace
from astray.comparison.judge.calls import is_loss
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.pair.joined_rank import JoinedRank
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import AGREEING, BAD, SENTENCES, Reason, Verdict
from astray.graph import graph_of
from astray.records import ROOT, Frame, Statistics
from astray.stats import dtypes
from astray.store import RankRun, Table

RESULTS = ("output", "gradient")
ODD = 5
OUTSTANDING = 10
"""Of weights that differ at once, one that is so many times further off than its siblings of other layers is taken for
the cause; where it has no two siblings, than all of them are on average."""

MOST_ORIGINS = 20
"""So many further divergences of a rank are reported."""

SAME_TENSOR = ("micro", "site", "call", "phase", "recompute", "role", "path")


def find_divergences(
    pairs: Table, rank: int, reference: RankRun, candidate: RankRun, setup: Sequence[SetupDifference] = ()
) -> list[Divergence]:
    """The first divergence of one rank, and after it those that are not its victims; none when no pair is wrong.

    `pairs` and `setup`, what was set differently, are those of this rank alone.
    """
    bad = np.isin(pairs.coded("verdict").codes, BAD)
    origin = bad & pairs.numbers("origin") & ~healed(pairs, bad, reference)
    lone = _results_without_parameter(pairs, reference, candidate)
    bad[lone] = origin[lone] = True
    searches = []
    if origin.any():
        rows = [_start(pairs, origin), *np.flatnonzero(origin).tolist()]
        searches = [_FirstSearch(pairs, rank, reference, candidate, bad, row, setup) for row in _apart(pairs, rows)]
    for row, setting in effects(pairs, setup):
        if not any(setting in one.settings for one in searches):
            shown = bad.copy()
            shown[row] = True
            searches.append(_FirstSearch(pairs, rank, reference, candidate, shown, row, setup, (setting,)))
            searches.sort(key=lambda one: one.start)  # a setting is the first divergence where it is the earliest
    return [search.found() for search in searches]


def _apart(pairs: Table, rows: Sequence[int]) -> list[int]:
    """Rows that are not about the same place: what was wrong in one step is so in the next, there or around it.

    What the outermost module is given came from outside, and is about nothing that is inside.
    """
    found: list[int] = []
    places: list[TensorPlace] = []
    for row in rows:
        place = TensorPlace.of(pairs, row)
        told = [one for one in places if one.role != "input" or one.site != ROOT or place.site == ROOT]
        if not any(place.phase == one.phase and related(place.site, one.site) for one in told):
            found.append(row)
            places.append(place)
        if len(found) > MOST_ORIGINS:
            break
    return found


def _results_without_parameter(pairs: Table, reference: RankRun, candidate: RankRun) -> Ints:
    """The first results of calls that both runs have, and one of them without a parameter that is not all zeros."""
    verdict, role = pairs.coded("verdict").codes, pairs.coded("role")
    matched = (pairs.numbers("row_reference") >= 0) & (pairs.numbers("row_candidate") >= 0)
    found: list[int] = []
    for side, other, run, only in (
        ("reference", "candidate", reference, Verdict.ONLY_IN_REFERENCE),
        ("candidate", "reference", candidate, Verdict.ONLY_IN_CANDIDATE),
    ):
        lone = np.flatnonzero((verdict == only) & (role.codes == role.code("parameter")))
        told = np.any((pairs.numbers(f"row_{other}") >= 0) & has_role(pairs, "parameter"))  # some tools record none
        lone = lone[told & (run.tensors.numbers("absmax")[pairs.numbers(f"row_{side}")[lone]] > 0)]
        if len(lone):  # a compiled module has the parameters of those inside it, under longer paths
            elsewhere = _parameters(pairs, pairs.numbers(f"row_{other}") >= 0)
            lone = lone[[_full_name(pairs, row) not in elsewhere for row in lone.tolist()]]
        call = pairs.numbers(f"call_{side}")
        results = np.flatnonzero(matched & has_role(pairs, *RESULTS) & np.isin(call, call[lone]))
        _, first = np.unique(call[results], return_index=True)
        found += results[first].tolist()
    return np.array(sorted(found), np.int64)


def _parameters(pairs: Table, rows: Bools) -> set[str]:
    """The full names of the parameters among some rows."""
    return {_full_name(pairs, row) for row in np.flatnonzero(rows & has_role(pairs, "parameter")).tolist()}


def _full_name(pairs: Table, row: int) -> str:
    site, path = str(pairs["site"][row]), str(pairs["path"][row])
    return path if site == ROOT else f"{site}.{path}"


def _start(pairs: Table, origin: Bools) -> int:
    """The earliest wrong row; or the one that stands out among those that were wrong at the same time.

    The weights that a step starts with, and the gradients that its optimizer is given, all are what they are before
    the first of them is looked at. A gradient that is too large makes clipping scale all others down a little.
    """
    first = int(np.argmax(origin))
    role, phase = pairs.coded("role"), pairs.coded("phase")
    of_update = phase.codes[first] == phase.code("update") and role.codes[first] == role.code("input")
    if not of_update and role.codes[first] != role.code("parameter"):
        return first
    together = np.ones(len(origin), np.bool_)
    places = [pairs.numbers("step"), pairs.numbers("micro"), phase.codes, role.codes]
    for codes in (*places, *([pairs.coded("path").codes] if of_update else [])):
        together &= codes == codes[first]
    rows = np.flatnonzero(together & (pairs.numbers("row_reference") >= 0) & (pairs.numbers("row_candidate") >= 0))
    score = np.where(origin[rows], _oddness(pairs, rows), 0.0)
    return int(rows[np.argmax(score)]) if score.max(initial=0.0) >= 1 else first


def _oddness(pairs: Table, rows: Ints) -> Floats:
    """How far some weights stand out among their siblings: above 1 they do."""
    verdict, site, path = pairs.coded("verdict").codes[rows], pairs.coded("site"), pairs.coded("path").codes[rows]
    error = np.where(verdict == Verdict.NON_FINITE, np.inf, np.nan_to_num(pairs.numbers("error")[rows]))
    kinds: dict[tuple[str, int], list[int]] = {}
    for place, (code, name) in enumerate(zip(site.codes[rows].tolist(), path.tolist(), strict=True)):
        kinds.setdefault((re.sub(r"\d+", "#", str(site.values[code])), name), []).append(place)
    score: Floats = np.where(error > 0, np.inf, 0.0)
    with np.errstate(over="ignore"):  # then it stands out without end, or not at all
        usual = OUTSTANDING * np.full(len(rows), np.median(error))
        for places in kinds.values():
            for place in places if len(places) > 2 else ():
                usual[place] = ODD * np.median([error[other] for other in places if other != place])
        np.divide(error, usual, out=score, where=(usual > 0) & np.isfinite(usual))
    return score


def related(site: str, other: str) -> bool:
    """Whether two sites are the same, or one lies in the other.

    >>> related("h.2", "h.2.mlp/gelu"), related("<root>", "h.2"), related("h.2", "h.20"), related("/sum", "/mean")
    (True, True, False, False)
    """
    if ROOT in (site, other):
        return True
    inner, outer = (site, other) if len(site) > len(other) else (other, site)
    return inner.startswith(outer) and (len(inner) == len(outer) or inner[len(outer)] in "./")


class _FirstSearch:
    """The state of one search: where wrongness starts, which call is to blame, and what is known about it."""

    def __init__(
        self,
        pairs: Table,
        rank: int,
        reference: RankRun,
        candidate: RankRun,
        bad: Bools,
        start: int,
        setup: Sequence[SetupDifference] = (),
        settings: tuple[SetupDifference, ...] = (),
    ) -> None:
        self.pairs = pairs
        self.rank = rank
        self.reference = reference
        self.candidate = candidate
        self.bad = bad
        self.matched: Bools = (pairs["row_reference"] >= 0) & (pairs["row_candidate"] >= 0)
        self.nesting = graph_of(reference)
        self.calls: Ints = pairs.numbers("call_reference")
        self.start = start  # the earliest wrong tensor, or another that nothing before it explains
        self.cause, self.culprit, self.entry = self._blame()
        self.headline = self._headline()
        self.own = int(self.calls[self.headline]) == self.culprit  # whether the tensor shown is one of the culprit
        self.settings = settings or self._settings(setup)

    def _settings(self, setup: Sequence[SetupDifference]) -> tuple[SetupDifference, ...]:
        """What was set differently and explains it."""
        place = self.place()
        name = self._parameter_name() if self.cause == "parameter" else None
        if place.phase == "update":
            name = None if "/" in place.site else place.site  # a function of the optimizer steps with all its numbers
        return explaining(setup, site=place.site, phase=place.phase, step=place.step, parameter=name)

    def found(self) -> Divergence:
        """With what is known."""
        entry = self._place(self.entry)
        parameter = entry if self.cause == "parameter" else None
        others = self._others() if parameter and self.matched[self.entry] else OtherWeights(0, 0)
        onset = self.onset()
        return Divergence(
            rank=self.rank,
            place=self.place(),
            cause=self.cause,
            limit=float(self.pairs["limit"][self.start]),
            surprise=float(self.pairs["surprise"][self.start]),
            measure=self.pairs["measure"][self.start] or "",
            deviation=float(self.pairs["deviation"][self.start]),
            given=float(self.pairs["given"][self.start]),
            rule=self.pairs["rule"][self.start] or "",
            siblings=int(self.pairs["siblings"][self.start]),
            furthest=furthest_slice(self.pairs, self.start),
            settings=self.settings,
            clean=self._is_clean(),
            magnitude=self._magnitude(),
            measured_by=self.pairs["source"][self.headline] or "none",
            metrics=self._metrics(),
            reference=side_of(self.reference, int(self.pairs["row_reference"][self.headline])),
            candidate=side_of(self.candidate, int(self.pairs["row_candidate"][self.headline])),
            stack=tuple(self._stack()),
            enclosing=tuple(self._name(row) for row in self.nesting.around(self.culprit)),
            seen=entry if parameter is None and (self.entry != self.headline or not self.own) else None,
            parameter=parameter,
            other_parameters=others.parameters,
            other_buffers=others.buffers,
            previous=self._previous(),
            onset=None if onset is None else onset.place,
            evidence=tuple(self._evidence(entry, others, onset)),
            victims=int(self.bad.sum() - self.bad[self.calls == self.culprit].sum()) - (not self.own),
            growth=self._growth(),
            order=(entry.step, int(np.sum(self.pairs["step"][: self.start] == entry.step))),
        )

    def _blame(self) -> tuple[Cause, int, int]:
        """Why the earliest wrong tensor is wrong, the call to blame, and the tensor that entered it wrong."""
        call, entry = int(self.calls[self.start]), self.start
        role = self.pairs["role"][self.start]
        if role in GIVEN or self._is_weight(self.start):
            return "parameter", call, entry
        if role != "input":
            lone = self._lone_given(call, int(self.pairs["call_candidate"][self.start]))
            if lone is None:
                return "computation", self._stopped_gradient(call), entry
            return "parameter", call, lone
        if self.pairs["phase"][self.start] == "update":
            return "input", call, entry
        producer = self._lone_producer()
        if producer is not None:
            return "computation", producer, entry
        while True:
            outer = self.nesting.enclosing(call)
            if outer is None:
                return "input", call, entry
            given = np.flatnonzero(self.bad & (self.calls == outer) & self._has_role("input"))
            if not len(given):
                return "computation", self._stopped_gradient(outer), entry
            call, entry = outer, int(given[0])

    def _lone_producer(self) -> int | None:
        """The call that made a wrong input in the reference, where the candidate has no such call."""
        maker = self._maker("reference", self.reference, Verdict.ONLY_IN_REFERENCE)
        if maker < 0:
            return None
        call = int(self.reference.call_rows[maker])
        others = self.calls == call
        return None if call < 0 or np.any(others & self.matched) or not others.any() else call

    def _stopped_gradient(self, call: int) -> int:
        """A call directly inside that got a gradient and sent one on in one run only; else the call itself."""
        if self.pairs["phase"][self.start] != "backward":
            return call
        verdict = self.pairs.coded("verdict").codes[: self.start]
        lone = (verdict == Verdict.ONLY_IN_REFERENCE) & self._has_role("output")[: self.start]
        lone &= self.pairs.coded("phase").codes[: self.start] == self.pairs.coded("phase").codes[self.start]
        for row in np.flatnonzero(lone)[::-1].tolist():
            inner = int(self.calls[row])
            if self.nesting.enclosing(inner) == call and not self._is_unreached(inner) and self._sends_less(inner):
                return inner
        return call

    def _sends_less(self, call: int) -> bool:
        """Whether the candidate's call sends fewer gradients on; one may have another name, as its argument has."""
        verdict, other = self.pairs.coded("verdict").codes, self.pairs.numbers("call_candidate")
        matched = np.flatnonzero((self.calls == call) & self.matched)
        there = other == (int(other[matched[0]]) if len(matched) else -1)
        lost = (verdict == Verdict.ONLY_IN_REFERENCE) & (self.calls == call)
        won = (verdict == Verdict.ONLY_IN_CANDIDATE) & there & (other >= 0)
        sent = self._has_role("output")
        return int(np.sum(lost & sent)) > int(np.sum(won & sent))

    def _is_unreached(self, call: int) -> bool:
        """Whether no gradient arrives at a backward call in one of the runs: it stopped before."""
        given = (self.calls == call) & self._has_role("input")
        return bool(given.any()) and not np.any(given & self.matched)

    def _lone_given(self, call: int, other: int) -> int | None:
        """A parameter, buffer or state of a call that only one of the runs has; `other` is the candidate's call."""
        verdict = self.pairs.coded("verdict").codes
        lone = (verdict == Verdict.ONLY_IN_REFERENCE) & (self.calls == call)
        lone |= (verdict == Verdict.ONLY_IN_CANDIDATE) & (self.pairs.numbers("call_candidate") == other)
        rows = np.flatnonzero(lone & self._has_role(*GIVEN)).tolist()
        return next((row for row in rows if self._is_missed(row)), None)

    def _is_missed(self, lone: int) -> bool:
        """Whether the run without this tensor has others in its role: some tools record no parameters or buffers."""
        other = "row_candidate" if self.pairs["row_candidate"][lone] < 0 else "row_reference"
        return bool(np.any((self.pairs[other] >= 0) & self._has_role(self.pairs["role"][lone])))

    def _headline(self) -> int:
        """The tensor to show: the culprit's first wrong result, or what entered it wrong where it has none."""
        if self.cause == "input":
            return self.entry
        results = np.flatnonzero(self.bad & (self.calls == self.culprit) & self._has_role(*RESULTS))
        return int(results[0]) if len(results) else self.entry

    def place(self) -> TensorPlace:
        """The tensor to show, at the call to blame."""
        place = self._place(self.headline)
        if self.own:
            return place
        call = self.reference.calls.row(self.culprit)
        names = ("step", "micro", "site", "call", "phase", "recompute")
        of_call = {name: call[name] for name in names}
        return replace(place, **of_call, type=call["type"] or "", role="", path="", weight=False)

    def _place(self, row: int) -> TensorPlace:
        """The place of a row. What is a parameter is called so, whatever its role."""
        return replace(TensorPlace.of(self.pairs, row), weight=self._is_weight(row))

    def _is_weight(self, row: int) -> bool:
        return self._weight_of(row) is not None

    def _is_whole(self, row: int) -> bool:
        """Whether a row holds whole numbers."""
        at = int(self.pairs["row_reference"][row])
        dtype = dtypes.DTYPES.get(self.reference.tensors["dtype"][at]) if at >= 0 else None
        return dtype is not None and dtype.kind == "int"

    def _weight_of(self, row: int) -> str | None:
        """The parameter that a function takes in this row, empty where it is not known which."""
        at = int(self.pairs["row_reference"][row])
        return weights.weight_of(self.reference, at) if at >= 0 and self.pairs["role"][row] == "input" else None

    def _parameter_name(self) -> str:
        """The parameter that entered the culprit wrong."""
        entry = TensorPlace.of(self.pairs, self.entry)
        name = entry.path if entry.site == ROOT else f"{entry.site}.{entry.path}"
        return self._weight_of(self.entry) or name

    def _is_clean(self) -> bool:
        """Whether what the culprit was given, and what the calls inside it made before, was recorded and is identical.

        Of a backward call that includes what its forward call was given. What merely agrees may still have come of an
        earlier divergence, too little of it to be seen.
        """
        if self.cause != "computation":
            return False
        forward = int(self.nesting.parent[self.culprit]) if self.nesting.is_backward[self.culprit] else self.culprit
        given = np.isin(self.calls, [self.culprit, forward]) & self._has_role("input", *GIVEN)
        made = np.isin(self.calls, self.nesting.children(self.culprit)) & self._has_role(*RESULTS)
        made[self.start :] = False
        inputs = (self.calls == self.culprit) & self._has_role("input")
        same = self.pairs.coded("verdict").codes == Verdict.IDENTICAL
        return bool(inputs.any() and same[given | made].all())

    def _has_role(self, *roles: str) -> Bools:
        return has_role(self.pairs, *roles)

    def _places(self, call: int, *roles: str) -> list[TensorPlace]:
        rows = np.flatnonzero((self.calls == call) & self._has_role("input", *roles))
        places = [self._place(row) for row in rows.tolist()]
        return [place for place in places if ("parameter" if place.weight else place.role) in roles]

    def _name(self, call: int) -> tuple[str, str]:
        return self.reference.calls["site"][call], self.reference.calls["type"][call] or ""

    def _stack(self) -> list[Frame]:
        """Where the call with the wrong tensor was made: for a wrong input of a submodule, a line of the culprit."""
        call: int | None = int(self.calls[self.entry]) if self.calls[self.entry] >= 0 else self.culprit
        if self.reference.calls["kind"][call] == "parameter":
            call = self.nesting.owner(int(self.calls[self.entry]))
        stack = -1 if call is None else int(self.reference.calls["stack"][call])
        return self.reference.stack(stack) if stack >= 0 else []

    def _metrics(self) -> dict[str, float]:
        found = {name: float(self.pairs[name][self.headline]) for name in (*METRICS, *SLICES, *BOUNDS)}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _magnitude(self) -> float:
        """The largest absolute difference: measured, or at least what some values or the extremes show."""
        measured = float(self.pairs["max_abs"][self.headline])
        if self.pairs["source"][self.headline] == "values" and not math.isnan(measured):
            return measured
        rows = (int(self.pairs["row_reference"][self.headline]), int(self.pairs["row_candidate"][self.headline]))
        gaps = [
            abs(float(self.candidate.tensors[name][rows[1]]) - float(self.reference.tensors[name][rows[0]]))
            for name in ("min", "max", "absmax")
        ]
        return max((gap for gap in [measured, *gaps] if not math.isnan(gap)), default=math.nan)

    def _previous(self) -> TensorPlace | None:
        """The last result before the first wrong tensor that both runs have and that agrees."""
        agreeing = np.isin(self.pairs.coded("verdict").codes, AGREEING) & self._has_role(*RESULTS)
        rows = np.flatnonzero(agreeing[: self.start])
        return TensorPlace.of(self.pairs, int(rows[-1])) if len(rows) else None

    def _growth(self) -> tuple[tuple[int, float], ...]:
        same = np.arange(len(self.bad)) >= self.headline
        for name in SAME_TENSOR:
            column = self.pairs[name]
            codes = column if isinstance(column, np.ndarray) else column.codes
            same &= codes == codes[self.headline]
        rows = np.flatnonzero(same & self.matched)
        return tuple(zip(self.pairs["step"][rows].tolist(), self.pairs["error"][rows].tolist(), strict=True))

    def _others(self) -> OtherWeights:
        return weights.others(self.pairs, self.entry, self.bad, self.reference, self.candidate)

    # -- sentences -----------------------------------------------------------------------------------------------

    def _evidence(self, entry: TensorPlace, others: OtherWeights, onset: clues.Onset | None) -> list[str]:
        inputs, given = self._places(self.culprit, "input"), self._places(self.culprit, *GIVEN)
        sentences = [setting.sentence for setting in self.settings]
        if self.settings and entry.verdict in clues.AGREEING_LABELS:
            sentences.append(
                f"Its {entry.tensor} is the first that it can have changed, and is off by no more than can be "
                f"explained without it ({clues.verdict_of(entry)})."
            )
        elif self.cause == "input":
            sentences.append(self._about_input(entry))
        elif self.cause == "parameter" and not self.matched[self.entry]:
            agree = clues.agreement([("input", inputs)])
            sentences.append(self._about_lone(entry) + (f" {agree}." if agree else ""))
        elif self.cause == "parameter":
            name = self._parameter_name()
            sentences.append(weights.sentence(self.pairs, self.entry, entry, name, inputs, others, self.reference))
        else:
            sentences.append(self._about_computation(entry, inputs, given))
        sentences += clues.suspicious([*inputs, *given])
        until = max(self.start, self.headline)
        told = {site for one in self.settings if one.kind == "argument" for site in one.sites or (one.site,) if site}
        sentences += clues.arguments(self.pairs, until, [self.culprit], self.reference, self.candidate, told)
        sentences += clues.unmatched(self.pairs, self.start)
        if isinstance(self.reference, JoinedRank) and isinstance(self.candidate, JoinedRank):
            one, other = (int(self.pairs[f"row_{side}"][self.headline]) for side in ("reference", "candidate"))
            limit = float(self.pairs["limit"][self.start])
            sentences += micro_clues.sentences(self.reference, self.candidate, one, other, limit)
        if onset is not None:
            sentences.append(f"The runs are bit-identical until {onset.place} ({clues.verdict_of(onset.place)}).")
        return sentences

    def onset(self) -> clues.Onset | None:
        """Where the bits begin to differ: by fingerprints, or by statistics if neither run has any.

        Statistics recorded on one side and computed from values on the other may be summed in another order.
        """
        onset = clues.onset(self.pairs, self.start)
        if onset is None:
            return None
        sides = ((self.reference, "row_reference"), (self.candidate, "row_candidate"))
        kinds = {
            run.fingerprints if run.tensors.valid("fingerprint")[self.pairs.numbers(row)[onset.row]] else ""
            for run, row in sides
        }
        return onset if len(kinds) == 1 else None

    def _about_lone(self, entry: TensorPlace) -> str:
        which = entry.verdict.removeprefix("only in ")
        return f"Its {entry.tensor} is there only in the {which}: the other run computed without it."

    def _about_input(self, entry: TensorPlace) -> str:
        if entry.phase == "update":
            return weights.about_update(entry)
        if entry.phase == "backward":
            return self._about_arriving(entry)
        differs = f"The {entry.tensor} of this outermost call already differs, and"
        lone = self._made_by_one()
        if lone:
            return f"The {entry.tensor} of this outermost call already differs. {lone}."
        before = self._call_before()
        data = "the data, its order, the seed and the preprocessing"
        if is_loss(entry.type) and self._is_whole(self.entry):
            fact = f"The {entry.tensor} of this loss already differs, and no recorded call made it"
            return f"{fact}: look at {data}. Labels that a model chose itself may fall another way by rounding."
        if before is None:
            return f"{differs} no call before it produced it: look at {data}."
        between = f"the code between the call of {before.module} before it and this one, which was not recorded"
        if before.step != entry.step:
            return f"{differs} no recorded call made it: look at {data}, or at {between}."
        agrees = (
            f" What that call gave agrees ({clues.verdict_of(before)})."
            if before.verdict in clues.AGREEING_LABELS
            else ""
        )
        return f"{differs} no recorded call made it: look at {between}.{agrees}"

    def _about_arriving(self, entry: TensorPlace) -> str:
        """About a gradient that arrives wrong at an outermost call."""
        arrives = f"The gradient that arrives at {entry.module} already differs, though everything before agrees"
        if entry.recompute:
            return (
                f"{arrives}, and the call around it is not known, because activation checkpointing made this one anew: "
                "look at the code around it."
            )
        factor = self._common_factor()
        if factor is not None:
            arrives = f"All gradients of this step are {factor:.4g} times those of the reference"
        return f"{arrives}: look at the loss, its scaling and its reduction."

    def _common_factor(self) -> float | None:
        """By how much all gradients are too large, if they are so by one factor."""
        if SENTENCES[Reason.SCALED] not in TensorPlace.of(self.pairs, self.start).reason:
            return None
        reference, candidate = (
            float(run.tensors.numbers("l2")[int(self.pairs[row][self.start])])
            for run, row in ((self.reference, "row_reference"), (self.candidate, "row_candidate"))
        )
        return candidate / reference if reference > 0 else None

    def _call_before(self) -> TensorPlace | None:
        """What the outermost call before a wrong input gave, if that input may have been made of it.

        In a step before which gradients came in, or in one that follows them, it is the next of the data.
        """
        phase, calls = self.pairs.coded("phase"), self.calls[: self.entry]
        if np.any(phase.codes[: self.entry] == phase.code("backward")):
            return None
        outermost = np.flatnonzero(np.append(self.nesting.enclosings < 0, False)[calls] & (calls >= 0))
        gave = outermost[self._has_role("output")[outermost]]
        return TensorPlace.of(self.pairs, int(gave[-1])) if len(gave) else None

    def _maker(self, side: str, run: RankRun, only: Verdict) -> int:
        """The result that the wrong value is, by its row in a run that has tensors of its own; −1 for none."""
        row = int(self.pairs[f"row_{side}"][self.start])
        if row < 0 or not np.any(self.pairs.coded("verdict").codes[: self.start] == only):
            return -1
        return int(graph_of(run).producer[row])

    def _made_by_one(self) -> str:
        """The sentence where a call that only one run has made the wrong value; empty where none did."""
        makers: dict[str, str] = {}
        for side, run, only in (
            ("reference", self.reference, Verdict.ONLY_IN_REFERENCE),
            ("candidate", self.candidate, Verdict.ONLY_IN_CANDIDATE),
        ):
            made = self._maker(side, run, only)
            rows: Ints = np.flatnonzero((self.pairs.numbers(f"row_{side}") == made) & (made >= 0))
            if len(rows) and self.pairs.coded("verdict").codes[rows[0]] == only:
                makers[side] = TensorPlace.of(self.pairs, int(rows[0])).module
        if len(makers) == 2:
            left, right = makers.values()
            return f"It comes from {left} in the reference and from {right} in the candidate"
        for side, maker in makers.items():
            other = "candidate" if side == "reference" else "reference"
            return f"In the {side} it comes from {maker}, which the {other} does not call"
        return ""

    def _about_computation(self, entry: TensorPlace, inputs: list[TensorPlace], given: list[TensorPlace]) -> str:
        if entry.role == "input":
            shows = f"The wrong value shows first as {entry.tensor} of {entry.module}"
            lone = self._made_by_one()
            if lone:
                outer = self.nesting.enclosing(int(self.calls[self.entry]))
                return f"{shows}. {lone}" + (
                    "." if outer is None else ": look at the code of {} ({}).".format(*self._name(outer))
                )
            site, kind = self._name(self.culprit)
            return f"{shows}, and no observed call produced it: the code of {site} ({kind}) around its submodules did."
        if entry.role == "gradient":
            return self._about_gradient()
        parts = [(noun, [place for place in given if place.noun == noun]) for noun in ("parameter", "buffer", "state")]
        agree = clues.agreement([("input", inputs), *parts])
        if not agree:
            what = "compared" if inputs or given else "recorded"
            return f"None of its inputs was {what}, so they may differ; everything compared before it agrees."
        return f"{agree}, but its {entry.tensor} does not."

    def _about_gradient(self) -> str:
        owner = self.nesting.owner(int(self.calls[self.entry]))
        backward = None if owner is None else self.nesting.backward_of(owner)
        arriving = [] if backward is None else self._places(backward, "input")
        if owner is None or not clues.agreement([("gradient", arriving[:1])]):
            return "Everything before this gradient agrees: look at how it is computed and accumulated."
        site, kind = self._name(owner)
        return (
            f"The gradient that arrives at {site} ({kind}) agrees ({clues.verdict_of(arriving[0])}), but the one of "
            "its parameter does not: look at how it is computed and accumulated."
        )


def side_of(run: RankRun, row: int) -> Side:
    cells = run.tensors.row(row)
    return Side(
        dtype=cells["dtype"],
        shape=cells["shape"],
        device=cells["device"] or "",
        statistics=Statistics.of(cells),
        fingerprint=cells["fingerprint"],
    )
