"""Rows of a comparison as a table, for a terminal and for a notebook: what `--filter`, `--sort` and `--top` ask for.

Shows the key, the verdict, the error and the surprise of each, and every column that the filter or the order names.
"""

from __future__ import annotations

import textwrap
from html import escape
from typing import Any

import numpy as np

from astray.comparison.select.columns import SIDES
from astray.comparison.select.pairs import Pairs
from astray.comparison.verdict import AGREEING, BAD, LABELS, SENTENCES, Reason
from astray.formatting import figures
from astray.formatting.page import TextTable, painted
from astray.store import DictionaryColumn
from astray.wording import printable

WIDTH = 100
MOST = 25
"""How many rows are shown by default."""

_WIDEST_TEXT = 140
DIM, RED, YELLOW = "2", "31", "33"
FONT = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.4"
"""The style of all that a notebook shows."""

_WORDS = ("phase", "site", "tensor", "verdict", "form", "reason")
_SHOWN = (
    "rank", "step", "micro", "phase", "recompute", "site", "call", "role", "path",
    "verdict", "error", "surprise", "reason",
)  # fmt: skip
"""What every table has, so that it needs no column of its own where a filter names it."""

_LEAST = {"reason": 24, "site": 16}
_LEAST_OF_ALL = {"site": 12, "tensor": 10, "source": 10, "verdict": 12, "phase": 9}
_DIGITS = {"cosine": 6, "within_tolerance": 6, "within_1e3": 6, "within_5e3": 6}  # all of which are near 1
_COLOURS = {LABELS[v]: DIM for v in AGREEING} | {LABELS[v]: RED for v in BAD}


def render(pairs: Pairs, *, width: int = WIDTH, colour: bool = False, most: int | None = MOST) -> str:
    """The rows as text, at most so many of them."""
    shown = pairs.first(most)
    rows = cells(shown)
    if not rows:
        return printable(f"There is no row {pairs.asked}".rstrip() + ".")
    words = texts(shown)
    droppable = [name for name in ("reason", "surprise", "form") if name not in pairs.named]
    head, *body = TextTable(words, droppable, _LEAST, _LEAST_OF_ALL).lines(rows, width, _painted if colour else None)
    described = printable(shown.described)
    title = textwrap.wrap(described, min(width, _WIDEST_TEXT), break_long_words=False, break_on_hyphens=False)
    return "\n".join([*title, "", painted(head, DIM) if colour else head, *body])


def rows_as_html(pairs: Pairs) -> str:
    """Rows of a comparison as a table, and how many there are in all."""
    shown = pairs.first(MOST)
    return f'<div><div style="{FONT}">{escape(shown.described)}</div>{html_table(shown) if len(shown) else ""}</div>'


def html_table(pairs: Pairs) -> str:
    """The rows as a table of HTML; there is at least one."""
    rows, words = cells(pairs), texts(pairs)

    def line(tag: str, row: dict[str, str]) -> str:
        sides = {name: "left" if name in words else "right" for name in row}
        found = (
            f'<{tag} style="text-align:{sides[name]};padding:1px 8px">{escape(text)}</{tag}>'
            for name, text in row.items()
        )
        return f"<tr>{''.join(found)}</tr>"

    lines = [line("th", {name: name for name in rows[0]}), *(line("td", row) for row in rows)]
    return f'<table style="{FONT};border-collapse:collapse">{"".join(lines)}</table>'


def cells(pairs: Pairs) -> list[dict[str, str]]:
    """The rows in words, a dictionary each with the same columns."""
    sides = [f"{name}_{side}" for name in ("dtype", "shape") for side in SIDES]
    columns = {name: pairs[name] for name in dict.fromkeys([*_SHOWN, *sides, *pairs.named])}
    reasons = any(map(_reason, columns["reason"].column))
    ranks = len(np.unique(pairs.columns.pairs.numbers("rank"))) > 1
    rows = []
    for at in range(len(pairs)):
        row = {name: column[at] if known[at] else None for name, (column, known) in columns.items()}
        rows.append(_cells(row, [name for name in pairs.named if name not in _SHOWN], ranks, reasons))
    return rows


def texts(pairs: Pairs) -> list[str]:
    """Which columns of `cells` hold texts; the others hold numbers."""
    return [*_WORDS, *(_head(name) for name in pairs.named if isinstance(pairs[name].column, DictionaryColumn))]


def _cells(row: dict[str, Any], extra: list[str], ranks: bool, reasons: bool) -> dict[str, str]:
    return {
        **({"rank": str(row["rank"])} if ranks else {}),
        "step": f"{row['step']}" + (f".{row['micro']}" if row["micro"] else ""),
        "phase": f"{row['phase']}" + (" again" if row["recompute"] else ""),
        "site": f"{row['site']}" + (f" #{row['call']}" if row["call"] else ""),
        "tensor": f"{row['role']} {row['path'] or ''}".rstrip(),
        "verdict": row["verdict"],
        "error": _two_digits(row["error"]),
        "surprise": "–" if row["surprise"] is None else figures.surprise(float(row["surprise"])),
        **{_head(name): _value(name, row[name]) for name in extra},
        "form": _both(*(_form(row[f"dtype_{side}"], row[f"shape_{side}"]) for side in SIDES)),
        **({"reason": _reason(row["reason"])} if reasons else {}),
    }


def _reason(reason: str | None) -> str:
    """What else there is to say, but for what holds of nearly all that is wrong: that it came of something wrong."""
    return "; ".join(text for text in (reason or "").split("; ") if text != SENTENCES[Reason.VICTIM])


def _head(name: str) -> str:
    """The name of a column, short: `absmax ref`."""
    return name.replace("_reference", " ref").replace("_candidate", " cand")


def _two_digits(value: float | None) -> str:
    return "–" if value is None else figures.error(float(value))


def _value(name: str, value: Any) -> str:
    """Any cell, short."""
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return figures.shape(value)
    if isinstance(value, np.unsignedinteger):
        return f"{value:016x}"
    if isinstance(value, np.floating):
        return f"{value:.{_DIGITS.get(name, 4)}g}"
    return str(value).lower() if isinstance(value, np.bool_) else str(value)


def _form(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return "" if dtype is None or shape is None else f"{figures.dtype(dtype)} {figures.shape(shape)}"


def _both(reference: str, candidate: str) -> str:
    return (
        reference or candidate
        if reference == candidate or not reference or not candidate
        else f"{reference} → {candidate}"
    )


def _painted(name: str, cell: str) -> str:
    if name != "verdict":
        return cell
    return painted(cell, _COLOURS.get(cell.rstrip(), YELLOW))
