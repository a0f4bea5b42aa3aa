"""How close the numbers of a run come to trouble, for a terminal: a line of counts, then the places, the worst first.

Takes a `Risk` and `RiskOptions`. Places whose worst tensor is the same one are shown once. Of shares, `12 %` is exact,
`≥ 12 %` a bound, `~12 %` an estimate.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.select.filter import regular_expression
from astray.comparison.select.pairs import check_top
from astray.formatting import figures
from astray.formatting.page import TextTable, painted
from astray.headroom.dtype_limits import DtypeLimits, limits
from astray.headroom.risk import HALF, LEVELS, SOME, Risk
from astray.store import Table
from astray.wording import printable

WIDTH = 100
DIM, BOLD, RED, YELLOW = "2", "1", "31;1", "33"
COLOURS = {"non-finite": RED, "overflow": RED, "stuck": RED, "underflow": YELLOW, "tight": YELLOW, "calm": DIM}

Order = Callable[[Table], npt.NDArray[np.float64]]
SORTS: dict[str, Order] = {
    "absmax": lambda table: -table.numbers("absmax"),
    "headroom": lambda table: table.numbers("headroom_bits"),
    "growth": lambda table: -table.numbers("growth_bits"),
    "zeros": lambda table: -table.numbers("zeros"),
    "subnormal": lambda table: -np.maximum(table.numbers("subnormal_least"), table.numbers("subnormal_normal")),
    "unmoved": lambda table: -table.numbers("unmoved"),
    "update": lambda table: table.numbers("update_ratio"),
    "gradient": lambda table: table.numbers("gradient_ratio"),
}
"""What the places can be sorted by instead of their risk: a key that is smallest for the worst place."""

_EXTRA: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "growth": ("growth", lambda row: _or_dash(row["growth_bits"], "+{:.2g} bits/step")),
    "unmoved": ("unmoved", lambda row: _or_dash(row["unmoved"], "{:.3%}")),
    "update": ("update/weight", lambda row: _or_dash(row["update_ratio"], "{:.1e}")),
    "gradient": ("gradient/weight", lambda row: _or_dash(row["gradient_ratio"], "{:.1e}")),
}
"""Columns that are shown when the table is sorted by them."""

_WORDS = ("risk", "phase", "site", "tensor", "dtype", "why")
_DROPPABLE = ("head-room", "phase", "dtype", "step", "largest", "zeros", "subnormal")
_LEAST = {"site": 20, "why": 32}
_LEAST_OF_ALL = {"site": 12, "tensor": 12, "why": 20}


@dataclass(frozen=True)
class RiskOptions:
    """Which places to show: None means any. `sort` is a key of `SORTS`, None the risk; `top` 0 means all."""

    match: str | None = None
    phase: str | None = None
    role: str | None = None
    sort: str | None = None
    top: int = 25


def render(
    risk: Risk,
    options: RiskOptions | None = None,
    *,
    width: int = WIDTH,
    table_width: int | None = None,
    colour: bool = False,
) -> str:
    """The places as text. table_width: the width of the table, where it is not that of the texts around it."""
    options = options or RiskOptions()
    if not len(risk):
        return _folded(f"{risk.run.path}: {_nothing(risk)}", width)
    selected = _ordered(risk, risk.table.take(_chosen(risk.table, options)), options)
    distinct = selected.take(np.sort(np.unique(selected.numbers("tensor"), return_index=True)[1]))
    shown = distinct.take(slice(options.top)) if check_top(options.top) else distinct
    lines = [_head(risk, distinct, width, colour)]
    if not len(shown):
        return "\n".join([*lines, "", printable(f"No place is {_described(options)}.")])
    lines += [_folded(text, width, "  ") for text in _dtype_sentences(risk, distinct)]
    rows = [_cells(risk, shown.row(row), options.sort) for row in range(len(shown))]
    several = len(risk.run.ranks) > 1
    rows = [{name: cell for name, cell in row.items() if name != "rank" or several} for row in rows]
    grid = TextTable((*_WORDS, *(target.name for target in risk.targets)), _DROPPABLE, _LEAST, _LEAST_OF_ALL)
    head, *body = grid.lines(rows, table_width or width, _painted if colour else None)
    lines += ["", _paint(head, DIM, colour), *body]
    left = _left_out(risk, distinct, len(shown), len(selected) - len(distinct))
    lines += ["", _folded(left, width)] if left else []
    return "\n".join(line.rstrip() for line in lines)


def _nothing(risk: Risk) -> str:
    left = risk.left_out
    if left.unmeasured:
        return "it was recorded without statistics, from which head-room is computed. Record it with keep='stats'."
    if left.total:
        return f"no tensor has a head-room: {_skipped(risk)}."
    return "it holds no tensor in the steps and ranks asked for." if risk.run.steps else "it holds no tensor."


def _chosen(table: Table, options: RiskOptions) -> npt.NDArray[np.bool_]:
    chosen = np.ones(len(table), np.bool_)
    if options.match is not None:
        pattern, sites = regular_expression(options.match), table.coded("site")
        chosen &= np.array([*(bool(pattern.search(site)) for site in sites.values), False])[sites.codes]
    for name, word in (("phase", options.phase), ("role", options.role)):
        if word is not None:
            chosen &= table.coded(name).codes == table.coded(name).code(word)
    return chosen


def _described(options: RiskOptions) -> str:
    parts = [
        f"in phase {options.phase}" if options.phase else "",
        f"in the role {options.role}" if options.role else "",
        f"at a site like {options.match!r}" if options.match else "",
    ]
    return " and ".join(part for part in parts if part)


def _ordered(risk: Risk, table: Table, options: RiskOptions) -> Table:
    """Sorted; unknown values come last, and ties stay in order of risk."""
    if options.sort is not None:
        key = SORTS[options.sort](table)
    elif risk.targets:
        key = np.min([_badness(table, target.name) for target in risk.targets], axis=0)
    else:
        return table
    return table.take(np.argsort(np.nan_to_num(key, nan=np.inf), kind="stable"))


def _badness(table: Table, target: str) -> npt.NDArray[np.float64]:
    """A sort key: the largest overflows first, then the largest losses; an optimizer's numbers after all others.

    Their dtype is chosen by the optimizer, and they would fill the screen: squares of gradients vanish in every small
    dtype.
    """
    bits = np.minimum(np.nan_to_num(table.numbers(f"headroom_bits_{target}")), 0.0)
    lost = np.maximum(_lost(table, "flushed", target), np.nan_to_num(table.numbers(f"unmoved_estimate_{target}")))
    late = table.coded("phase").codes == table.coded("phase").code("update")
    return np.asarray(np.where(table.numbers(f"overflows_{target}"), bits - 2, late - lost), np.float64)


def _lost(table: Table, name: str, target: str) -> npt.NDArray[np.float64]:
    """The share that would become zero: its lower bound, or the estimate if that is more."""
    least, normal = table.numbers(f"{name}_least_{target}"), table.numbers(f"{name}_normal_{target}")
    return np.asarray(np.maximum(least, normal), np.float64)


def _head(risk: Risk, table: Table, width: int, colour: bool) -> str:
    counts = np.bincount(table.coded("risk").codes, minlength=len(LEVELS)).tolist()
    facts = [figures.counted(len(risk.run.steps), "step"), figures.counted(len(risk.run.ranks), "rank")]
    said = [f"{count:,} {level}" for level, count in zip(LEVELS, counts, strict=True) if count]
    name, text = str(risk.run.path), f"{' · '.join(facts)}; {' · '.join(said) or 'nothing'}"
    if len(name) + 8 + len(text) <= width:
        return f"{_paint(name, BOLD, colour)}        {text}"
    return f"{_paint(name, BOLD, colour)}\n{_folded(text, width)}"


def _dtype_sentences(risk: Risk, table: Table) -> list[str]:
    """A sentence about each dtype of `what_if`."""
    sentences = []
    for target in risk.targets:
        over = int(table.numbers(f"overflows_{target.name}").sum())
        text = f"as {target.name}: {over:,} of {figures.counted(len(table), 'place')} would overflow"
        scale = risk.loss_scales[target.name]
        if target.coarse:
            text += "; the scale for each, in parentheses, is the largest that fits it"
        elif target.narrow and np.isfinite(scale):
            scaled = ~np.isnan(table.numbers(f"scale_{target.name}"))
            unscaled, with_scale = (
                int((_lost(table, name, target.name)[scaled] >= SOME).sum()) for name in ("flushed", "scaled_flushed")
            )
            text += f"; of {int(scaled.sum()):,} with gradients {unscaled:,} would lose 1 % or more to zero, "
            text += f"and {with_scale:,} with a loss scale of {power(scale)}, the largest that fits all"
        sentences.append(f"{text}.")
    return sentences


def _cells(risk: Risk, row: dict[str, Any], sort: str | None) -> dict[str, str]:
    extra = {_EXTRA[sort][0]: _EXTRA[sort][1](row)} if sort in _EXTRA else {}
    micro, call = f".{row['micro']}" if row["micro"] else "", f" #{row['call']}" if row["call"] else ""
    cells = {
        **({} if risk.targets else {"risk": row["risk"]}),
        "site": row["site"] + call,
        "phase": row["phase"],
        "tensor": f"{row['role']} {row['path']}",
        "dtype": figures.dtype(row["dtype"]),
        "rank": str(row["rank"]),
        "step": f"{row['step']}{micro}",
        "largest": _or_dash(row["absmax"], "{:.2g}"),
    }
    if risk.targets:
        return cells | extra | {target.name: in_dtype_text(row, target) for target in risk.targets}
    return cells | {
        "head-room": headroom(row),
        "zeros": share(row["zeros"], row["zeros"], 0.0),
        "subnormal": share(row["subnormal_least"], row["subnormal_most"], row["subnormal_normal"]),
        **extra,
        "why": why(row),
    }


def _left_out(risk: Risk, table: Table, shown: int, again: int) -> str:
    """The last line: what is not shown, and how to see it."""
    parts = []
    if shown < len(table):
        counts = np.bincount(table.coded("risk").codes[shown:], minlength=len(LEVELS)).tolist()
        said = [f"{count:,} {level}" for level, count in zip(LEVELS, counts, strict=True) if count]
        parts.append(f"{figures.counted(len(table) - shown, 'more place')} ({', '.join(said)}; --top 0 shows all)")
    if again:
        parts.append(f"{again:,} that show the same tensors again")
    parts += [_skipped(risk)] if _skipped(risk) else []
    return f"Not shown: {'; '.join(parts)}." if parts else ""


def _skipped(risk: Risk) -> str:
    left = risk.left_out
    parts = [
        (left.whole, "of integers or booleans"),
        (left.unmeasured, "without statistics"),
        (left.empty, "without elements"),
        (left.orphans, "whose calls are not there"),
        *((count, f"of {name}, whose range is not known") for name, count in left.unknown.items()),
    ]
    return ", ".join(f"{figures.counted(count, 'tensor')} {what}" for count, what in parts if count)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None or np.isnan(value) else form.format(value)


def _folded(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(
        printable(text), max(width, 20), initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _painted(name: str, cell: str) -> str:
    return _paint(cell, COLOURS[cell.strip()], True) if name == "risk" else cell


def _paint(text: str, code: str, colour: bool) -> str:
    return painted(text, code) if colour and text.strip() else printable(text)


# -- the texts for one place: head-room, shares, the cause of its level, other dtypes ----------------------------------


Row = dict[str, Any]

_LEAST_SHARE = 1e-3
"""A smaller share that would be lost is not mentioned."""


def headroom(row: Row) -> str:
    """How many times as large the numbers could be: `1.3×`, or `2^43` where it is large."""
    return "–" if math.isnan(row["headroom"]) else factor(row["headroom"])


def factor(value: float) -> str:
    """A factor with two digits, or as the power of two below it.

    >>> factor(1.31), factor(172.0), factor(100_000.0)
    ('1.3×', '172×', '2^16')
    """
    if value >= 1000:
        return power(value)
    return f"{value:.2g}×" if value < 100 else f"{value:.0f}×"


def power(value: float) -> str:
    """The power of two at or below a number: `2^-3`."""
    return f"2^{math.frexp(value)[1] - 1}"


def share(least: float, most: float, normal: float) -> str:
    """A share by its lower bound, its upper bound and its estimate, as precisely as these allow.

    >>> share(0.25, 0.25, 0.0), share(0.125, 0.5, 0.3), share(0.0, 0.9, 0.02), share(0.0, 0.9, 1e-9), share(0, 0, 0)
    ('25 %', '≥ 12 %', '~2 %', '~0', '0')
    """
    if math.isnan(least):
        return "–"
    if least == most:
        return percent(least)
    if least >= _LEAST_SHARE:
        return f"≥ {percent(least, down=True)}"
    return f"~{percent(normal)}" if normal >= 1e-4 else "~0"


def percent(value: float, down: bool = False) -> str:
    """A share in percent, two digits; never `100 %` for less than all, and a lower bound is rounded `down`.

    >>> percent(0.5), percent(0.031), percent(0.9999), percent(1.0), percent(0.9578, down=True), percent(0.00012)
    ('50 %', '3.1 %', '99.9 %', '100 %', '95 %', '0.012 %')
    """
    if value in (0, 1):
        return f"{value * 100:.0f} %" if value else "0"
    if value >= 0.99:
        return f"{math.floor(value * 1000) / 10:.1f} %"
    if down:
        digits = 1 - math.floor(math.log10(value * 100))
        value = math.floor(value * 100 * 10**digits) / 10**digits / 100
    return f"{value * 100:.2g} %"


def why(row: Row) -> str:
    """The cause of a place's level, in words; empty where it is calm."""
    text_of = _CAUSES.get(row["cause"])
    return text_of(row) if text_of else ""


