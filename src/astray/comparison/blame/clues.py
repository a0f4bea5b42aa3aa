"""Sentences about what else was seen around a divergence. Each function gives one kind of clue.

Reads the pairs of one rank and, for joined micro steps, the parts of the two rows that a report shows; feeds `first`. A
clue says what is the case, with its numbers, and where to look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from astray.comparison.divergence import TensorPlace
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.measure.metrics import error_of_values
from astray.comparison.measure.pieces import stretches
from astray.comparison.pair.joined_rank import JoinedRank
from astray.comparison.rows import Ints, StringTable
from astray.comparison.setup.arguments import are_of_one_framework
from astray.comparison.verdict import AGREEING, RULES, SENTENCES, Reason, Rule, Verdict
from astray.errors import RunError
from astray.safe_text import parse_json
from astray.stats.kernels import Strided, contrast
from astray.store import RankRun, Table
from astray.wording import counted

_MOST = 3
"""Clues of one kind that are spelled out; the rest are counted."""

NEGLIGIBLE = "negligible: both sides are rounding noise"

AGREEING_LABELS = [verdict.label for verdict in AGREEING]


def agreement(parts: list[tuple[str, list[TensorPlace]]]) -> str:
    """How well parts of a call agree: "Its 2 inputs and its parameter agree (rounding, 1.2e-07)".

    Only what was compared and agrees is counted. Empty when that is nothing.
    """
    agreeing = [(noun, [place for place in places if place.verdict in AGREEING_LABELS]) for noun, places in parts]
    agreeing = [(noun, places) for noun, places in agreeing if places]
    if not agreeing:
        return ""
    worst = max((place for _, places in agreeing for place in places), key=_severity)
    names = [f"its {len(places)} {noun}s" if len(places) > 1 else f"its {noun}" for noun, places in agreeing]
    agree = "agree" if len(agreeing) > 1 or len(agreeing[0][1]) > 1 else "agrees"
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    text = f"{listed} {agree} ({verdict_of(worst)})"
    return text[0].upper() + text[1:]


def verdict_of(place: TensorPlace) -> str:
    """The verdict, with the error where there is one."""
    if is_negligible(place):
        return NEGLIGIBLE
    return place.verdict if np.isnan(place.error) or not place.error else f"{place.verdict}, {place.error:.1e}"


def is_negligible(place: TensorPlace) -> bool:
    """Whether it agrees only because both sides are too small to matter, whatever the error."""
    return SENTENCES[Reason.NEGLIGIBLE] in place.reason


def _severity(place: TensorPlace) -> tuple[int, bool, float]:
    return AGREEING_LABELS.index(place.verdict), not is_negligible(place), float(np.nan_to_num(place.error))


def suspicious(places: list[TensorPlace]) -> Iterator[str]:
    """What a call started from that counts as agreeing but may hide a change, or was not compared at all."""
    for place in places:
        if SENTENCES[Reason.SAME_STATISTICS] in place.reason and place.verdict in AGREEING_LABELS:
            yield (
                f"Its {place.tensor} has other bits but the same statistics: a tiny change, or the same values in "
                "another order. Record with keep='tensors' to tell."
            )
        elif SENTENCES[Reason.NOT_MOVED] in place.reason and place.verdict in AGREEING_LABELS:
            yield (
                f"Its {place.tensor} has the reference's own bits, though the mapping lays it out in another order: it "
                "was loaded as it is, or the rule is wrong, or it is symmetric. Record with keep='tensors' to tell."
            )
        elif SENTENCES[Reason.VARIES] in place.reason and place.verdict in AGREEING_LABELS:
            yield f"Its {place.tensor} changes between micro steps: that the first of them saw the same is all we know."
        elif place.verdict == Verdict.UNKNOWN.label:
            yield f"Its {place.tensor} could not be compared: {place.reason}."


def arguments(
    pairs: Table, until: int, calls: list[int], reference: RankRun, candidate: RankRun, named: Collection[str] = ()
) -> Iterator[str]:
    """Arguments that are not tensors and differ, in these calls or in any call up to row `until`; nearest first.

    named: sites whose arguments the report has named already.
    """
    call_reference = pairs.numbers("call_reference")[: until + 1]
    call_candidate = pairs.numbers("call_candidate")[: until + 1]
    both = np.flatnonzero((call_reference >= 0) & (call_candidate >= 0))
    _, last = np.unique(call_reference[both][::-1], return_index=True)
    rows = np.sort(both[::-1][last])[::-1]
    words = StringTable()
    args_reference = words.encode(reference.calls["args"])[call_reference[rows]]
    args_candidate = words.encode(candidate.calls["args"])[call_candidate[rows]]
    differ = (args_reference != args_candidate) & (args_reference >= 0)
    differ &= args_candidate >= 0  # another tool's dump may lack them
    sites = pairs["site"]
    types = reference.calls["type"], candidate.calls["type"]
    new = [
        row
        for row in rows[differ].tolist()
        if sites[row] not in named
        and are_of_one_framework(str(types[0][call_reference[row]]), str(types[1][call_candidate[row]]))
    ]
    changed = {
        row: _comparable(
            reference.calls["args"][int(call_reference[row])],
            candidate.calls["args"][int(call_candidate[row])],
            reference.calls["kind"][int(call_reference[row])],
        )
        for row in new
    }
    new = [row for row in new if changed[row][0] != changed[row][1]]
    nearest = sorted(new, key=lambda row: call_reference[row] not in calls)  # stable: its own calls come first
    for row in nearest[:_MOST]:
        place = TensorPlace.of(pairs, row)
        changes = "; ".join(
            f"`{path or 'arguments'}` is {one} in the reference and {other} in the candidate"
            for path, one, other in list(differences(*changed[row]))[:_MOST]
        )
        yield f"The call of {place.module} in step {place.step} has other arguments: {changes}."
    if len(nearest) > _MOST:
        yield f"{len(nearest) - _MOST:,} more calls before it have other arguments."


def _comparable(reference: str, candidate: str, kind: str) -> tuple[Any, Any]:
    """The arguments of two calls. Of optimizers those that both have, for other releases and frameworks have others."""
    one, other = _parsed(reference), _parsed(candidate)
    if kind == "optimizer" and isinstance(one, dict) and isinstance(other, dict):
        return {name: one[name] for name in one if name in other}, {name: other[name] for name in one if name in other}
    return one, other


def differences(reference: Any, candidate: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two JSON values differ: path, reference, candidate.

    >>> list(differences({"args": ["<tensor>", 1]}, {"args": ["<tensor>", 2], "kwargs": {"p": 0.1}}))
    [('args.1', '1', '2'), ('kwargs', 'absent', '{"p": 0.1}')]
    """
    if isinstance(reference, dict) and isinstance(candidate, dict):
        keys: list[Any] = list(dict.fromkeys([*reference, *candidate]))
        pairs = [(key, reference.get(key, _Absent), candidate.get(key, _Absent)) for key in keys]
    elif isinstance(reference, list) and isinstance(candidate, list) and len(reference) == len(candidate):
        pairs = list(zip(range(len(reference)), reference, candidate, strict=True))
    else:
        if reference != candidate or type(reference) is not type(candidate):
            yield path, _shown(reference), _shown(candidate)
        return
    for key, value_reference, value_candidate in pairs:
        yield from differences(value_reference, value_candidate, f"{path}.{key}" if path else str(key))


