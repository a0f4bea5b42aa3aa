"""The report of one file in a real browser: from disk, without a network, with names that mean harm, with many rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astray import compare
from astray.web.html import file_html, read_page
from record_builders import Builder
from web_tables import big_file

pytestmark = pytest.mark.browser

HOSTILE = [
    "<script>window.harmed = 1</script>",
    '"><img src=x onerror="window.harmed=1">',
    "</script><svg onload=window.harmed=1>",
    "{{constructor.constructor('window.harmed=1')()}}",
    "__proto__",
    "\u202eevil\u202c \u0000\u0007",
    "<!--\u2028\u2029]]>",
    "javascript:window.harmed=1",
    '=HYPERLINK("http://x")',
    "m." * 2000 + "end",
    "x" * 10_000,
]


@pytest.fixture
def offline(window: Any) -> Any:
    """A tab that asks for nothing but the file itself."""
    asked: list[str] = []
    window.tab.context.set_offline(True)
    note = lambda request: asked.append(request.url)  # noqa: E731 - to be taken off again
    window.tab.on("request", note)
    yield window
    window.tab.remove_listener("request", note)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_report_works_from_disk_without_a_network(offline: Any, report: Path) -> None:
    tab = offline.tab
    tab.goto(report.as_uri())
    tab.click("[data-test=headline] h1 button")
    tab.wait_for_selector("[data-test=worst]")
    assert tab.inner_text("[data-test=worst] tbody th") == "[1, 2, 3]"
    assert tab.locator("text=Choose runs…").count() == 0
    tab.keyboard.press("n")
    assert tab.inner_text("[data-test=detail] h2") == "body.act"
    tab.go_back()
    assert tab.inner_text("[data-test=detail] h2") == "body.up"
    tab.reload()
    tab.wait_for_selector("[data-test=worst]")
    tab.click(".chip[data-verdict=identical]")
    shown = int(offline.count().split()[0])
    with tab.expect_download() as download:
        tab.click("text=CSV")
    assert len(download.value.path().read_text(encoding="utf-8").splitlines()) == shown + 1


def test_a_row_without_details_says_so(offline: Any, report: Path) -> None:
    offline.tab.goto(f"{report.as_uri()}#/pair/0")
    offline.tab.wait_for_selector(".detail .lacking, .detail .numbers")
    assert offline.tab.inner_text("[data-test=detail] h2") == "<root>"


def hostile(path: str, change: float) -> Any:
    """A run whose every name wants to be markup."""
    rows = Builder(path, keep="stats,fingerprint,tensors")
    for at, name in enumerate(HOSTILE):
        seq = rows.call(name, name, args=name)
        rows.tensor(seq, "input", name, np.arange(6.0).astype(np.float32))
        rows.tensor(seq, "output", "out", np.arange(6.0).astype(np.float32) + np.float32(change * at))
    return rows.run


def test_names_are_text_whatever_they_are(offline: Any, tmp_path: Path) -> None:
    file = compare(hostile("runs/<b>a<b>", 0), hostile("runs/<b>b<b>", 0.1)).to_html(tmp_path / "hostile.html")
    tab = offline.tab
    tab.goto(file.as_uri())
    tab.wait_for_selector(".grid [data-row]")
    for at, name in enumerate(HOSTILE):
        tab.evaluate(f"location.hash = '#/pair/{2 * at + 1}'")
        tab.wait_for_selector(f"[data-test=detail][data-row='{2 * at + 1}']")
        assert tab.text_content("[data-test=detail] h2") == name
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    assert tab.inner_text(".top-runs").split() == ["<b>a<b>", "→", "<b>b<b>"]
    with tab.expect_download() as download:
        tab.click("text=CSV")
    with download.value.path().open(newline="", encoding="utf-8") as file:
        sites = [row["site"] for row in csv.DictReader(file)]
    assert sites[::2] == [f"'{name}" if name.startswith("=") else name for name in HOSTILE]
    assert tab.evaluate("window.harmed") is None
    assert tab.locator(".page script, .page img, .page b > b").count() == 0
    assert offline.complaints == []


def test_columns_fit_where_there_are_ranks_and_micro_steps(offline: Any, tmp_path: Path) -> None:
    runs = [Builder(f"runs/{name}", world_size=2) for name in ("good", "bad")]
    for builder, change in zip(runs, (0, 1), strict=True):
        for rank, micro in ((0, 0), (0, 1), (1, 0), (1, 1)):
            rows = builder.rank(rank)
            rows.tensor(rows.call("layer", micro=micro), "output", "out", np.full(3, 1 + change * micro, np.float32))
    tab = offline.tab
    tab.goto(compare(runs[0].run, runs[1].run).to_html(tmp_path / "ranks.html").as_uri())
    tab.click("h1 button")
    titles = [title.strip() for title in tab.locator("[role=columnheader]").all_inner_texts()]
    assert {"verdict", "step", "micro", "rank", "site", "tensor", "error"} <= {*titles}
    beyond = "() => { const all = document.querySelector('.grid .virtual'); return all.scrollWidth - all.clientWidth; }"
    assert tab.evaluate(beyond) == 0
    tab.keyboard.press("Escape")
    tab.wait_for_selector("[role=columnheader] >> text=phase")
    assert tab.evaluate(beyond) == 0


def test_two_hundred_thousand_rows(offline: Any, tmp_path: Path) -> None:
    rows = 200_000
    file = tmp_path / "big.html"
    file.write_text(file_html(read_page(), big_file(rows), "big"), encoding="utf-8")
    tab = offline.tab
    tab.goto(file.as_uri())
    tab.wait_for_selector(".grid [data-row='0']")
    assert offline.count() == "200,000 of 200,000"
    assert len(offline.rows()) < 100  # only what is seen is in the document
    tab.evaluate("document.querySelector('.grid .virtual').scrollTop = 1e9")
    tab.wait_for_selector(f".grid [data-row='{rows - 1}']")
    assert len(offline.rows()) < 100
    box = tab.locator(f".grid [data-row='{rows - 1}']").bounding_box()
    assert box["y"] + box["height"] <= 800  # and the last one is really in sight
    tab.click("[role=columnheader] button >> text=error")
    tab.wait_for_selector("[aria-sort=ascending]")
    tab.evaluate("location.hash = '#/pair/123456?sort=error'")
    tab.wait_for_selector(".row-chosen[data-row='123456']")
    tab.keyboard.press("/")
    tab.keyboard.type("layers.7.")
    tab.wait_for_function("() => document.querySelector('[data-test=count]').textContent.startsWith('16,')")


@pytest.mark.slow
def test_more_rows_than_an_element_can_be_high(offline: Any, tmp_path: Path) -> None:
    rows = 400_000  # 10.4 million pixels
    file = tmp_path / "huge.html"
    file.write_text(file_html(read_page(), big_file(rows), "huge"), encoding="utf-8")
    tab = offline.tab
    tab.goto(f"{file.as_uri()}#/pair/{rows - 1}")
    tab.wait_for_selector(f".row-chosen[data-row='{rows - 1}']")
    tab.evaluate("document.querySelector('.grid .virtual').scrollTop = 1e9")
    box = tab.locator(f".grid [data-row='{rows - 1}']").bounding_box()
    assert 600 < box["y"] <= 800 - box["height"]
    tab.evaluate("document.querySelector('.grid .virtual').scrollTop = 0")
    tab.wait_for_selector(".grid [data-row='0']")


def test_what_agrees_only_in_part_is_not_told_as_a_fault(offline: Any, tmp_path: Path) -> None:
    runs = [Builder(f"runs/{name}") for name in ("good", "more")]
    for builder, sites in zip(runs, ("ab", "abc"), strict=True):
        for site in sites:
            builder.tensor(builder.call(site), "output", "out", np.ones(3, np.float32))
    tab = offline.tab
    tab.goto(compare(runs[0].run, runs[1].run).to_html(tmp_path / "part.html").as_uri())
    tab.wait_for_selector(".headline-partial")
    assert tab.inner_text("h1") == "No divergence: 2 tensors of 1 step agree (2 identical). Some are only in one run."
    verdict = tab.locator(".grid .verdict", has_text="only in candidate")
    assert verdict.evaluate("text => text.scrollWidth <= text.parentElement.clientWidth")  # and can be read in full
