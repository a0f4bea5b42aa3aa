"""Everything about one row: its numbers on both sides, its values, the line that made it, and links to other rows.

Reads a view and, through `elements`, the kept values: both sides compared, or one side alone. Feeds the page. `lacking`
in the document names what is missing, and which setting would have kept it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from astray.comparison.blame.explanation import explained, furthest_slice
from astray.comparison.comparison import COLUMNS
from astray.comparison.divergence import TensorPlace
from astray.comparison.measure.metrics import BOUNDS, METRICS, SLICES
from astray.comparison.pair.layouts import Layout
from astray.comparison.select.columns import STATISTICS
from astray.errors import RunError
from astray.formatting import figures
from astray.graph import graph_of
from astray.records import Frame, Statistics
from astray.safe_text import parse_json
from astray.web.elements import Elements
from astray.web.overview import frame_of
from astray.web.pair_values import ValueCharts, compare_values, describe_values
from astray.web.views import ComparisonView, ResultView, RunView, TensorRef
from astray.web.wire import Document

KEY = ("rank", "step", "micro", "phase", "recompute", "kind", "site", "type", "call", "role", "path")
_FORM = ("dtype", "shape", "device", "placement", "note")
LONGEST = 100_000
DEEPEST = 50
"""Characters and levels of a call's arguments that are shown."""

MOST_LINKS = 12
"""The most links of one tensor; a learning rate or a mask may be an input of hundreds of calls."""

_JUDGED = {
    "error": "The largest relative error: `astray help metrics`.",
    "surprise": "How many times further off than can be explained; above 1 it is wrong: `astray help verdict`.",
    "deviation": "How far off it is by the measure that is the most surprising.",
    "limit": "How far off it may be by that measure.",
    "given": "How far off what it came from is by that measure.",
}
_NEIGHBOURS = {"previous": -1, "next": 1}
_BOUND = "At least this much, by the recorded statistics: |{of}(c) − {of}(r)| over the size of the reference."


def detail_of(view: ResultView, row: int) -> Document:
    """One pair of a comparison, or one tensor of a run."""
    with view.lock:
        if isinstance(view, ComparisonView):
            return _of_pair(view, row)
        assert isinstance(view, RunView), "there are two kinds of view"
        return _of_tensor(view, row)


def _of_pair(view: ComparisonView, row: int) -> Document:
    place = TensorPlace.of(view.pairs, row)
    reference, candidate = view.sides(row)
    layout = None if candidate is None else view.comparison.layout_of(candidate.rank.rank, candidate.row)
    values, charts, lacking = values_of(reference, candidate, layout)
    return {
        **_about(view, row),
        "verdict": place.verdict,
        "reason": place.reason or None,
        "sentence": f"{place.full}: {place.verdict}{_off(view, row, place)}.",
        "metrics": list(_metrics(view, row)),
        "statistics": list(_statistics(reference, candidate)),
        **_chart_documents(charts),
        "values": values,
        "lacking": lacking,
    }


def _of_tensor(view: RunView, row: int) -> Document:
    tensor, _ = view.sides(row)
    values, charts, lacking = values_of(tensor, None, alone=True)
    cells = {name: view.cell(name, row) for name in KEY if name not in ("rank", "kind")}
    place = TensorPlace(**(cells | {"path": cells["path"] or ""}), verdict="", error=math.nan, reason="")
    return {
        **_about(view, row),
        "verdict": None,
        "reason": None,
        "sentence": f"{place.full}.",
        "metrics": [],
        "statistics": list(_statistics(tensor, None)),
        **_chart_documents(charts),
        "values": values,
        "lacking": lacking,
    }


def _about(view: ResultView, row: int) -> Document:
    """What the details of pairs and of tensors share: the key, the call, its line, and links to other rows."""
    reference, candidate = view.sides(row)
    tensor = reference or candidate
    assert tensor is not None, "a row is in one of the runs"
    stack = _stack(tensor)
    args, args_b = _arguments(tensor), None
    if reference is not None and candidate is not None and _arguments(candidate) != args:
        args_b = _arguments(candidate)
    number = int(view.calls.of_row[row])
    return {
        "row": row,
        "key": {name: view.cell(name, row) for name in KEY},
        "source": frame_of(stack[0] if stack else None),
        "stack": [frame_of(frame) for frame in stack],
        "args": args,
        "args_b": args_b,
        "call": {"rows": view.calls.rows(number)},
        **{name: neighbour(view, number, step) for name, step in _NEIGHBOURS.items()},
        **links_of(view, row),
    }