def unmatched(pairs: Table, before: int) -> Iterator[str]:
    """Tensors earlier in the order that only one run has."""
    for verdict in (Verdict.ONLY_IN_REFERENCE, Verdict.ONLY_IN_CANDIDATE):
        rows = np.flatnonzero(pairs.coded("verdict").codes[:before] == verdict)
        if len(rows):
            place = TensorPlace.of(pairs, int(rows[-1]))
            many = f"{len(rows):,} tensors are" if len(rows) > 1 else "One tensor is"
            yield f"{many} {verdict.label} before it, the last at {place}."


def cleared(pairs: Table, replays: Mapping[int, ReplayedPair], before: int) -> str:
    """Which results before row `before` would count as wrong by themselves, but for their replays; empty for none."""
    rule = pairs.coded("rule")
    settled = rule.codes == rule.code(RULES[Rule.REPLAY])
    rows = [row for row, replay in sorted(replays.items()) if row < before and replay.finding == "inputs"]
    rows = [row for row in rows if settled[row]]
    if not rows:
        return ""
    count = f"{counted(len(rows), 'tensor')} before it, first {TensorPlace.of(pairs, rows[0])}, " + (
        "are" if len(rows) > 1 else "is"
    )
    return (
        f"{count} further off than expected, but not to blame: replayed in both runs, the call gives what was recorded."
    )


class Onset(NamedTuple):
    """The first tensor that is not bit-identical."""

    row: int
    place: TensorPlace


def onset(pairs: Table, before: int) -> Onset | None:
    """The first tensor that is not bit-identical, if all before it were that both runs have, and there were some."""
    codes: Ints = pairs.coded("verdict").codes[:before]
    codes = np.where(np.isin(codes, (Verdict.ONLY_IN_REFERENCE, Verdict.ONLY_IN_CANDIDATE)), Verdict.IDENTICAL, codes)
    found = np.flatnonzero((codes == Verdict.ROUNDING) | (codes == Verdict.DRIFTING))
    if not len(found) or found[0] == 0 or np.any(codes[: found[0]] != Verdict.IDENTICAL):
        return None
    return Onset(int(found[0]), TensorPlace.of(pairs, int(found[0])))