def _nonfinite(row: Row) -> str:
    counts = [f"{row[name]:,} {word}" for name, word in (("nan", "NaN"), ("inf", "Inf")) if row[name]]
    often = row["observations"]
    return ", ".join(counts) + (f" (in {row['nonfinite']:,} of {often:,} rows)" if often > 1 else "")


def _headroom(row: Row) -> str:
    return f"the dtype ends at {row['largest']:.5g}"


def _growth(row: Row) -> str:
    rate = f"+{row['growth_bits']:.1g} bits/step"
    soonest, latest = (_about(row[name]) for name in ("gone_soonest", "gone_latest"))
    if not latest:
        return f"{rate}: {soonest} or more steps left"
    return f"{rate}: ~{soonest}" + (f"–{latest}" if latest != soonest else "") + " steps left"


def _about(steps: float) -> str:
    """A number of steps that is an extrapolation: one digit, or two below twenty."""
    if math.isnan(steps):
        return ""
    if steps < 20:
        return f"{max(1, round(steps))}"
    unit = 10 ** math.floor(math.log10(steps))
    return f"{round(steps / unit) * unit:,}"


def _limit(row: Row) -> str:
    known = limits(row["dtype"])
    return "fills its dtype: scaled or clipped?" if known and known.coarse else "exactly the limit: mask or clip?"


