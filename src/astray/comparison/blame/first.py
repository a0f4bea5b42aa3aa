"""Finds the first divergence: the first call whose result is wrong while its inputs were still right.

Reads the judged pairs of one rank in order of observation, feeds `ranks.rank`. `culprit` finds the call to blame for a
wrong row; here are chosen the rows to explain, and what a report shows of each is put together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from astray.comparison.blame import clues, sentences, weights
from astray.comparison.blame.culprit import RESULT_ROLES, Culprit
from astray.comparison.blame.detours import healed
from astray.comparison.blame.explanation import furthest_slice
from astray.comparison.blame.setup_causes import effects, explaining
from astray.comparison.blame.weights import STATE_ROLES, OtherWeights, has_role
from astray.comparison.divergence import Divergence, Side, TensorPlace
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import AGREEING, BAD, Verdict
from astray.records import ROOT, Frame, Statistics
from astray.store import RankRun, Table

ODD = 5
OUTSTANDING = 10
"""Of weights that differ at once, one that is so many times further off than its siblings of other layers is taken for
the cause; where it has no two siblings, than all of them are on average."""

MOST_ORIGINS = 20
"""So many further divergences of a rank are reported."""

SAME_TENSOR = ("micro", "site", "call", "phase", "recompute", "role", "path")


def find_divergences(
    pairs: Table,
    rank: int,
    reference: RankRun,
    candidate: RankRun,
    setup: Sequence[SetupDifference] = (),
    replays: Mapping[int, ReplayedPair] = MappingProxyType({}),
) -> list[Divergence]:
    """The first divergence of one rank, and after it those that are not its victims; none when no pair is wrong.

    `pairs`, `setup`, what was set differently, and `replays`, what replaying a call says of a pair, are of this rank
    alone.
    """
    wrong, origin = _wrong_rows(pairs, reference, candidate)
    found: list[tuple[Culprit, tuple[SetupDifference, ...]]] = []
    for row in _rows_to_explain(pairs, origin):
        culprit = Culprit(pairs, rank, reference, candidate, wrong, row)
        found.append((culprit, _explaining_settings(culprit, setup)))
    for row, setting in effects(pairs, setup):
        if not any(setting in settings for _, settings in found):
            with_row = wrong.copy()
            with_row[row] = True
            found.append((Culprit(pairs, rank, reference, candidate, with_row, row), (setting,)))
            found.sort(key=lambda one: one[0].start)  # a setting is the first divergence where it is the earliest
    divergences = [_divergence(culprit, settings, replays) for culprit, settings in found]
    if divergences and (cleared := clues.cleared(pairs, replays, found[0][0].start)):
        divergences[0] = replace(divergences[0], evidence=(*divergences[0].evidence, cleared))
    return divergences


# -- which rows to explain ---------------------------------------------------------------------------------------------


def rows_to_explain(pairs: Table, reference: RankRun, candidate: RankRun) -> list[int]:
    """The rows of one rank that are wrong by themselves, and that `find_divergences` finds a call to blame for."""
    return _rows_to_explain(pairs, _wrong_rows(pairs, reference, candidate)[1])


def _wrong_rows(pairs: Table, reference: RankRun, candidate: RankRun) -> tuple[Bools, Bools]:
    """The rows that are wrong, and of these the ones that are so by themselves."""
    wrong = np.isin(pairs.coded("verdict").codes, BAD)
    origin = wrong & pairs.numbers("origin") & ~healed(pairs, wrong, reference)
    without_parameter = _results_without_parameter(pairs, reference, candidate)
    wrong[without_parameter] = origin[without_parameter] = True
    return wrong, origin


def _rows_to_explain(pairs: Table, origin: Bools) -> list[int]:
    if not origin.any():
        return []
    return _at_distinct_sites(pairs, [_start(pairs, origin), *np.flatnonzero(origin).tolist()])


def _at_distinct_sites(pairs: Table, rows: Sequence[int]) -> list[int]:
    """The first row of each site: what was wrong in one step is so in the next, there or around it.

    What the outermost module is given came from outside, and says nothing about the sites inside.
    """
    distinct: list[int] = []
    places: list[TensorPlace] = []
    for row in rows:
        place = TensorPlace.of(pairs, row)
        known = [one for one in places if one.role != "input" or one.site != ROOT or place.site == ROOT]
        if not any(place.phase == one.phase and related(place.site, one.site) for one in known):
            distinct.append(row)
            places.append(place)
        if len(distinct) > MOST_ORIGINS:
            break
    return distinct


def _results_without_parameter(pairs: Table, reference: RankRun, candidate: RankRun) -> Ints:
    """The first results of calls that both runs have, and one of them without a parameter that is not all zeros."""
    verdict, role = pairs.coded("verdict").codes, pairs.coded("role")
    matched = (pairs.numbers("row_reference") >= 0) & (pairs.numbers("row_candidate") >= 0)
    rows: list[int] = []
    for side, other_side, run, only in (
        ("reference", "candidate", reference, Verdict.ONLY_IN_REFERENCE),
        ("candidate", "reference", candidate, Verdict.ONLY_IN_CANDIDATE),
    ):
        unmatched = np.flatnonzero((verdict == only) & (role.codes == role.code("parameter")))
        # Some tools record no parameters at all.
        of_other = (pairs.numbers(f"row_{other_side}") >= 0) & has_role(pairs, "parameter")
        absmax = run.tensors.numbers("absmax")[pairs.numbers(f"row_{side}")[unmatched]]
        unmatched = unmatched[np.any(of_other) & (absmax > 0)]
        if len(unmatched):  # a compiled module has the parameters of those inside it, under longer paths
            names = {_full_name(pairs, row) for row in np.flatnonzero(of_other).tolist()}
            unmatched = unmatched[[_full_name(pairs, row) not in names for row in unmatched.tolist()]]
        call = pairs.numbers(f"call_{side}")
        results = np.flatnonzero(matched & has_role(pairs, *RESULT_ROLES) & np.isin(call, call[unmatched]))
        _, first = np.unique(call[results], return_index=True)
        rows += results[first].tolist()
    return np.array(sorted(rows), np.int64)


def _full_name(pairs: Table, row: int) -> str:
    site, path = str(pairs["site"][row]), str(pairs["path"][row])
    return path if site == ROOT else f"{site}.{path}"


def _start(pairs: Table, origin: Bools) -> int:
    """The earliest wrong row; or the one that stands out among those that were wrong at the same time.

    The weights that a step starts with are all set before the first of them is recorded, and so are the gradients that
    its optimizer is given. A gradient that is too large makes clipping scale all others down a little.
    """
    first = int(np.argmax(origin))
    role, phase = pairs.coded("role"), pairs.coded("phase")
    of_update = phase.codes[first] == phase.code("update") and role.codes[first] == role.code("input")
    if not of_update and role.codes[first] != role.code("parameter"):
        return first
    together = np.ones(len(origin), np.bool_)
    columns = [pairs.numbers("step"), pairs.numbers("micro"), phase.codes, role.codes]
    for codes in (*columns, *([pairs.coded("path").codes] if of_update else [])):
        together &= codes == codes[first]
    rows = np.flatnonzero(together & (pairs.numbers("row_reference") >= 0) & (pairs.numbers("row_candidate") >= 0))
    score = np.where(origin[rows], _oddness(pairs, rows), 0.0)
    return int(rows[np.argmax(score)]) if score.max(initial=0.0) >= 1 else first


def _oddness(pairs: Table, rows: Ints) -> Floats:
    """How far some weights stand out among their siblings: above 1 they do."""
    verdict, site, path = pairs.coded("verdict").codes[rows], pairs.coded("site"), pairs.coded("path").codes[rows]
    error = np.where(verdict == Verdict.NON_FINITE, np.inf, np.nan_to_num(pairs.numbers("error")[rows]))
    families: dict[tuple[str, int], list[int]] = {}
    for index, (code, name) in enumerate(zip(site.codes[rows].tolist(), path.tolist(), strict=True)):
        families.setdefault((re.sub(r"\d+", "#", str(site.values[code])), name), []).append(index)
    score: Floats = np.where(error > 0, np.inf, 0.0)
    with np.errstate(over="ignore"):
        usual = OUTSTANDING * np.full(len(rows), np.median(error))
        for family in families.values():
            for index in family if len(family) > 2 else ():
                usual[index] = ODD * np.median([error[sibling] for sibling in family if sibling != index])
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


# -- the record of one -------------------------------------------------------------------------------------------------


def _divergence(
    culprit: Culprit, settings: tuple[SetupDifference, ...], replays: Mapping[int, ReplayedPair]
) -> Divergence:
    """What a report shows of a culprit, and of the settings that explain it."""
    pairs, start, shown = culprit.pairs, culprit.start, culprit.shown
    entry = culprit.place_of(culprit.entry)
    parameter = entry if culprit.cause == "parameter" else None
    others = OtherWeights(0, 0)
    if parameter and culprit.matched[culprit.entry]:
        others = weights.others(pairs, culprit.entry, culprit.wrong, culprit.reference, culprit.candidate)
    onset = _onset(culprit)
    of_call = int(culprit.wrong[culprit.call_of_row == culprit.call].sum())
    return Divergence(
        rank=culprit.rank,
        place=culprit.place(),
        cause=culprit.cause,
        limit=float(pairs["limit"][start]),
        surprise=float(pairs["surprise"][start]),
        measure=pairs["measure"][start] or "",
        deviation=float(pairs["deviation"][start]),
        given=float(pairs["given"][start]),
        rule=pairs["rule"][start] or "",
        siblings=int(pairs["siblings"][start]),
        furthest=furthest_slice(pairs, start),
        replay=replays.get(start) or replays.get(shown),
        settings=settings,
        clean=_is_clean(culprit),
        magnitude=_magnitude(culprit),
        measured_by=pairs["source"][shown] or "none",
        metrics=_metrics(culprit),
        reference=side_of(culprit.reference, int(pairs["row_reference"][shown])),
        candidate=side_of(culprit.candidate, int(pairs["row_candidate"][shown])),
        stack=tuple(_stack(culprit)),
        enclosing=tuple(culprit.name_of(row) for row in culprit.graph.around(culprit.call)),
        seen=entry if parameter is None and (culprit.entry != shown or not culprit.shows_own) else None,
        parameter=parameter,
        other_parameters=others.parameters,
        other_buffers=others.buffers,
        previous=_previous(culprit),
        onset=None if onset is None else onset.place,
        evidence=tuple(sentences.evidence(culprit, settings, entry, others, onset)),
        victims=int(culprit.wrong.sum()) - of_call - (not culprit.shows_own),
        growth=_growth(culprit),
        order=(entry.step, int(np.sum(pairs["step"][:start] == entry.step))),
    )


def _explaining_settings(culprit: Culprit, setup: Sequence[SetupDifference]) -> tuple[SetupDifference, ...]:
    """What was set differently and explains the divergence."""
    place = culprit.place()
    name = culprit.parameter_name() if culprit.cause == "parameter" else None
    if place.phase == "update":
        name = None if "/" in place.site else place.site  # a function of the optimizer steps with all its numbers
    return explaining(setup, site=place.site, phase=place.phase, step=place.step, parameter=name)


def _is_clean(culprit: Culprit) -> bool:
    """Whether all that the call was given, and the calls inside it made before, was recorded and is identical.

    Of a backward call that includes what its forward call was given. What merely agrees may still have come of an
    earlier divergence, too little of it to be seen.
    """
    if culprit.cause != "computation":
        return False
    forward = int(culprit.graph.parent[culprit.call]) if culprit.graph.is_backward[culprit.call] else culprit.call
    operands = np.isin(culprit.call_of_row, [culprit.call, forward]) & culprit.has_role("input", *STATE_ROLES)
    inside = culprit.graph.children(culprit.call)
    results_inside = np.isin(culprit.call_of_row, inside) & culprit.has_role(*RESULT_ROLES)
    results_inside[culprit.start :] = False
    inputs = (culprit.call_of_row == culprit.call) & culprit.has_role("input")
    identical = culprit.pairs.coded("verdict").codes == Verdict.IDENTICAL
    return bool(inputs.any() and identical[operands | results_inside].all())


def _stack(culprit: Culprit) -> list[Frame]:
    """Where the call with the wrong tensor was made: for a wrong input of a submodule, a line of the culprit."""
    of_entry = int(culprit.call_of_row[culprit.entry])
    call: int | None = of_entry if of_entry >= 0 else culprit.call
    if culprit.reference.calls["kind"][call] == "parameter":
        call = culprit.graph.owner(of_entry)
    stack = -1 if call is None else int(culprit.reference.calls["stack"][call])
    return culprit.reference.stack(stack) if stack >= 0 else []


def _metrics(culprit: Culprit) -> dict[str, float]:
    values = {name: float(culprit.pairs[name][culprit.shown]) for name in (*METRICS, *SLICES, *BOUNDS)}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _magnitude(culprit: Culprit) -> float:
    """The largest absolute difference: measured, or at least what some values or the extremes show."""
    measured = float(culprit.pairs["max_abs"][culprit.shown])
    if culprit.pairs["source"][culprit.shown] == "values" and not math.isnan(measured):
        return measured
    rows = (int(culprit.pairs["row_reference"][culprit.shown]), int(culprit.pairs["row_candidate"][culprit.shown]))
    gaps = [
        abs(float(culprit.candidate.tensors[name][rows[1]]) - float(culprit.reference.tensors[name][rows[0]]))
        for name in ("min", "max", "absmax")
    ]
    return max((gap for gap in [measured, *gaps] if not math.isnan(gap)), default=math.nan)


def _previous(culprit: Culprit) -> TensorPlace | None:
    """The last result before the first wrong tensor that both runs have and that agrees."""
    agreeing = np.isin(culprit.pairs.coded("verdict").codes, AGREEING) & culprit.has_role(*RESULT_ROLES)
    rows = np.flatnonzero(agreeing[: culprit.start])
    return TensorPlace.of(culprit.pairs, int(rows[-1])) if len(rows) else None


def _growth(culprit: Culprit) -> tuple[tuple[int, float], ...]:
    """The error of the shown tensor in this and later steps."""
    same = np.arange(len(culprit.wrong)) >= culprit.shown
    for name in SAME_TENSOR:
        column = culprit.pairs[name]
        codes = column if isinstance(column, np.ndarray) else column.codes
        same &= codes == codes[culprit.shown]
    rows = np.flatnonzero(same & culprit.matched)
    return tuple(zip(culprit.pairs["step"][rows].tolist(), culprit.pairs["error"][rows].tolist(), strict=True))


def _onset(culprit: Culprit) -> clues.Onset | None:
    """Where the bits begin to differ: by fingerprints, or by statistics if neither run has any.

    Statistics recorded on one side and computed from values on the other may be summed in another order.
    """
    onset = clues.onset(culprit.pairs, culprit.start)
    if onset is None:
        return None
    sides = ((culprit.reference, "row_reference"), (culprit.candidate, "row_candidate"))
    kinds = {
        run.fingerprints if run.tensors.valid("fingerprint")[culprit.pairs.numbers(row)[onset.row]] else ""
        for run, row in sides
    }
    return onset if len(kinds) == 1 else None


def side_of(run: RankRun, row: int) -> Side:
    """A tensor of one run as a report shows it."""
    cells = run.tensors.row(row)
    return Side(
        dtype=cells["dtype"],
        shape=cells["shape"],
        device=cells["device"] or "",
        statistics=Statistics.of(cells),
        fingerprint=cells["fingerprint"],
    )