class _Absent:
    """In place of an argument that one side does not have."""


def _shown(value: Any) -> str:
    return "absent" if value is _Absent else json.dumps(value, ensure_ascii=False)


def _parsed(text: str | None) -> Any:
    if text is None:
        return _Absent
    try:
        return parse_json(text)
    except ValueError:
        return text


# -- joined micro steps ------------------------------------------------------------------------------------------------


SCALED = ("min", "max", "std", "l2", "absmax")
"""Statistics that grow with a positive factor, and are not a small difference of large numbers, as the mean may be."""

SAME_FACTOR = 1e-4
"""How far apart the factors of statistics may be: rounding is far smaller, and a factor that matters far larger."""


def micro_steps(
    reference: JoinedRank, candidate: JoinedRank, row_reference: int, row_candidate: int, limit: float
) -> Iterator[str]:
    """In which micro steps a joined row is off, and whether by a mere factor; `limit` is how far off one may be."""
    if row_reference < 0 or row_candidate < 0:
        return
    yield from _wrong_micro_steps(reference, candidate, row_reference, row_candidate, limit)
    yield from _constant_factor(reference, candidate, row_reference, row_candidate)


def _wrong_micro_steps(
    reference: JoinedRank, candidate: JoinedRank, row_reference: int, row_candidate: int, limit: float
) -> Iterator[str]:
    """Which micro steps are off, of the run that has more of them, if it is not all."""
    try:
        of_reference, of_candidate = reference.pieces(row_reference), candidate.pieces(row_candidate)
    except RunError:
        return
    if of_reference is None or of_candidate is None:
        return
    if not of_reference.fits(of_candidate._replace(dim=of_reference.dim)):
        return
    dtypes = str(reference.tensors["dtype"][row_reference]), str(candidate.tensors["dtype"][row_candidate])
    if dtypes[0].startswith("complex") != dtypes[1].startswith("complex"):
        return
    is_candidate_finer = len(of_candidate.parts) > len(of_reference.parts)
    finer = of_candidate if is_candidate_finer else of_reference
    absmax = float(reference.tensors.numbers("absmax")[row_reference])
    wrong: set[int] = set()
    begin = 0
    for sides in stretches(of_reference, of_candidate):
        number = max(at for at, bound in enumerate(finer.bounds[:-1]) if bound <= begin)
        begin += sides[0].shape[of_reference.dim]
        found = contrast(*(Strided.from_numpy(side, dtype) for side, dtype in zip(sides, dtypes, strict=True)))
        if found.nonfinite_mismatch or not error_of_values(found, absmax) <= limit:
            wrong.add(number)
    if 0 < len(wrong) < len(finer.parts):
        micro = candidate.micro(row_candidate) if is_candidate_finer else reference.micro(row_reference)
        named = ", ".join(str(micro[number]) for number in sorted(wrong))
        side = "candidate" if is_candidate_finer else "reference"
        yield (
            f"Of the {counted(len(finer.parts), 'micro step')} of the {side} "
            f"{'only micro ' if len(wrong) == 1 else 'micro '}{named} {'is' if len(wrong) == 1 else 'are'} off."
        )


def _constant_factor(
    reference: JoinedRank, candidate: JoinedRank, row_reference: int, row_candidate: int
) -> Iterator[str]:
    """Whether the candidate's tensor is the reference's times a number, as a loss that was divided twice makes it."""
    of_reference = {name: float(reference.tensors.numbers(name)[row_reference]) for name in SCALED}
    of_candidate = {name: float(candidate.tensors.numbers(name)[row_candidate]) for name in SCALED}
    if not all(map(math.isfinite, (*of_reference.values(), *of_candidate.values()))):
        return
    if not of_reference["l2"] or not of_candidate["l2"]:
        return
    factor = of_candidate["l2"] / of_reference["l2"]
    deviation = max(abs(of_candidate[name] - factor * of_reference[name]) for name in SCALED)
    if abs(factor - 1) <= SAME_FACTOR or deviation > SAME_FACTOR * of_candidate["absmax"]:
        return
    counts = [len(run.tables.rows(row)) for run, row in ((reference, row_reference), (candidate, row_candidate))]
    text = f"The candidate's is {factor:.5g} times the reference's, by every statistic"
    if any(abs(factor - ratio) <= SAME_FACTOR * ratio for ratio in (counts[0] / counts[1], counts[1] / counts[0])):
        yield (
            f"{text}, and one run has {max(counts)} micro steps where the other has {min(counts)}: is the loss "
            "divided by their number in one run only?"
        )
    else:
        yield f"{text}: a constant factor."