def _unmoved(row: Row) -> str:
    if math.isnan(row["update_ratio"]):
        return f"no bit changed in {row['still_steps']:,} of {row['watched_steps']:,} steps"
    least = row["unmoved_with_gradient"]
    return "no element moves" if row["unmoved"] == 1 else f"≥ {percent(least, down=True)} of it does not move"


def _subnormal(row: Row) -> str:
    known = limits(row["dtype"])
    ends = f"{known.tiny:.1e}" if known else "the smallest normal number"
    subnormal = share(row["subnormal_least"], row["subnormal_most"], 0.0)
    return f"{subnormal} below {ends} in step {row['subnormal_step']}"


_CAUSES: dict[str, Callable[[Row], str]] = {
    "non-finite": _nonfinite,
    "head-room": _headroom,
    "growth": _growth,
    "limit": _limit,
    "unmoved": _unmoved,
    "subnormal": _subnormal,
    "zeros": lambda _: "nothing but zeros: vanished?",
}


def in_dtype_text(row: Row, target: DtypeLimits) -> str:
    """What would become of a place in another dtype, a scale that helps in parentheses, and of weight updates.

    `overflows 3.2× (fits ×2^-2)`, `≥ 93 % lost (~2 % lost ×2^14)`, `fits; ~90 % stuck`
    """
    dtype = target.name
    over = f"overflows {factor(2.0 ** -row[f'headroom_bits_{dtype}'])}" if row[f"overflows_{dtype}"] else ""
    text = over or _share_in_words(row, "flushed", dtype) or "fits"
    scale, stuck = row[f"scale_{dtype}"], row[f"unmoved_estimate_{dtype}"]
    if text != "fits" and not math.isnan(scale) and scale != 1:
        text += f" ({_share_in_words(row, 'scaled_flushed', dtype) or 'fits'} ×{power(scale)})"
    if not math.isnan(stuck) and stuck >= HALF:
        text += f"; {share(row[f'unmoved_least_{dtype}'], 1.0, stuck)} stuck"
    return text


def _share_in_words(row: Row, name: str, dtype: str) -> str:
    least, most, normal = (row[f"{name}_{kind}_{dtype}"] for kind in ("least", "most", "normal"))
    return f"{share(least, most, normal)} lost" if max(least, normal) >= _LEAST_SHARE else ""
