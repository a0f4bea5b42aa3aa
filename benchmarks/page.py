"""How long the page takes to show a large comparison: `python benchmarks/page.py [ROWS …]`.

Chromium opens the report of one file from disk, and the same table from the local server. Counted is from the
beginning of the navigation until the first row is painted, then until the last one is after a jump to the end, until a
search and a sort are done; medians of several visits, each in a new tab without a cache.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from tables import markdown, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from astray.web.html import PageAssets, file_html, read_page
from astray.web.safety import AccessToken
from astray.web.server import address, application, listen, server_of
from astray.web.wire import encode, pack
from web_tables import big_file, big_overview, big_session, big_table

VISITS = 5
PAINTED = "() => new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"


class Table:
    """What the server asks a workspace for, of a table that was made up."""

    generation = 1

    def __init__(self, rows: int) -> None:
        self.overview = encode(big_overview(rows))
        self.columns = pack(big_table(rows))

    @property
    def shown(self) -> Table:
        return self

    def session(self) -> dict[str, Any]:
        return big_session() | {"mode": "live"}


@contextmanager
def served(rows: int, page: PageAssets) -> Iterator[str]:
    """The address of a server that shows the table."""
    access_token = AccessToken()
    with listen("127.0.0.1", 0) as bound:
        server = server_of(application(Table(rows), page, access_token))  # type: ignore[arg-type]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        yield f"{address(bound, '127.0.0.1')}?token={access_token.token}"
        server.should_exit = True
        thread.join()


def visit(browser: Browser, where: str, rows: int) -> list[float]:
    """Milliseconds to the first row, the last row, a search, a sort; and megabytes of the heap."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    tab = context.new_page()
    tab.goto(where, wait_until="commit")
    tab.wait_for_selector(".grid [data-row='0']")
    times = [tab.evaluate(PAINTED)]

    def timed(action: str, until: str) -> None:
        begin = tab.evaluate(f"() => {{ const begin = performance.now(); {action}; return begin; }}")
        tab.wait_for_selector(until)
        times.append(tab.evaluate(PAINTED) - begin)

    timed("document.querySelector('.grid .virtual').scrollTop = 1e9", f".grid [data-row='{rows - 1}']")
    timed("location.hash = '#/?q=layers.7.'", ".clear")
    timed("location.hash = '#/?sort=-error'", "[aria-sort=descending]")
    heap = tab.evaluate("performance.memory.usedJSHeapSize") / 1e6
    context.close()
    return [*times, heap]


def main(arguments: list[str]) -> None:
    page = read_page()
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        print("MISSING: there is no chromium here, so the page was not measured.", file=sys.stderr)
        return
    lines = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        for rows in [int(one) for one in arguments] or [200_000, 1_000_000]:
            file = Path(folder) / f"{rows}.html"
            file.write_text(file_html(page, big_file(rows), "big"), encoding="utf-8")
            with served(rows, page) as address:
                for name, where in ((f"file, {file.stat().st_size / 1e6:.1f} MB", file.as_uri()), ("server", address)):
                    seen = [visit(browser, where, rows) for _ in range(VISITS)]
                    middle = [statistics.median(column) for column in zip(*seen, strict=True)]
                    lines.append([f"{rows:,}", name, *(f"{value:,.0f}" for value in middle)])
        told = browser.version
        browser.close()
    print(provenance({"chromium": told, "playwright": version("playwright")}))
    print()
    heads = ("rows", "from", "first row, ms", "jump to the last, ms", "search, ms", "sort, ms", "heap, MB")
    print(markdown(heads, lines, words=2))


if __name__ == "__main__":
    main(sys.argv[1:])
