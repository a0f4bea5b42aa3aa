"""What the page shows first: the answer of a comparison in a sentence, with its evidence; of a run, its alarms."""

from __future__ import annotations

from typing import Any

import numpy as np

from astray.comparison.blame.suspects import Suspect
from astray.comparison.comparison import ComparisonData
from astray.comparison.divergence import Divergence, TensorPlace
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.setup.wording import subject_text
from astray.comparison.verdict import AGREEING
from astray.formatting import figures
from astray.nonfinite.alarm import Alarm, location_of, non_finite_word
from astray.records import Frame
from astray.report.setup import with_ranks
from astray.report.text import (
    answer,
    consequences,
    error_of,
    how_sure,
    notes_of,
    other_line,
    replay_of,
    reported_others,
    suspect_line,
    why_bits_count,
)
from astray.store import CheckpointData, Table
from astray.web.views import CallKey, ComparisonView, ResultView, RunView
from astray.web.wire import Document

MOST_ALARMS = 200
"""Alarms that are listed; a run whose every step is NaN may have thousands."""

MOST_SETTINGS = 200
"""Differences in how the runs were set up that are listed."""

_KEY = ("step", "micro", "call", "recompute", "site", "phase", "role", "path")


def overview_of(view: ResultView) -> Document:
    """The answer of a comparison, or what is wrong in a run."""
    with view.lock:
        if isinstance(view, ComparisonView):
            return _of_comparison(view.comparison)
        assert isinstance(view, RunView), "there are two kinds of view"
        return _of_run(view)


def _of_comparison(comparison: ComparisonData) -> Document:
    first = comparison.first
    return {
        "agree": comparison.same,
        "sentence": answer(comparison),
        "first": None if first is None else _divergence(comparison, first),
        "counts": comparison.counts,
        "sources": comparison.sources,
        "suspects": [_suspect(comparison, suspect) for suspect in comparison.suspects],
        "setup": [_setting(comparison, difference) for difference in comparison.setup[:MOST_SETTINGS]],
        "notes": _setting_notes(comparison) + list(notes_of(comparison)),
        "problems": list(comparison.problems),
    }


def _suspect(comparison: ComparisonData, suspect: Suspect) -> Document:
    return {
        "row": row_of(comparison.pairs, suspect.place, suspect.rank),
        "sentence": suspect_line(suspect, comparison),
        "score": suspect.score,
        "sureness": suspect.sureness,
    }


def _setting_row(comparison: ComparisonData, difference: SetupDifference) -> int | None:
    """The first row of the site that a setting is about."""
    sites = comparison.pairs.coded("site")
    rows = np.flatnonzero(sites.codes == sites.code(difference.site))
    return int(rows[0]) if len(rows) else None


def _setting(comparison: ComparisonData, difference: SetupDifference) -> Document:
    return {
        "row": _setting_row(comparison, difference),
        "sentence": with_ranks(difference, comparison),
        "subject": difference.subject,
        "name": difference.name,
        "reference": "–" if difference.reference is None else subject_text(difference.reference),
        "candidate": "–" if difference.candidate is None else subject_text(difference.candidate),
        "effect": difference.expected_effect,
        "kind": difference.kind,
        "step": difference.step,
        "count": difference.count,
    }


def _setting_notes(comparison: ComparisonData) -> list[str]:
    rest = len(comparison.setup) - MOST_SETTINGS
    return [f"{rest:,} more settings differ; `astray compare … --setup` lists them."] if rest > 0 else []


def _divergence(comparison: ComparisonData, first: Divergence) -> Document:
    place, pairs = first.place, comparison.pairs
    row = row_of(pairs, first.seen if first.seen is not None and not place.role else place, first.rank)
    before = first.previous
    others = comparison.others if comparison.of_checkpoints else reported_others(comparison)
    also = [*comparison.firsts[1:], *others]
    return {
        "row": row,
        "rank": first.rank,
        "step": place.step,
        "micro": place.micro,
        "site": place.site,
        "type": place.type,
        "phase": place.phase,
        "call": place.call,
        "role": place.role,
        "path": place.path,
        "kind": None if row is None else pairs["kind"][row],
        "verdict": first.verdict,
        "cause": first.cause,
        "error": first.error,
        "surprise": first.surprise,
        "measure": first.measure,
        "deviation": first.deviation,
        "limit": first.limit,
        "given": first.given,
        "rule": first.rule,
        "siblings": first.siblings,
        "sureness": first.sureness,
        "settings": [
            {"row": _setting_row(comparison, setting), "sentence": with_ranks(setting, comparison)}
            for setting in first.settings
        ],
        "sentence": place.full + (f", on rank {first.rank}" if len(comparison.reference.ranks) > 1 else ""),
        "evidence": [{"text": text} for text in _evidence(first, comparison.exact)],
        "after": f"After it, {consequences(first)}.",
        "growth": [{"step": step, "error": error} for step, error in first.growth],
        "inside": [f"{site} ({kind})" if kind else site for site, kind in first.enclosing],
        "where": frame_of(first.frame),
        "before": None if before is None else _link(pairs, before, first.rank, f"{before}: {before.verdict}"),
        "also": [
            _link(pairs, other.place, other.rank, other_line(other, comparison)) for other in also
        ],
    }  # fmt: skip


