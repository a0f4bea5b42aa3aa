"""A Comparison in a notebook: the report of the terminal in colours, and the first wrong rows folded away.

One piece of HTML with nothing to fetch and no script. It is made of the text of `report.text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from astray.comparison.comparison import ComparisonData
from astray.comparison.select.row_table import FONT, html_table
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


def comparison_as_html(comparison: ComparisonData) -> str:
    """The answer, then the rows that are wrong."""
    report = "".join(_spans(render(comparison, width=WIDTH, colour=True)))
    parts = [f'<pre style="{FONT};background:none;margin:0;white-space:pre-wrap">{report}</pre>']
    wrong = comparison.select("not agrees", top=MOST_WRONG)
    if len(wrong):
        shown = f"the first {len(wrong):,} of {wrong.found:,}" if len(wrong) < wrong.found else f"all {wrong.found:,}"
        summary = f'<summary style="{FONT}">rows that do not agree: {shown}</summary>'
        parts.append(f'<details style="margin-top:8px">{summary}{html_table(wrong)}</details>')
    return f"<div>{''.join(parts)}</div>"


def _spans(text: str) -> Iterator[str]:
    """The text with its colours as spans, and everything else escaped."""
    pieces = _ESCAPES.split(text)
    yield escape(pieces[0])
    for code, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        style = _STYLES.get(code)
        yield f'<span style="{style}">{escape(piece)}</span>' if style else escape(piece)
