"""A Comparison in a notebook: the report of the terminal in colours, and the first wrong rows folded away.

One piece of HTML with nothing to fetch and no script. It is made of the text of `report.text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from astray.comparison.comparison import Comparison
from astray.comparison.select.pairs import Pairs
from astray.comparison.select.row_table import MOST, cells, texts
from astray.formatting.page import BOLD, DIM, GREEN, RED, YELLOW
from astray.report.text import render

WIDTH = 100
MOST_WRONG = 20

# Colours that can be read on white and on black.
_STYLES = {
    RED: "color:#d1242f;font-weight:600",
    GREEN: "color:#1a7f37;font-weight:600",
    YELLOW: "color:#b08800",
    BOLD: "font-weight:600",
    DIM: "opacity:.6",
}
_ESCAPES = re.compile(r"\x1b\[([\d;]*)m")
_FONT = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.4"


def comparison_as_html(comparison: Comparison) -> str:
    """The answer, then the rows that are wrong."""
    report = "".join(_spans(render(comparison, width=WIDTH, colour=True)))
    parts = [f'<pre style="{_FONT};background:none;margin:0;white-space:pre-wrap">{report}</pre>']
    wrong = comparison.select("not agrees", top=MOST_WRONG)
    if len(wrong):
        shown = f"the first {len(wrong):,} of {wrong.found:,}" if len(wrong) < wrong.found else f"all {wrong.found:,}"
        summary = f'<summary style="{_FONT}">rows that do not agree: {shown}</summary>'
        parts.append(f'<details style="margin-top:8px">{summary}{_table(wrong)}</details>')
    return f"<div>{''.join(parts)}</div>"


def rows_as_html(pairs: Pairs) -> str:
    """Rows of a comparison as a table, and how many there are in all."""
    shown = pairs.first(MOST)
    return f'<div><div style="{_FONT}">{escape(shown.described)}</div>{_table(shown) if len(shown) else ""}</div>'


def _table(pairs: Pairs) -> str:
    rows, words = cells(pairs), texts(pairs)

    def line(tag: str, row: dict[str, str]) -> str:
        sides = {name: "left" if name in words else "right" for name in row}
        found = (
            f'<{tag} style="text-align:{sides[name]};padding:1px 8px">{escape(text)}</{tag}>'
            for name, text in row.items()
        )
        return f"<tr>{''.join(found)}</tr>"

    lines = [line("th", {name: name for name in rows[0]}), *(line("td", row) for row in rows)]
    return f'<table style="{_FONT};border-collapse:collapse">{"".join(lines)}</table>'


def _spans(text: str) -> Iterator[str]:
    """The text with its colours as spans, and everything else escaped."""
    pieces = _ESCAPES.split(text)
    yield escape(pieces[0])
    for code, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        style = _STYLES.get(code)
        yield f'<span style="{style}">{escape(piece)}</span>' if style else escape(piece)