def neighbour(view: ResultView, call: int, step: int) -> int | None:
    """The call before or after this one on the same rank: its first wrong row, or its first."""
    other, ranks = call + step, view.calls.rank
    if not (0 <= call < len(ranks) and 0 <= other < len(ranks)) or ranks[other] != ranks[call]:
        return None
    rows = np.array(view.calls.rows(other))
    return int(rows[np.argmax(view.wrong(rows))])  # the first of all where none is wrong


def links_of(view: ResultView, row: int) -> Document:
    """Links to the rows that made the tensor of a row, and to later rows of the same value in other calls."""
    side, tensor = next((side, tensor) for side, tensor in enumerate(view.sides(row)) if tensor is not None)
    graph, own = graph_of(tensor.rank), tensor.row
    maker, sightings = int(graph.maker[own]), graph.sightings(own)
    if maker >= 0:
        producers = [maker] if maker != own else []
    else:
        producers = graph.contributors(own).tolist() if graph.takes[own] else []
    is_consumer = (sightings > own) & (graph.call_rows[sightings] != graph.call_rows[own])
    links = {"producers": producers, "consumers": sightings[is_consumer].tolist()}
    return {
        name: [
            {"row": to, "sentence": _named(view, to)} for to in view.rows_of(side, tensor.rank.rank, rows[:MOST_LINKS])
        ]
        for name, rows in links.items()
    }


def _named(view: ResultView, row: int) -> str:
    """A row in a few words."""
    step, site, phase, role, path = (view.cell(name, row) for name in ("step", "site", "phase", "role", "path"))
    return f"step {step}, {phase}, {site}, {role} {path or ''}".rstrip()


def _stack(tensor: TensorRef) -> list[Frame]:
    """The line that made the call; of a backward call, the one that made its forward call."""
    calls = tensor.rank.calls
    row = tensor.call
    stack = int(calls.numbers("stack")[row])
    if stack < 0 and calls["phase"][row] == "backward":
        forward = int(graph_of(tensor.rank).parent[row])
        stack = int(calls.numbers("stack")[forward]) if forward >= 0 else -1
    return tensor.rank.stack(stack) if stack >= 0 else []


def _arguments(tensor: TensorRef) -> Any:
    """The arguments of the call that are not tensors, as a structure; as text where they cannot be parsed."""
    text = tensor.rank.calls["args"][tensor.call]
    if text is None:
        return None
    try:
        return _truncated(parse_json(text), DEEPEST) if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    except ValueError:
        return text


def _truncated(value: Any, depth: int) -> Any:
    """A structure without what is nested too deep in it."""
    if not isinstance(value, list | dict):
        return value
    if not depth:
        return "…"
    if isinstance(value, list):
        return [_truncated(item, depth - 1) for item in value]
    return {name: _truncated(item, depth - 1) for name, item in value.items()}


def _off(view: ComparisonView, row: int, place: TensorPlace) -> str:
    """How far off it is, and what explains how much of it."""
    if math.isnan(place.error) or not place.error:
        return ""
    deviation, limit, given = (float(view.pairs.numbers(name)[row]) for name in ("deviation", "limit", "given"))
    if not math.isfinite(deviation):
        return f", off by {figures.error(place.error)}"
    return ": " + explained(
        measure=view.pairs["measure"][row] or "",
        deviation=deviation,
        limit=limit,
        given=given,
        rule=view.pairs["rule"][row] or "",
        siblings=int(view.pairs.numbers("siblings")[row]),
        furthest=furthest_slice(view.pairs, row),
    )


def _metrics(view: ComparisonView, row: int) -> Iterator[Document]:
    """Everything measured between the two, each with its meaning."""
    for name, meaning in _JUDGED.items():
        yield _metric(name, float(view.pairs.numbers(name)[row]), meaning)
    custom = [name for name in view.pairs.names if name not in COLUMNS]
    for name in (*METRICS, *SLICES, *BOUNDS, *custom):
        value = float(view.pairs.numbers(name)[row])
        if not math.isnan(value):
            yield _metric(name, value, _help(name))


def _metric(name: str, value: float, meaning: str) -> Document:
    unknown = math.isnan(value)
    return {
        "name": name,
        "value": None if unknown else value,
        "text": "–" if unknown else f"{value:.6g}",
        "help": meaning,
    }


def _help(name: str) -> str:
    if name in BOUNDS:
        return _BOUND.format(of=name.removeprefix("bound_"))
    if name in SLICES:
        return SLICES[name]
    metric = METRICS.get(name)
    return "A metric that was asked for." if metric is None else (metric.__doc__ or "").partition("\n")[0]


def _statistics(reference: TensorRef | None, candidate: TensorRef | None) -> Iterator[Document]:
    """The recorded rows side by side."""
    rows = [{} if side is None else side.cells() for side in (reference, candidate)]
    for name in (*_FORM, *STATISTICS):
        cells = [_cell(name, row.get(name)) for row in rows]
        if cells != [None, None]:
            yield {"name": name, "a": cells[0], "b": cells[1]}


