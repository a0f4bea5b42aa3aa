"""Sentences about what else was seen around a divergence. Each function gives one kind of clue.

Reads the pairs of one rank and, for joined micro steps, the parts of the two rows that a report shows; feeds `first`. A
clue says what is the case, with its numbers, and where to look.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from astray.comparison.divergence import TensorPlace
from astray.comparison.measure.metrics import error_of_values
from astray.comparison.measure.pieces import Pieces, stretches
from astray.comparison.pair.joined_rank import JoinedRank
from astray.comparison.rows import Ints, StringTable
from astray.comparison.verdict import AGREEING, SENTENCES, Reason, Verdict
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
    known = [(noun, [place for place in places if place.verdict in AGREEING_LABELS]) for noun, places in parts]
    found = [(noun, places) for noun, places in known if places]
    if not found:
        return ""
    worst = max((place for _, places in found for place in places), key=_severity)
    names = [f"its {len(places)} {noun}s" if len(places) > 1 else f"its {noun}" for noun, places in found]
    agree = "agree" if len(found) > 1 or len(found[0][1]) > 1 else "agrees"
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
        elif SENTENCES[Reason.VARIES] in place.reason and place.verdict in AGREEING_LABELS:
            yield f"Its {place.tensor} changes between micro steps: that the first of them saw the same is all we know."
        elif place.verdict == Verdict.UNKNOWN.label:
            yield f"Its {place.tensor} could not be compared: {place.reason}."


def arguments(
    pairs: Table, until: int, calls: list[int], reference: RankRun, candidate: RankRun, told: Collection[str] = ()
) -> Iterator[str]:
    """Arguments that are not tensors and differ, in these calls or in any call up to row `until`; nearest first.

    told: sites whose arguments were already named in the report.
    """
    here, there = pairs.numbers("call_reference")[: until + 1], pairs.numbers("call_candidate")[: until + 1]
    both = np.flatnonzero((here >= 0) & (there >= 0))
    _, last = np.unique(here[both][::-1], return_index=True)
    rows = np.sort(both[::-1][last])[::-1]
    words = StringTable()
    here_args = words.encode(reference.calls["args"])[here[rows]]
    there_args = words.encode(candidate.calls["args"])[there[rows]]
    differ = (here_args != there_args) & (here_args >= 0) & (there_args >= 0)  # another tool's dump may lack them
    sites = pairs["site"]
    new = [row for row in rows[differ].tolist() if sites[row] not in told]
    found = sorted(new, key=lambda row: here[row] not in calls)  # stable: its own calls come first
    for row in found[:_MOST]:
        place = TensorPlace.of(pairs, row)
        left, right = reference.calls["args"][int(here[row])], candidate.calls["args"][int(there[row])]
        changes = "; ".join(
            f"`{path or 'arguments'}` is {one} in the reference and {other} in the candidate"
            for path, one, other in list(differences(_parsed(left), _parsed(right)))[:_MOST]
        )
        yield f"The call of {place.module} in step {place.step} has other arguments: {changes}."
    if len(found) > _MOST:
        yield f"{len(found) - _MOST:,} more calls before it have other arguments."


def differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two JSON values differ: path, reference, candidate.

    >>> list(differences({"args": ["<tensor>", 1]}, {"args": ["<tensor>", 2], "kwargs": {"p": 0.1}}))
    [('args.1', '1', '2'), ('kwargs', 'absent', '{"p": 0.1}')]
    """
    if isinstance(left, dict) and isinstance(right, dict):
        keys: list[Any] = list(dict.fromkeys([*left, *right]))
        pairs = [(key, left.get(key, _Absent), right.get(key, _Absent)) for key in keys]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = list(zip(range(len(left)), left, right, strict=True))
    else:
        if left != right or type(left) is not type(right):
            yield path, _shown(left), _shown(right)
        return
    for key, one, other in pairs:
        yield from differences(one, other, f"{path}.{key}" if path else str(key))