def _evidence(first: Divergence, exact: bool) -> list[str]:
    """The error, how sure it is, why bits count if they do, and the evidence without what was set differently."""
    sure = [f"How sure: {text}." for text in how_sure(first, exact)]
    bits = [f"Exact: {text}" for text in why_bits_count(first)] if exact else []
    replayed = [f"Replay: {text}." for text in replay_of(first)]
    return [f"Error: {error_of(first)}.", *sure, *bits, *replayed, *first.evidence[len(first.settings) :]]


def _link(pairs: Table, place: TensorPlace, rank: int, sentence: str) -> Document:
    return {"row": row_of(pairs, place, rank), "sentence": sentence}


def row_of(pairs: Table, place: TensorPlace, rank: int) -> int | None:
    """The row of a place, for a place without a tensor the first row of its call; None when there is none."""
    mask = pairs.numbers("rank") == rank
    for name in _KEY:
        wanted: Any = getattr(place, name)
        if name in ("role", "path") and not place.role:
            continue
        column = pairs[name]
        if name in ("step", "micro", "call", "recompute"):
            mask = mask & (column == wanted)
        elif wanted or column.code("") >= 0:
            mask = mask & (column.codes == column.code(wanted))
        else:
            mask = mask & (column.codes < 0)  # null reads as an empty text
    rows = np.flatnonzero(mask)
    wrong = rows[~np.isin(pairs.coded("verdict").codes[rows], AGREEING)]
    return next((int(found[0]) for found in (wrong, rows) if len(found)), None)


def frame_of(frame: Frame | None) -> Document | None:
    """A line of the program."""
    return None if frame is None else frame._asdict()


def _of_run(view: RunView) -> Document:
    run, rows = view.run, view.first_rows()
    alarms, notes = view.findings[0], list(view.findings[1])
    listed = [_alarm(alarm, rows) for alarm in alarms[:MOST_ALARMS]]
    if len(alarms) > len(listed):
        notes.append(
            f"{len(alarms) - len(listed):,} more alarms are not listed; `astray show {run.path} --alarms` does."
        )
    tensors = sum(len(rank.tensors) for rank in run.ranks.values())
    facts = [figures.counted(len(run.steps), "step"), figures.counted(len(run.ranks), "rank")]
    counts = {"alarms": len(alarms), "steps": len(run.steps), "ranks": len(run.ranks), "tensors": tensors}
    if isinstance(run, CheckpointData):
        sentence = f"A checkpoint of {figures.counted(tensors, 'tensor')}."
    elif alarms:
        sentence = _alarm_sentence(alarms[0])
    elif notes:
        sentence = "No NaN or infinity is seen to reach a result, a gradient or a weight; notes say what is missing."
    else:
        sentence = f"No NaN or infinity reached a result, a gradient or a weight in {' on '.join(facts)}."
    return {"sentence": sentence, "counts": counts, "alarms": listed, "notes": notes, "problems": run.problems}


def _alarm_sentence(alarm: Alarm) -> str:
    """NaN or infinity, where it comes from, and its kind where that is known."""
    kind = "" if alarm.kind.word == "unknown" else f": {alarm.kind.word}"
    return f"{non_finite_word(alarm)} from {location_of(alarm)}{kind}."


def _alarm(alarm: Alarm, rows: dict[CallKey, int]) -> Document:
    origin = alarm.origin
    return {
        "sentence": _alarm_sentence(alarm),
        "row": rows.get((alarm.rank, alarm.step, origin.site, origin.phase, origin.call)),
        "step": alarm.step,
        "rank": alarm.rank,
        "kind": alarm.kind.word,
        "text": alarm.kind.text,
        "advice": alarm.kind.advice,
        "surfaced": [str(point) for point in alarm.surfaced],
        "chain": [call.name for call in alarm.chain],
        "later": list(alarm.later),
        "where": frame_of(origin.frame),
    }
