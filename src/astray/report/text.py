"""The report for a terminal: its first screen names the first divergence, why it is one, and what to look at.

Takes a `ComparisonData` and returns text. Plain by default, so that a file or a pipe gets no escape codes; sentences
are folded at the given width, and tables are narrow enough that they need not be.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import numpy as np

from astray.comparison.blame.clues import NEGLIGIBLE, is_negligible
from astray.comparison.blame.explanation import CERTAIN, UNKNOWN, times
from astray.comparison.blame.first import related
from astray.comparison.blame.suspects import Suspect
from astray.comparison.comparison import ComparisonData
from astray.comparison.divergence import Divergence, Side, TensorPlace
from astray.comparison.measure.metrics import SUMMING
from astray.comparison.problems import different_settings, span
from astray.comparison.verdict import AGREEING, BAD, SENTENCES, Reason, Verdict
from astray.formatting import figures
from astray.formatting.page import BOLD, DIM, GREEN, LABEL, MARGIN, RED, WIDTH, YELLOW, TextPage
from astray.records import Statistics
from astray.report import checkpoints
from astray.report.setup import add_setup
from astray.wording import printable

_MOST_STEPS = 4
_MOST_NOTES = 8
_MOST_SUSPECTS = 3
_WORTH_REPORTING = 0.7
"""The least score of a suspect that is reported; 1 counts as wrong. Of thirty pairs of right runs none had more."""

_WITHIN_ROUNDING = (Verdict.ROUNDING.label, Verdict.DRIFTING.label)
_WITHOUT_SIZE = (Verdict.SHAPE.label, Verdict.DTYPE.label, Verdict.NON_FINITE.label)

_SAID_ELSEWHERE = tuple(
    SENTENCES[reason]
    for reason in (
        Reason.VICTIM,
        Reason.SCALED,
        Reason.REPLAYED_REFERENCE,
        Reason.REPLAYED_CANDIDATE,
        Reason.CAME_IN,
    )
)
"""Reasons that a report of a divergence gives under another heading."""

_Row = tuple[str, str, str, str]


def render(
    comparison: ComparisonData, *, width: int = WIDTH, table_width: int | None = None, colour: bool = False
) -> str:
    """The report as text. `colour` adds ANSI colours; set it when writing to a terminal."""
    page = TextPage(width, colour, table_width)
    _header(page, comparison)
    _settings(page, comparison)
    add_setup(page, comparison)
    if comparison.first is not None and comparison.of_checkpoints:
        _differences(page, comparison, comparison.first)
    elif comparison.first is not None:
        _divergence(page, comparison, comparison.first)
        _other_ranks(page, comparison)
        _others(page, comparison)
    else:
        _agreement(page, comparison)
    _summary(page, comparison)
    return page.text()


def _header(page: TextPage, comparison: ComparisonData) -> None:
    facts = [] if comparison.of_checkpoints else [figures.counted(len(comparison.steps), "step")]
    if len(comparison.reference.ranks) > 1:
        facts.append(figures.counted(len(comparison.reference.ranks), "rank"))
    if not comparison.of_checkpoints:
        facts.append(figures.counted(comparison.calls, "call"))
    tensors = figures.counted(int(comparison.matched.sum()), "tensor")
    facts.append(f"{tensors} compared by {_listed([source for source in comparison.sources if source != 'none'])}")
    names = printable(f"{comparison.reference.path}  →  {comparison.candidate.path}")
    line = f"{names}        {' · '.join(facts)}"
    if len(line) <= page.width:
        page.line(line.replace(names, page.paint(names, BOLD)))
    else:
        page.line(page.paint(names, BOLD))
        for folded in textwrap.wrap(" · ".join(facts), page.width):
            page.line(folded)
    page.line()


def _settings(page: TextPage, comparison: ComparisonData) -> None:
    """That the runs were recorded with different settings, so that the report is of what they share."""
    for text in different_settings(comparison.reference, comparison.candidate):
        for line in page.folded(text, later_indent=" " * MARGIN):
            page.line(page.paint(line, YELLOW))
        page.line()


def _divergence(page: TextPage, comparison: ComparisonData, first: Divergence) -> None:
    for line in page.folded(f"✗ {answer(comparison)}", later_indent=" " * MARGIN):
        page.line(page.paint(line, RED))
    if first.frame is not None:
        at = f"{PurePath(first.frame.file).name}:{first.frame.line} in {first.frame.function}"
        page.code(at, first.frame.code)
    if first.enclosing:
        page.entry("inside", " › ".join(f"{site} ({kind})" if kind else site for site, kind in first.enclosing))
    page.entry("error", error_of(first))
    page.entry("how sure", how_sure(first, comparison.exact))
    page.entry("exact", why_bits_count(first) if comparison.exact else ())
    page.entry("replay", replay_of(first))
    page.entry("cause", cause_of(first))
    _sides(page, first)
    if first.previous is not None:
        page.entry("before it", f"{_short(first.previous, first.place)}: {_verdict(first.previous)}")
    page.entry("after it", consequences(first))
    page.entry("also", first.evidence[len(first.settings) + 1 :])
    page.line()


def replay_of(divergence: Divergence) -> tuple[str, ...]:
    """What executing its call again in both runs says; empty where that was not tried."""
    return () if divergence.replay is None else (str(divergence.replay),)


def cause_of(divergence: Divergence) -> tuple[str, ...]:
    """Why it diverged, in sentences: what was set differently, and what the tensors show."""
    return divergence.evidence[: len(divergence.settings) + 1]


def _where(divergence: Divergence, several: bool) -> str:
    return divergence.place.full + (f", on rank {divergence.rank}" if several else "")


def _differences(page: TextPage, comparison: ComparisonData, first: Divergence) -> None:
    """Which tensors of two checkpoints differ, and the one that is furthest off."""
    for line in page.folded(f"✗ {_furthest(comparison, first)}", later_indent=" " * MARGIN):
        page.line(page.paint(line, RED))
    page.entry("error", error_of(first))
    page.entry("exact", why_bits_count(first) if comparison.exact else ())
    page.entry("also", first.evidence[1:])
    _sides(page, first)
    if first.victims:
        checkpoints.list_worst(page, [first, *comparison.others], first.victims + 1)


def _furthest(comparison: ComparisonData, first: Divergence) -> str:
    """How many tensors of two checkpoints differ, and which is furthest off."""
    count = f"{first.victims + 1:,} of {figures.counted(int(comparison.matched.sum()), 'tensor')}"
    return f"{count} differ; furthest off: {first.place}" if first.victims else f"{count} differs: {first.place}"


def error_of(divergence: Divergence) -> str:
    """How far off the tensor is, in the terms of its verdict, and what explains how much of it."""
    judged, judged_name = divergence.judged, divergence.judged_name
    if math.isfinite(divergence.deviation) and math.isfinite(judged.error) and judged.verdict not in _WITHOUT_SIZE:
        parts = [divergence.explained, *([] if judged_name else _metrics(divergence)), *_remarks(judged)]
    elif judged_name:
        parts = [f"{judged_name}: {'; '.join(_remarks(judged)) or _amount(divergence, judged.error)}"]
    else:
        return _unexplained(divergence)
    if judged_name and divergence.role and math.isfinite(divergence.error):
        parts.append(f"its {divergence.place.tensor} is off by {_amount(divergence, divergence.error)}")
    return "; ".join(parts)


def _unexplained(divergence: Divergence) -> str:
    """How far off a tensor is that no rounding could bring so far."""
    reference, candidate, place = divergence.reference, divergence.candidate, divergence.place
    if divergence.verdict == Verdict.SHAPE.label:
        same = f"; {SENTENCES[Reason.RESHAPED]}" if SENTENCES[Reason.RESHAPED] in place.reason else ""
        return f"shape {figures.shape(reference.shape)} against {figures.shape(candidate.shape)}{same}"
    if divergence.verdict == Verdict.DTYPE.label:
        return f"{reference.dtype} against {candidate.dtype}, which are different kinds of number"
    if divergence.verdict == Verdict.NON_FINITE.label:
        counts = f"{figures.non_finite(reference.statistics)} against {figures.non_finite(candidate.statistics)}"
        return f"elements that are not finite: {counts}"
    if math.isnan(divergence.error) and SENTENCES[Reason.SAME_STATISTICS] in place.reason:
        return "the values differ in a way the statistics do not show; record with keep='tensors' to see how"
    if math.isnan(divergence.error):
        return place.reason or "not known"
    if math.isinf(divergence.error):
        size = (
            f"; the candidate reaches {figures.error(divergence.magnitude)}"
            if not math.isnan(divergence.magnitude)
            else ""
        )
        return f"{place.reason}{size}"
    allowed = (
        f"rounding explains at most {figures.error(divergence.limit)}"
        if divergence.limit
        else f"{reference.dtype} does not round"
    )
    return "; ".join([_amount(divergence, divergence.error), allowed, *_metrics(divergence), *_remarks(place)])


def how_sure(divergence: Divergence, exact: bool = False) -> list[str]:
    """How sure it is that this is wrong, and why, in a line; empty where the error shows it.

    exact: every bit counts, so that fingerprints are enough.
    """
    if divergence.sureness == UNKNOWN and exact:
        return ["certain that bits differ; record with keep='stats' to learn by how much"]
    if divergence.sureness == UNKNOWN:
        return [f"{UNKNOWN}: fingerprints differ by rounding as well; record with keep='stats' to tell"]
    if divergence.settings and divergence.verdict in _WITHIN_ROUNDING:
        return ["certain that it was set differently, though the error is no more than rounding"]
    beyond_doubt = divergence.judged.verdict in _WITHOUT_SIZE or not math.isfinite(divergence.judged.error)
    if divergence.rule == "tolerance" or beyond_doubt or not divergence.surprise > 1:
        return []
    if math.isinf(divergence.surprise):
        return [f"{divergence.sureness}: nothing explains it"]
    return [f"{divergence.sureness}: {times(divergence.surprise)} times as far off as can be explained"]


def why_bits_count(divergence: Divergence) -> list[str]:
    """Which bits differ where the runs should be bit-identical, and why that counts; empty where more is wrong."""
    if divergence.judged.verdict in _WITHOUT_SIZE:
        return []
    what = f"{divergence.judged_name}: " if divergence.judged_name else ""
    different, ulp = divergence.metrics.get("different"), divergence.metrics.get("max_ulp")
    elements = figures.counted(math.prod(divergence.reference.shape), "element")
    if divergence.judged_name or different is None or different == 0:
        bits = f"{what}fingerprints differ, so at least one bit does"
    else:
        bits = f"{different:,.0f} of {elements} {'has' if different == 1 else 'have'} other bits"
        if ulp is not None and math.isfinite(ulp):
            bits += f", by up to {figures.counted(int(ulp), 'representable number')}"
    rounding = (
        " Without --exact it passes as rounding."
        if divergence.rule == "bits" and math.isfinite(divergence.error)
        else ""
    )
    return [
        f"{bits}.{rounding} The same program with the same versions, kernels and threads on the same machine computes "
        "the same bits: one that differs has a cause, however small."
    ]


def _remarks(place: TensorPlace) -> Iterator[str]:
    """Further reasons why a tensor was judged as it was."""
    return (text for text in place.reason.split("; ") if text and text not in _SAID_ELSEWHERE)


def _amount(divergence: Divergence, error: float) -> str:
    """How far off a tensor is, and by what it was measured if not by every value."""
    amount = f"{figures.error(error)} relative"
    if divergence.measured_by == "values":
        return amount
    if divergence.measured_by == "statistics" or _seen_by_statistics_alone(divergence):
        return f"at least {amount} (by statistics)"
    return f"{amount} (by {divergence.measured_by})"


def _seen_by_statistics_alone(divergence: Divergence) -> bool:
    """Whether the values that were kept, a slice or a sample, are the same on both sides."""
    return divergence.metrics.get("different") == 0


def _metrics(divergence: Divergence) -> Iterator[str]:
    if _seen_by_statistics_alone(divergence):
        return
    if "max_abs" in divergence.metrics:
        yield f"largest difference {figures.error(divergence.metrics['max_abs'])}"
    if "cosine" in divergence.metrics:
        yield f"cosine {divergence.metrics['cosine']:.6f}"
    if "different" in divergence.metrics:
        yield f"{figures.counted(int(divergence.metrics['different']), 'element')} differ"


def _sides(page: TextPage, divergence: Divergence) -> None:
    """Both tensors side by side."""
    reference, candidate = divergence.reference, divergence.candidate
    rows = [
        ("tensor", _form(reference), _form(candidate), ""),
        *_statistics(reference.statistics, candidate.statistics),
    ]
    head = ("", "reference", "candidate", "difference" if any(gap for *_, gap in rows) else "")
    rows, wide = _fit(head, rows, page.width - MARGIN - LABEL)
    head = head if any(gap for *_, gap in rows) else (*head[:3], "")
    page.line()
    page.line(" " * (MARGIN + LABEL) + page.paint(f"{head[1]:<{wide[1]}}{head[2]:<{wide[2]}}{head[3]}", DIM))
    for name, left, right, gap in rows:
        shown = f"{right:<{wide[2]}}{gap}"
        shown = shown if left == right else page.paint(shown, YELLOW)
        page.line(" " * MARGIN + page.paint(name.ljust(LABEL), DIM) + f"{left:<{wide[1]}}{shown}")
    page.line()


def _fit(head: _Row, rows: list[_Row], width: int) -> tuple[list[_Row], list[int]]:
    """The rows and the widths of their columns: closer together, without the difference, or cut, until they fit."""
    for space in (3, 2):
        sizes = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        wide = [size + space for size in sizes]
        if wide[1] + wide[2] + sizes[3] <= width:
            return rows, wide
    if sizes[1] + sizes[2] + 2 > width:
        half = (width - 2) // 2
        rows = [(name, _cut(left, half), _cut(right, half), "") for name, left, right, _ in rows]
        return rows, [half + 2] * 4
    return [(name, left, right, "") for name, left, right, _ in rows], wide


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _form(side: Side) -> str:
    return f"{printable(side.dtype)} {figures.shape(side.shape)}"


def _statistics(reference: Statistics | None, candidate: Statistics | None) -> Iterator[tuple[str, str, str, str]]:
    if reference is None and candidate is None:
        return
    for name in ("mean", "std", "l2", "min", "max"):
        left, right = getattr(reference, name, None), getattr(candidate, name, None)
        gap = ""
        if reference is not None and left is not None and right is not None:
            gap = figures.change(_beyond_summing(right - left, left, reference.absmax))
        yield name, figures.statistic(left), figures.statistic(right), gap
    if any(side is not None and side.nan + side.inf for side in (reference, candidate)):
        yield "NaN, Inf", figures.non_finite(reference), figures.non_finite(candidate), ""


def _beyond_summing(gap: float, *sizes: float | None) -> float:
    """The difference of two statistics, or 0 where adding up in another order explains it."""
    return gap if abs(gap) > SUMMING * max(abs(size or 0.0) for size in sizes) else 0.0


def consequences(divergence: Divergence) -> str:
    """What the divergence led to."""
    if not divergence.victims:
        return "nothing else is wrong"
    victims = f"{figures.counted(divergence.victims, 'more row')} {'are' if divergence.victims != 1 else 'is'} wrong"
    later = [(step, error) for step, error in divergence.growth if step > divergence.step and error > 0]
    if not later:
        return victims
    shown = later if len(later) <= _MOST_STEPS else [*later[: _MOST_STEPS - 1], later[-1]]
    gap = "… " if len(later) > _MOST_STEPS else ""
    texts = [f"{figures.error(error)} at step {step}" for step, error in shown]
    texts[-1] = gap + texts[-1]
    return f"{victims}; the same tensor is off by {', '.join(texts)}"


def _other_ranks(page: TextPage, comparison: ComparisonData) -> None:
    """Which ranks agree, and the first divergence of each rank that does not."""
    others = comparison.firsts[1:]
    wrong = {first.rank for first in comparison.firsts}
    agreeing = sorted({*np.unique(comparison.pairs.numbers("rank")[comparison.matched]).tolist()} - wrong)
    if agreeing and comparison.first is not None:
        agree = f"rank {agreeing[0]} agrees" if len(agreeing) == 1 else f"ranks {span(agreeing)} agree"
        alone = f"rank {comparison.first.rank} alone is off" if not others else f"{len(wrong)} ranks are off"
        page.entry("ranks", f"{alone}; {agree}")
        if not others:
            page.line()
    if others:
        shown = [f"rank {first.rank}: {first.place} ({first.cause})" for first in others[:_MOST_NOTES]]
        page.entry("other ranks", shown)
        if len(others) > _MOST_NOTES:
            page.entry("", f"and {len(others) - _MOST_NOTES:,} more")
        page.line()


def _others(page: TextPage, comparison: ComparisonData) -> None:
    """What else is wrong by itself or may be, the most surprising first."""
    before = len(page.lines)
    settings = comparison.first.settings if comparison.first is not None else ()
    same = [other for other in comparison.others if any(setting in settings for setting in other.settings)]
    if same:
        page.entry("same cause", f"{figures.counted(len(same), 'more place')}, first {same[0].place}")
    others = reported_others(comparison)
    set_up = [other for other in others if other.settings and other not in same]
    page.entry("other causes", [other_line(other, comparison) for other in set_up[:_MOST_SUSPECTS]])
    rest = [other for other in others if not other.settings and not _is_counted(comparison.first, other)]
    rest.sort(key=lambda other: -_score(other))
    shown = rest[:_MOST_SUSPECTS]
    if shown:
        clean = all(other.clean for other in shown)
        why = "not its victims, for their inputs agree" if clean else "not explained by what they came from"
        more = [f"and {len(rest) - len(shown):,} more"] if len(rest) > len(shown) else []
        page.entry("by itself", [f"These are {why}:", *(other_line(other, comparison) for other in shown), *more])
    if comparison.first is not None and not _overshadows(comparison.first):
        divergences = (*comparison.firsts, *comparison.others)
        reported = [place for each in divergences for place in (each.place, each.judged)]
        suspects = [
            suspect for suspect in suspects_apart_from(comparison, reported) if suspect.score >= _WORTH_REPORTING
        ]
        page.entry("suspects", [suspect_line(each, comparison) for each in suspects[: _MOST_SUSPECTS - len(shown)]])
    if len(page.lines) > before:
        page.line()


def reported_others(comparison: ComparisonData) -> list[Divergence]:
    """The divergences that are reported besides the first.

    An error that is far from rounding may look odd wherever it gets to. So when the first divergence of a rank is
    certain, another one of that rank is reported only if it is certain too, has a setting as its cause, or has
    identical inputs.
    """
    certain = {first.rank for first in comparison.firsts if _overshadows(first)}
    return [
        other
        for other in comparison.others
        if other.rank not in certain or other.settings or other.clean or other.sureness == CERTAIN
    ]


def _overshadows(divergence: Divergence) -> bool:
    """Whether it is certain by its numbers, and not only because it was set differently."""
    return divergence.sureness == CERTAIN and not (divergence.settings and divergence.verdict in _WITHIN_ROUNDING)


def _is_counted(first: Divergence | None, other: Divergence) -> bool:
    """Whether it is one of the parameters that the first divergence counts besides its own."""
    return (
        first is not None
        and first.cause == other.cause == "parameter"
        and (first.rank, first.step) == (other.rank, other.step)
        and first.other_parameters + first.other_buffers > 0
    )


def _score(divergence: Divergence) -> float:
    """How surprising a divergence is. What has no number for it (another shape, NaN, integers) is beyond doubt."""
    return math.inf if math.isnan(divergence.surprise) or not divergence.surprise > 1 else divergence.surprise


def _surprise_line(comparison: ComparisonData, place: TensorPlace, rank: int, score: float, why: str) -> str:
    """A place that may be wrong by itself: how surprising it is, and why."""
    on = f", on rank {rank}" if len(comparison.reference.ranks) > 1 else ""
    if math.isinf(score):
        return f"{place}{on}: {why}"
    unit = "times what can be explained" if score > 1 else "of what would count as wrong"
    return f"{place}{on} ({times(score)} {unit}): {why}"


def other_line(divergence: Divergence, comparison: ComparisonData) -> str:
    """A further divergence: where it is, how surprising, and why."""
    if divergence.settings:
        return f"{divergence.place}: {divergence.settings[0].sentence}"
    return _surprise_line(comparison, divergence.place, divergence.rank, _score(divergence), error_of(divergence))


def suspects_apart_from(comparison: ComparisonData, reported: Sequence[TensorPlace] = ()) -> list[Suspect]:
    """The suspects without those that are a reported place, or inside or around one."""
    return [
        suspect
        for suspect in comparison.suspects
        if not any(suspect.phase == place.phase and related(suspect.site, place.site) for place in reported)
    ]


def suspect_line(suspect: Suspect, comparison: ComparisonData) -> str:
    """A suspect: where it is, how surprising, and why."""
    replayed = suspect.replay is not None and suspect.replay.finding != "not replayed"
    why = f"{suspect}; replayed: {suspect.replay}" if replayed else str(suspect)
    return _surprise_line(comparison, suspect.place, suspect.rank, suspect.score, why)


def most_surprising(comparison: ComparisonData) -> str:
    """A sentence about the first suspect where nothing diverged; empty where all is identical."""
    if not comparison.suspects:
        return ""
    return f"The most surprising call is {suspect_line(comparison.suspects[0], comparison)}."


def answer(comparison: ComparisonData) -> str:
    """The first line of the report: the first divergence, or that there is none."""
    first = comparison.first
    if first is None:
        return _agreeing(comparison)
    if comparison.of_checkpoints:
        return _furthest(comparison, first)
    return f"First divergence: {_where(first, several=len(comparison.reference.ranks) > 1)}"


def _agreeing(comparison: ComparisonData) -> str:
    """How many tensors agree when none is wrong, and what else there is to say."""
    counts = comparison.counts
    agreeing = {verdict.label: counts[verdict.label] for verdict in AGREEING if counts[verdict.label]}
    kinds = ", ".join(f"{count:,} {label}" for label, count in agreeing.items())
    tensors = figures.counted(sum(agreeing.values()), "tensor")
    agree = "agrees" if sum(agreeing.values()) == 1 else "agree"
    of_steps = "" if comparison.of_checkpoints else f" of {figures.counted(len(comparison.steps), 'step')}"
    text = f"No divergence: {tensors}{of_steps} {agree} ({kinds})."
    if not comparison.same:
        which = "checkpoint" if comparison.of_checkpoints else "run"
        text += f" Some are only in one {which}." if comparison.missing.any() else ""
        text += " Some could not be read." if comparison.of_checkpoints and counts[Verdict.UNKNOWN.label] else ""
    return text


def _agreement(page: TextPage, comparison: ComparisonData) -> None:
    """The report when no tensor is wrong."""
    counts = comparison.counts
    if comparison.same:
        page.line(page.paint(f"✓ {_agreeing(comparison)}", GREEN))
    else:
        page.line(page.paint(f"≠ {_agreeing(comparison)}", YELLOW))
        wrong = sum(counts[verdict.label] for verdict in BAD)
        if wrong:
            differ = "differs" if wrong == 1 else "differ"
            page.entry("inside", f"{figures.counted(wrong, 'tensor')} {differ} inside calls whose results agree.")
    if comparison.suspects:
        rest = [suspect for suspect in comparison.suspects[1:_MOST_SUSPECTS] if suspect.score >= _WORTH_REPORTING]
        page.entry("suspects", [most_surprising(comparison), *(suspect_line(each, comparison) for each in rest)])
    if counts[Verdict.ROUNDING.label] or counts[Verdict.DRIFTING.label]:
        page.entry("largest", f"{figures.error(_largest(comparison).error)} at {_largest(comparison)}")
    if (counts[Verdict.ROUNDING.label] or counts[Verdict.DRIFTING.label]) and not comparison.of_checkpoints:
        page.entry("begins", f"the first tensor that is not identical is at {_first_with(comparison, *AGREEING[1:])}")
    page.line()


def _largest(comparison: ComparisonData) -> TensorPlace:
    return TensorPlace.of(comparison.pairs, int(np.nanargmax(comparison.pairs.numbers("error"))))


def _first_with(comparison: ComparisonData, *verdicts: Verdict) -> TensorPlace:
    return TensorPlace.of(comparison.pairs, int(np.argmax(np.isin(comparison.pairs.coded("verdict").codes, verdicts))))


def _summary(page: TextPage, comparison: ComparisonData) -> None:
    counts = {label: count for label, count in comparison.counts.items() if count}
    page.entry("verdicts", " · ".join(f"{label} {count:,}" for label, count in counts.items()), margin=0)
    in_header = different_settings(comparison.reference, comparison.candidate)
    notes = [*notes_of(comparison), *(problem for problem in comparison.problems if problem not in in_header)]
    page.entry("notes", notes[:_MOST_NOTES], margin=0)
    if len(notes) > _MOST_NOTES:
        page.entry("", f"and {len(notes) - _MOST_NOTES:,} more, in the JSON report", margin=0)


def notes_of(comparison: ComparisonData) -> Iterator[str]:
    for verdict in (Verdict.ONLY_IN_REFERENCE, Verdict.ONLY_IN_CANDIDATE):
        count = comparison.counts[verdict.label]
        if count:
            are = "are" if count != 1 else "is"
            of_verdict = comparison.pairs.coded("verdict").codes == verdict
            on_detours = comparison.detours & of_verdict
            by_mapping = comparison.without_counterpart & of_verdict & ~on_detours
            yield (
                f"{figures.counted(count, 'tensor')} {are} {verdict.label}, first {_first_with(comparison, verdict)}."
                + _detour_sentence(count, int(np.count_nonzero(on_detours)))
                + _mapping_sentence(count, int(np.count_nonzero(by_mapping)))
            )
    complete = comparison.reference.complete and comparison.candidate.complete  # else --allow-missing hides it
    if comparison.first is None and complete and comparison.missing.any():
        yield "Exit code 1 is for tensors that are only in one run; if they may be, compare with --allow-missing."
    count = comparison.counts[Verdict.UNKNOWN.label]
    if count:
        place = _first_with(comparison, Verdict.UNKNOWN)
        yield f"{figures.counted(count, 'tensor')} could not be compared, first {place}: {place.reason}."


def _detour_sentence(count: int, detours: int) -> str:
    """How many of the tensors that are in one run only lie on another way to the same result."""
    if not detours:
        return ""
    which = "They lie" if count == detours > 1 else "It lies" if count == detours else f"{detours:,} of them lie"
    return f" {which} on another way to results that agree."


def _mapping_sentence(count: int, named: int) -> str:
    """How many of the tensors that are in one run only have no counterpart, as the mapping says."""
    if not named:
        return ""
    which = "They have" if count == named > 1 else "It has" if count == named else f"{named:,} of them have"
    return f" {which} no counterpart, as the mapping says."


def _short(place: TensorPlace, beside: TensorPlace) -> str:
    """A place without what it shares with another."""
    parts = [f"step {place.step}"] if place.step != beside.step else []
    parts += [place.phase] if place.phase != beside.phase else []
    return ", ".join([*parts, place.module, place.tensor])


def _verdict(place: TensorPlace) -> str:
    if is_negligible(place):
        return NEGLIGIBLE
    known = place.error and not math.isnan(place.error)
    return f"{place.verdict} ({figures.error(place.error)})" if known else place.verdict


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