def _cell(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if name == "fingerprint":
        return f"{value:016x}"
    if name == "shape":
        return figures.shape(value)
    return None if isinstance(value, int) and not isinstance(value, bool) and value < 0 else value


def _chart_documents(charts: ValueCharts | None) -> Document:
    return charts._asdict() if charts is not None else {"histograms": None, "worst": [], "heat": None}


# -- kept values -------------------------------------------------------------------------------------------------------


_SIDES = ("reference", "candidate")
_WITHOUT_VALUES = "Record with keep='tensors' to see histograms, the worst elements and where in the tensor they are."


class ValueDocument(NamedTuple):
    """What was kept of a row (all, a slice, a sample, or what else is known), its charts, and what is lacking."""

    kept: str
    charts: ValueCharts | None
    lacking: str | None


def values_of(
    reference: TensorRef | None, candidate: TensorRef | None, layout: Layout | None = None, *, alone: bool = False
) -> ValueDocument:
    """The values of a row.

    layout: how the candidate's are laid out as the reference's. alone: there is only one run, so that nothing is
    missing on the other side.
    """
    tensors = (reference, candidate)
    try:
        sides = [None if tensor is None else Elements.read(tensor.rank, tensor.row) for tensor in tensors]
        if layout is not None and sides[1] is not None:
            sides[1] = sides[1].laid_out(layout)
        return _compared(sides[0], sides[1], tensors, alone)
    except RunError as error:
        return ValueDocument(_recorded(reference or candidate), None, str(error))


def _compared(
    reference: Elements | None,
    candidate: Elements | None,
    tensors: tuple[TensorRef | None, TensorRef | None],
    alone: bool,
) -> ValueDocument:
    if reference is not None and candidate is not None:
        common = reference.kept.intersection(candidate.kept)
        left, right = reference.narrowed(common), candidate.narrowed(common)
        if left.size == right.size and left.complex == right.complex and left.kept == right.kept:
            return ValueDocument(_kept(left), compare_values(left, right), _partial(left))
        return ValueDocument(_kept(reference), _one_sided(reference, 0), _why_not_comparable(reference, candidate))
    values = reference or candidate
    if values is None:
        return ValueDocument(_recorded(tensors[0] or tensors[1]), None, f"No values were kept. {_WITHOUT_VALUES}")
    side = 0 if reference is not None else 1
    if alone:
        return ValueDocument(_kept(values), _one_sided(values, side), _partial(values))
    missing = _SIDES[1 - side]
    why = f"The {missing} has no such tensor." if tensors[1 - side] is None else f"The {missing} kept no values."
    return ValueDocument(_kept(values), _one_sided(values, side), f"{why} What is shown is the {_SIDES[side]} alone.")


def _one_sided(values: Elements, side: int) -> ValueCharts:
    """The charts of one side alone."""
    charts = describe_values(values)
    if side == 0:
        return charts
    swapped = {"a": "b", "b": "a"}
    worst = [{swapped.get(name, name): value for name, value in element.items()} for element in charts.worst]
    histograms = None
    if charts.histograms is not None:
        histograms = {swapped.get(name, name): value for name, value in charts.histograms.items()}
        histograms["nonfinite"] = {swapped.get(name, name): value for name, value in histograms["nonfinite"].items()}
    return ValueCharts(histograms, worst, charts.heat)


def _kept(values: Elements) -> str:
    return "sample" if values.kept.sampled >= 0 else "whole" if values.kept.part is None else "slice"


def _partial(values: Elements) -> str | None:
    if values.kept.sampled >= 0:
        return f"{values.kept.sampled:,} sampled values of each were kept: they have no map, and others may be worse."
    return None if values.kept.part is None else f"Only the slice [{values.kept.part}] was kept and is shown."


def _why_not_comparable(reference: Elements, candidate: Elements) -> str:
    """Why the values of two tensors cannot be compared."""
    if reference.tensor != candidate.tensor:
        shapes = " against ".join(figures.shape(side.tensor) for side in (reference, candidate))
        return f"The shapes differ, {shapes}: no element has a partner. What is shown is the reference alone."
    if reference.complex != candidate.complex:
        dtypes = f"{reference.dtype} against {candidate.dtype}"
        return f"{dtypes}: no number has a partner. What is shown is the reference alone."
    return "Each run kept other values of this tensor. What is shown is the reference alone."


def _recorded(tensor: TensorRef | None) -> str:
    """What is known of a tensor without values."""
    cells = {} if tensor is None else tensor.cells()
    if cells and Statistics.of(cells) is not None:
        return "statistics"
    return "fingerprint" if cells.get("fingerprint") is not None else "nothing"
