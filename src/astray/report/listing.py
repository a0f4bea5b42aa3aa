"""What one run holds, for a terminal: a line about the run, then its tensors and their statistics.

Takes a `RunData` and `ListingOptions`, and returns text. Only the rows shown become Python objects.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.select.filter import regular_expression
from astray.comparison.select.pairs import check_top
from astray.errors import UsageError
from astray.formatting import figures
from astray.formatting.page import TextTable, painted
from astray.nonfinite.details import recorded_element
from astray.report import checkpoints
from astray.report.setup import summary_of
from astray.steps import StepSelection
from astray.store import CheckpointData, RankRun, RunData
from astray.wording import printable

WIDTH = 100
DIM, BOLD, RED = "2", "1", "31;1"

_NUMBERS = ("mean", "std", "min", "max", "l2")
_WORDS = ("phase", "site", "tensor", "name", "role", "kind", "")
_LEAST = {"": 24, "site": 12, "name": 24}  # to which these columns are cut before a number is left out
_LEAST_OF_ALL = {"": 12, "tensor": 10, "kind": 8}  # and when all numbers are left out
_INDENT = 13  # of the texts next to the labels


@dataclass(frozen=True)
class ListingOptions:
    """Which tensors to list: None means any. `sort` is a statistic, largest magnitude first; `top` 0 means all."""

    steps: StepSelection = StepSelection()
    rank: int | None = None
    match: str | None = None
    phase: str | None = None
    role: str | None = None
    sort: str | None = None
    top: int = 25


def render(
    run: RunData, options: ListingOptions, *, width: int = WIDTH, table_width: int | None = None, colour: bool = False
) -> str:
    """The listing as text. table_width: the width of the table, where it is not that of the texts around it."""
    paint = _Paint(colour)
    selected = _select(run, options)
    shown = selected[: options.top] if check_top(options.top) else selected
    lines = [*_header(run, width, paint), ""]
    if not shown:
        lines.append(f"No tensor is {_described(options)}." if _described(options) else "It holds no tensor.")
    else:
        numbers = list(dict.fromkeys([*filter(None, [options.sort]), *_NUMBERS]))  # the sort column comes first
        rows = [_cells(run.ranks[rank], row, numbers) for rank, row in shown]
        unread = []
        if isinstance(run, CheckpointData):
            unread = checkpoints.unread_reasons(run, [row for _, row in shown])
            rows = [checkpoints.without_calls(row, unread) for row in rows]
        droppable = [name for name in numbers if name != options.sort]
        lines += _table(rows, droppable, len(run.ranks) > 1, table_width or width, paint)
        lines += ["", *(line for text in unread for line in _labelled("unread", text, width))] if unread else []
    if len(selected) > len(shown):
        more = f"… {figures.counted(len(selected) - len(shown), 'more row')}. "
        by = "--match or --role" if isinstance(run, CheckpointData) else "--match, --steps, --phase or --role"
        more += f"Narrow them with {by}, or show all with --top 0."
        lines += ["", *_folded(more, width)]
    return "\n".join(line.rstrip() for line in lines)


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, text: str, code: str) -> str:
        return painted(text, code) if self._colour and text.strip() else printable(text)


def _header(run: RunData, width: int, paint: _Paint) -> list[str]:
    info = run.info
    if isinstance(run, CheckpointData):
        name, facts_line = printable(str(run.path)), checkpoints.describe(run.checkpoint)
        one_line = len(name) + 8 + len(facts_line) <= width
        lines = [f"{paint(name, BOLD)}        {facts_line}"] if one_line else [paint(name, BOLD), facts_line]
        return lines + [line for problem in run.problems for line in _labelled("note", problem, width)]
    calls = sum(len(rank.calls) for rank in run.ranks.values())
    tensors = sum(len(rank.tensors) for rank in run.ranks.values())
    facts = [figures.counted(len(run.steps), "step"), figures.counted(len(run.ranks), "rank")]
    facts += [figures.counted(calls, "call"), figures.counted(tensors, "tensor")]
    facts.append("complete" if run.complete else "incomplete")
    name, facts_line = printable(str(run.path)), " · ".join(facts)
    if len(name) + 8 + len(facts_line) <= width:
        lines = [f"{paint(name, BOLD)}        {facts_line}"]
    else:
        lines = [paint(name, BOLD), *_folded(facts_line, width)]
    version = info.versions.get(info.framework or "", "")
    about = [("recorded", f"{info.created} with {info.framework or 'no framework'} {version}".rstrip())]
    if info.command:
        about.append(("command", " ".join(info.command)))
    if info.flight is not None:
        by = f", by rank {info.flight.rank}" if info.world_size > 1 else ""
        about.append(("written", f"{info.flight.written} from memory{by}: {info.flight.why}"))
    if info.perturbed is not None:
        about.append(("perturbed", f"its inputs, by roundings (seed {info.perturbed}): for astray compare --noise"))
    settings = [f"{name} {_plain(value)}" for name, value in info.settings.items() if _is_shown(name, value)]
    if settings:
        about.append(("settings", ", ".join(settings)))
    setup = summary_of(run)
    if setup:
        about.append(("setup", setup))
    about += [("note", problem) for problem in run.problems]
    for rank in run.ranks.values():
        if rank.end is not None:
            about += [("missed", f"{m.what}: {m.why} ({m.count:,}×)") for m in rank.end.missed]
    return lines + [line for label, text in about for line in _labelled(label, text, width)]


_ALWAYS = ("level", "keep", "steps")
_NOT_SHOWN = {"samples", "queue_bytes", "phases", "roles", "ranks", "perturb"}
"""Settings that say little about a run, or that its rows show better, or that have a line of their own."""


def _is_shown(name: str, value: object) -> bool:
    return name in _ALWAYS or (name not in _NOT_SHOWN and value not in (None, [], ""))


def _labelled(label: str, text: str, width: int) -> list[str]:
    """A text next to its label, folded at the width."""
    first, *rest = _folded(text, width - _INDENT) or [""]
    return [f"  {label:<10} {first}", *(" " * _INDENT + line for line in rest)]


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(printable(text), max(width, 20), break_long_words=False, break_on_hyphens=False)


def _plain(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _select(run: RunData, options: ListingOptions) -> list[tuple[int, int]]:
    """The rows that the options select, as (rank, row), in their order."""
    if options.rank is not None and options.rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {options.rank}. It has {', '.join(map(str, run.ranks))}.")
    ranks = run.ranks if options.rank is None else {options.rank: run.ranks[options.rank]}
    selected: list[tuple[int, int]] = []
    sizes: list[float] = []
    for number, rank in ranks.items():
        rows = np.flatnonzero(_chosen(rank, options))
        selected += [(number, row) for row in rows.tolist()]
        if options.sort is not None:
            sizes += np.abs(rank.tensors.numbers(options.sort)[rows].astype(np.float64)).tolist()
    if options.sort is not None:
        # What was not measured (NaN, or −1 for a count) is last; ties keep the order of observation.
        keys = np.nan_to_num(np.array(sizes), nan=-1.0)
        selected = [selected[i] for i in np.argsort(-keys, kind="stable").tolist()]
    return selected


def _chosen(rank: RankRun, options: ListingOptions) -> npt.NDArray[np.bool_]:
    calls = rank.calls
    fits = np.ones(len(calls), np.bool_)
    if options.steps:
        steps, places = np.unique(calls.numbers("step"), return_inverse=True)
        fits &= np.array([int(step) in options.steps for step in steps], np.bool_)[places]
    if options.match is not None:
        pattern = regular_expression(options.match)
        sites = calls.coded("site")
        fits &= np.array([*(bool(pattern.search(site)) for site in sites.values), False], np.bool_)[sites.codes]
    if options.phase is not None:
        fits &= calls.coded("phase").codes == calls.coded("phase").code(options.phase)
    known = rank.call_rows >= 0
    chosen = np.zeros(len(rank.tensors), np.bool_)
    chosen[known] = fits[rank.call_rows[known]]
    if options.role is not None:
        chosen &= rank.tensors.coded("role").codes == rank.tensors.coded("role").code(options.role)
    return chosen


def _described(options: ListingOptions) -> str:
    parts = [
        f"in phase {options.phase}" if options.phase else "",
        f"in the role {options.role}" if options.role else "",
    ]
    parts += [
        f"at a site like {options.match!r}" if options.match else "",
        f"in steps {options.steps}" if options.steps else "",
        f"on rank {options.rank}" if options.rank is not None else "",
    ]
    return " and ".join(part for part in parts if part)


def _cells(rank: RankRun, row: int, numbers: list[str]) -> dict[str, str]:
    """One row of the table in words."""
    call, tensor = rank.calls.row(int(rank.call_rows[row])), rank.tensors.row(row)
    non_finite = ", ".join(
        f"{tensor[name]:,} {word}" for name, word in (("nan", "NaN"), ("inf", "Inf")) if (tensor[name] or 0) > 0
    )
    first = recorded_element(tensor)
    if first is not None:
        non_finite += f" from [{', '.join(map(str, first.index))}]"
    micro = f".{call['micro']}" if call["micro"] else ""
    again = " again" if call["recompute"] else ""
    return {
        "rank": str(rank.rank),
        "step": f"{call['step']}{micro}",
        "phase": f"{call['phase']}{again}",
        "site": call["site"] + (f" #{call['call']}" if call["call"] else ""),
        "tensor": f"{tensor['role']} {tensor['path']}",
        "kind": f"{figures.dtype(tensor['dtype'])} {figures.shape(tensor['shape'])}",
        **{name: _short(tensor[name]) for name in numbers},
        "": non_finite or (tensor["note"] or ""),
    }


def _short(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{value:.3g}"


def _table(
    rows: list[dict[str, str]], droppable: list[str], several_ranks: bool, width: int, paint: _Paint
) -> list[str]:
    """The rows as lines. When these are too long, long notes and sites are cut, then numbers left out."""
    if not several_ranks:
        rows = [{name: cell for name, cell in row.items() if name != "rank"} for row in rows]
    grid = TextTable(_WORDS, droppable, _LEAST, _LEAST_OF_ALL)
    head, *body = grid.lines(rows, width, lambda name, cell: cell if name else paint(cell.rstrip(), RED))
    return [paint(head, DIM), *body]
