"""A Comparison as JSON, for scripts and for continuous integration.

The document is one object:

    schema        1
    reference, candidate        paths of the runs
    same          whether every tensor is in both runs and agrees
    steps         the step numbers that have rows
    tensors, calls              how many rows, and how many calls of the reference
    counts        verdict → rows
    sources       what the pairs were judged by → pairs
    problems      sentences about what limits the comparison
    setup         what was set differently, those first that change results: the fields of `SetupDifference`, the first
                  100 of its sites, and `count`, in how many places it is so
    first         the first divergence, or null: the fields of `Divergence`, with `place` spread into it; where none of
                  the call's own tensors is wrong, `role` and `path` are empty and the numbers are those of `seen`
    firsts        the same for every rank that diverged, the earliest first
    others        those after the first of their rank that it does not explain
    suspects      the calls that are most surprising, the most surprising first, at most 10, also where nothing
                  diverged: the place of the tensor, and the fields of `Suspect`, with `why` in words
    differences   the rows that do not agree, in order, at most 1,000: key, verdict, error, what the row was judged by,
                  and how surprising it is
    differences_total           how many there are in all; pairs.csv has every one

A number that is not known is null; an infinite one is the string "inf" or "-inf". There is never a bare NaN, and the
value of a bad element is the string "nan".
docs/reference/comparison.schema.json is the machine-readable schema, with every field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from astray.comparison.blame.suspects import Suspect
from astray.comparison.comparison import ComparisonData
from astray.comparison.divergence import Divergence, TensorPlace
from astray.comparison.judge.replays import ReplayedPair
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import AGREEING
from astray.records import Statistics
from astray.report.atomic_files import atomic_file
from astray.wording import as_utf8

SCHEMA = 1
MOST_DIFFERENCES = 1000
MOST_SITES = 100

_JUDGED = ("source", "rule", "surprise", "measure", "deviation", "limit", "given", "siblings")


def write_json(comparison: ComparisonData, file: Path) -> Path:
    """Write the document; returns its path."""
    text = json.dumps(document(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    with atomic_file(file) as draft:
        draft.write_bytes(as_utf8(text + "\n"))  # what UTF-8 cannot hold becomes a JSON escape
    return file


def document(comparison: ComparisonData) -> dict[str, Any]:
    """The comparison in plain Python objects that JSON can hold."""
    differing = np.flatnonzero(~np.isin(comparison.pairs.coded("verdict").codes, AGREEING))
    firsts = [_divergence(first) for first in comparison.firsts]
    content = {
        "schema": SCHEMA,
        "reference": str(comparison.reference.path),
        "candidate": str(comparison.candidate.path),
        "same": comparison.same,
        "steps": comparison.steps,
        "tensors": len(comparison.pairs),
        "calls": comparison.calls,
        "counts": comparison.counts,
        "sources": comparison.sources,
        "problems": comparison.problems,
        "setup": [setup_entry(difference) for difference in comparison.setup],
        "first": firsts[0] if firsts else None,
        "firsts": firsts,
        "others": [_divergence(other) for other in comparison.others],
        "suspects": [_suspect(suspect) for suspect in comparison.suspects],
        "differences": [_difference(comparison, row) for row in differing[:MOST_DIFFERENCES].tolist()],
        "differences_total": len(differing),
    }
    return {name: plain(value) for name, value in content.items()}


def plain(value: Any) -> Any:
    """The value as JSON can hold it.

    >>> plain({"error": float("nan"), "limit": float("inf"), "shape": (2, 3)})
    {'error': None, 'limit': 'inf', 'shape': [2, 3]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _divergence(divergence: Divergence) -> dict[str, Any]:
    fields = {field.name: getattr(divergence, field.name) for field in dataclasses.fields(divergence)}
    del fields["order"]
    place = fields.pop("place")
    fields |= {"judged": divergence.judged, "sureness": divergence.sureness, "replay": _replay(divergence.replay)}
    fields |= {"settings": [setup_entry(setting) for setting in divergence.settings]}
    fields = {name: _place(value) if isinstance(value, TensorPlace) else value for name, value in fields.items()}
    for side in ("reference", "candidate"):
        cells = {field.name: getattr(fields[side], field.name) for field in dataclasses.fields(fields[side])}
        fingerprint = cells["fingerprint"]
        fields[side] = cells | {"fingerprint": None if fingerprint is None else f"{fingerprint:016x}"}
        fields[side]["statistics"] = _statistics(cells["statistics"])
    return _place(place) | fields


def _replay(replay: ReplayedPair | None) -> dict[str, Any] | None:
    """What executing a call again says, with `why` in words."""
    if replay is None:
        return None
    return {
        "finding": replay.finding,
        "why": str(replay),
        "reference": replay.reference,
        "candidate": replay.candidate,
    }


def _place(place: TensorPlace) -> dict[str, Any]:
    cells = dataclasses.asdict(place)
    del cells["weight"]  # only used to word the place
    return cells


def _suspect(suspect: Suspect) -> dict[str, Any]:
    numbers = {
        name: getattr(suspect, name) for name in ("score", "measure", "limit", "given", "rule", "siblings", "furthest")
    }
    return (
        {"rank": suspect.rank}
        | _place(suspect.place)
        | numbers
        | {"deviation": suspect.error, "sureness": suspect.sureness, "why": str(suspect)}
        | {"replay": _replay(suspect.replay)}
    )


def setup_entry(difference: SetupDifference) -> dict[str, Any]:
    """A difference in how the runs were set up."""
    fields = {field.name: getattr(difference, field.name) for field in dataclasses.fields(difference)}
    return fields | {"sites": difference.sites[:MOST_SITES], "count": difference.count}


def _statistics(statistics: Statistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    value = statistics.first_bad_value
    return statistics._asdict() | {"first_bad_value": None if value is None else str(value)}


def _difference(comparison: ComparisonData, row: int) -> dict[str, Any]:
    cells = comparison.pairs[list(_JUDGED)].row(row)
    words = {name: cells[name] or "" for name in ("source", "rule", "measure")}
    return {"rank": int(comparison.pairs["rank"][row])} | cells | words | _place(TensorPlace.of(comparison.pairs, row))