def unmatched(pairs: Table, before: int) -> Iterator[str]:
    """Tensors earlier in the order that only one run has."""
    for verdict in (Verdict.ONLY_IN_REFERENCE, Verdict.ONLY_IN_CANDIDATE):
        rows = np.flatnonzero(pairs.coded("verdict").codes[:before] == verdict)
        if len(rows):
            place = TensorPlace.of(pairs, int(rows[-1]))
            many = f"{len(rows):,} tensors are" if len(rows) > 1 else "One tensor is"
            yield f"{many} {verdict.label} before it, the last at {place}."


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
    """Stands where one side has no such argument."""


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


def sentences(
    reference: JoinedRank, candidate: JoinedRank, row_reference: int, row_candidate: int, limit: float
) -> Iterator[str]:
    """In which micro steps a joined row is off, and whether by a mere factor; `limit` is how far off one may be."""
    if row_reference < 0 or row_candidate < 0:
        return
    yield from _where(reference, candidate, row_reference, row_candidate, limit)
    yield from _factor(reference, candidate, row_reference, row_candidate)


def _where(reference: JoinedRank, candidate: JoinedRank, one: int, other: int, limit: float) -> Iterator[str]:
    """Which micro steps are off, of the run that has more of them, if it is not all."""
    try:
        here, there = reference.pieces(one), candidate.pieces(other)
    except RunError:
        return
    kinds = [str(run.tensors["dtype"][row])[:7] == "complex" for run, row in ((reference, one), (candidate, other))]
    if here is None or there is None or kinds[0] != kinds[1] or not here.fits(there._replace(dim=here.dim)):
        return
    finer = "candidate" if len(there.parts) > len(here.parts) else "reference"
    parts = there if finer == "candidate" else here
    wrong = _wrong(here, there, parts, reference, candidate, one, other, limit)
    if 0 < len(wrong) < len(parts.parts):
        run, row = (candidate, other) if finer == "candidate" else (reference, one)
        micro = run.micro(row)
        named = ", ".join(str(micro[number]) for number in wrong)
        yield (
            f"Of the {counted(len(parts.parts), 'micro step')} of the {finer} "
            f"{'only micro ' if len(wrong) == 1 else 'micro '}{named} {'is' if len(wrong) == 1 else 'are'} off."
        )


def _wrong(
    here: Pieces, there: Pieces, parts: Pieces, reference: JoinedRank, candidate: JoinedRank, one: int, other: int,
    limit: float,
) -> list[int]:  # fmt: skip
    """The numbers of the parts that are off by more than the limit."""
    dtypes = str(reference.tensors["dtype"][one]), str(candidate.tensors["dtype"][other])
    absmax = float(reference.tensors.numbers("absmax")[one])
    found: list[int] = []
    begin = 0
    for left, right in stretches(here, there):
        number = max(at for at, bound in enumerate(parts.bounds[:-1]) if bound <= begin)
        begin += left.shape[here.dim]
        apart = contrast(Strided.from_numpy(left, dtypes[0]), Strided.from_numpy(right, dtypes[1]))
        if apart.nonfinite_mismatch or not error_of_values(apart, absmax) <= limit:
            found.append(number)
    return sorted(set(found))


def _factor(reference: JoinedRank, candidate: JoinedRank, one: int, other: int) -> Iterator[str]:
    """Whether the candidate's tensor is the reference's times a number, as a loss that was divided twice makes it."""
    left = {name: float(reference.tensors.numbers(name)[one]) for name in SCALED}
    right = {name: float(candidate.tensors.numbers(name)[other]) for name in SCALED}
    if not all(map(math.isfinite, (*left.values(), *right.values()))) or not left["l2"] or not right["l2"]:
        return
    factor = right["l2"] / left["l2"]
    apart = max(abs(right[name] - factor * left[name]) for name in SCALED)
    if abs(factor - 1) <= SAME_FACTOR or apart > SAME_FACTOR * right["absmax"]:
        return
    counts = [len(run.tables.rows(row)) for run, row in ((reference, one), (candidate, other))]
    text = f"The candidate's is {factor:.5g} times the reference's, by every statistic"
    if any(abs(factor - ratio) <= SAME_FACTOR * ratio for ratio in (counts[0] / counts[1], counts[1] / counts[0])):
        yield (
            f"{text}, and one run has {max(counts)} micro steps where the other has {min(counts)}: is the loss "
            "divided by their number in one run only?"
        )
    else:
        yield f"{text}: a constant factor."
