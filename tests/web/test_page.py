"""The page in a real browser, served as `astray view` does."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from astray.comparison.verdict import BAD

pytestmark = pytest.mark.browser


@pytest.fixture
def tab(window: Any, served: Any) -> Iterator[Any]:
    """The page at the overview, for tests that change nothing but the address: loading it takes as long as they do."""
    if window.open != served.address:
        window.tab.goto(served.address)
    else:
        window.tab.evaluate("location.hash = '#/'")
        window.tab.wait_for_selector("[data-test=detail]", state="detached")
    window.tab.wait_for_selector(".grid [data-row]")
    yield window.tab
    window.kept = served.address


@pytest.fixture
def fresh(window: Any, served: Any) -> Any:
    """The page, loaded for this test alone."""
    window.tab.goto(served.address)
    window.tab.wait_for_selector(".grid [data-row]")
    return window.tab


@pytest.fixture
def pairs(served: Any) -> Any:
    """The table that the page shows, as Python has it."""
    return served.workspace.shown.view.pairs


@pytest.fixture
def first(served: Any) -> int:
    """The row of the first divergence."""
    return int(json.loads(served.workspace.shown.overview)["first"]["row"])


def test_from_the_headline_to_the_worst_element(tab: Any, window: Any, first: int) -> None:
    headline = tab.locator("[data-test=headline]")
    assert "First divergence: step 1, forward, call 0 of body.up (Up), output" in headline.inner_text()
    assert "conftest.py" in headline.inner_text()  # the line of the program
    headline.locator("h1 button").click()
    detail = tab.locator("[data-test=detail]")
    assert detail.locator("h2").inner_text() == "body.up"
    tab.wait_for_selector("[data-test=worst]")
    worst = detail.locator("[data-test=worst] tbody tr")
    assert worst.count() == 1
    assert worst.locator("th").inner_text() == "[1, 2, 3]"
    assert worst.locator("td").nth(2).inner_text() == "0.5"
    assert detail.locator("[data-test=heat]").is_visible()
    assert detail.locator(".histogram").count() == 2
    assert detail.locator("[data-test=lines] canvas").is_visible()
    assert "return x + self.down(self.act(self.up(x)))" in detail.inner_text()
    assert window.hash() == f"#/pair/{first}"


def test_the_timeline_leads_to_the_call(tab: Any) -> None:
    box = tab.locator("[data-test=timeline]").bounding_box()
    tab.mouse.move(box["x"] + 64, box["y"] + 26)  # the first call of the first lane
    tip = tab.locator(".tip").inner_text()
    assert tip.startswith("first Linear\nstep 0 · forward")
    tab.mouse.click(box["x"] + 64, box["y"] + 26)
    assert tab.locator("[data-test=detail] h2").inner_text() == "first"


def test_previous_and_next_cross_the_border_of_a_step(tab: Any, served: Any) -> None:
    view = served.workspace.shown.view
    steps, calls = view.pairs.numbers("step"), view.calls
    border = next(at for at in range(len(calls.first)) if steps[calls.first[at]] == 1)
    tab.evaluate(f"location.hash = '#/pair/{calls.first[border - 1]}'")
    detail = tab.locator("[data-test=detail]")
    tab.wait_for_selector(f"[data-test=detail][data-row='{calls.first[border - 1]}']")
    assert "next call · step 1" in detail.locator("[data-test=next]").inner_text()
    tab.keyboard.press("n")
    there = int(detail.get_attribute("data-row"))
    assert view.calls.of_row[there] == border
    assert "step 1" in detail.locator(".detail-place").inner_text()
    detail.locator("[data-test=previous]").click()
    assert view.calls.of_row[int(detail.get_attribute("data-row"))] == border - 1
    tab.go_back()
    tab.wait_for_selector(f"[data-test=detail][data-row='{there}']")


def test_filters_leave_the_rows_that_fit(tab: Any, window: Any, pairs: Any) -> None:
    step, phase = pairs.numbers("step"), pairs.coded("phase")
    verdict, error = pairs.coded("verdict").codes, pairs.numbers("error")
    forward = phase.codes == phase.code("forward")
    total = f"of {len(pairs):,}"

    def shows(mask: Any) -> None:
        tab.wait_for_function(
            "text => document.querySelector('[data-test=count]').textContent === text", arg=f"{mask.sum():,} {total}"
        )

    tab.fill(".filter-step", "1-2")
    shows(step >= 1)
    tab.select_option(".filters select", "forward")
    shows((step >= 1) & forward)
    tab.click(".chip[data-verdict=diverged]")
    shows((step >= 1) & forward & (verdict == 3))
    tab.fill(".filter-least", "0.01")
    shows((step >= 1) & forward & (verdict == 3) & (error >= 0.01))
    assert window.hash() == "#/?step=1-2&phase=forward&least=0.01&verdict=diverged"
    tab.click("text=clear")
    shows(step >= 0)
    tab.keyboard.press("/")
    tab.keyboard.type("body.up OUTPUT")
    sites, roles = pairs.coded("site").tolist(), pairs.coded("role").tolist()
    shows(np_mask("body.up" in site and role == "output" for site, role in zip(sites, roles, strict=True)))
    tab.keyboard.press("Escape")
    tab.click("text=clear")
    tab.click("[data-site='body'] .branch-name")
    shows(np_mask(site.split(".")[0] == "body" for site in sites))
    tab.check(".switch input")
    wrong = {site for site, code in zip(sites, verdict, strict=True) if code in BAD and site.split(".")[0] == "body"}
    assert window.count() == f"{len(wrong)} {total}"


def np_mask(flags: Iterator[bool]) -> Any:
    import numpy as np

    return np.array(list(flags))


def test_a_filter_that_cannot_be_read_says_so(tab: Any, window: Any) -> None:
    tab.fill(".filter-step", "soon")
    tab.wait_for_selector(".filter-count .problem")
    assert window.count() == "'soon' is not a step. Write 3, 2-5 or 0,4."
    tab.fill(".filter-step", "77")
    tab.wait_for_selector(".state-empty")
    assert "No row fits these filters." in tab.inner_text(".grid")


def test_sorting_by_a_column(tab: Any, window: Any, pairs: Any) -> None:
    error = pairs.numbers("error")
    head = tab.locator("[role=columnheader]", has_text="error")
    head.locator("button").click()
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    shown = [error[row] for row in window.rows()]
    assert shown == sorted(shown, reverse=True)
    assert shown[0] == max(error[error == error])


def test_a_link_opens_what_was_looked_at_and_back_returns(tab: Any, window: Any, first: int) -> None:
    tab.goto(f"{tab.url.split('#')[0]}#/pair/{first}?step=1&q=body&sort=-error&colour=error")
    tab.reload()
    tab.wait_for_selector(f".row-chosen[data-row='{first}']")
    assert tab.input_value("#search") == "body"
    assert tab.input_value(".filter-step") == "1"
    tab.keyboard.press("Escape")
    tab.wait_for_selector("[data-test=detail]", state="detached")
    tab.click(".chip[data-verdict=diverged]")
    assert "verdict=diverged" in window.hash()
    tab.go_back()
    tab.go_back()
    tab.wait_for_selector(f"[data-test=detail][data-row='{first}']")
    assert window.hash() == f"#/pair/{first}?step=1&q=body&sort=-error&colour=error"


def test_keys_work_behind_a_switch_and_rest_while_help_is_open(tab: Any, window: Any) -> None:
    tab.check(".switch input")
    tab.keyboard.press("ArrowDown")
    assert window.hash() == f"#/pair/{window.rows()[0]}?conclusion=1"
    tab.keyboard.press("?")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Escape")
    assert window.hash() == f"#/pair/{window.rows()[0]}?conclusion=1"


def test_the_table_as_csv(tab: Any, pairs: Any) -> None:
    tab.click(".chip[data-verdict=diverged]")
    with tab.expect_download() as download:
        tab.click("text=CSV")
    lines = download.value.path().read_text(encoding="utf-8").splitlines()
    assert len(lines) - 1 == (pairs.coded("verdict").codes == 3).sum()
    assert download.value.suggested_filename == "pairs.csv"


def test_exports_have_the_rows_that_are_shown(tab: Any, window: Any) -> None:
    for query in ("conclusion=1", "conclusion=1&q=linear&sort=-error", "q=module&step=1"):
        tab.evaluate(f"location.hash = '#/?{query}'")
        tab.wait_for_selector(".clear")
        with tab.expect_download() as download:
            tab.click("text=CSV")
        lines = list(csv.DictReader(download.value.path().read_text(encoding="utf-8").splitlines()))
        shown = tab.locator(".grid [aria-rowindex='1'] bdi").inner_text()
        assert (f"{len(lines):,}", lines[0]["site"]) == (window.count().split()[0], shown), query


def test_rows_that_are_not_there(tab: Any, window: Any) -> None:
    tab.evaluate("location.hash = '#/pair/123456'")
    tab.wait_for_selector("text=There is no row 123456")
    assert window.rows()


def test_from_a_tensor_to_who_takes_it(tab: Any, first: int) -> None:
    tab.evaluate(f"location.hash = '#/pair/{first}'")
    taken = tab.locator(".section", has_text="Comes from, goes to").locator(".link")
    assert taken.first.inner_text() == "step 1, forward, body.act, input 0"
    taken.first.click()
    assert tab.inner_text("[data-test=detail] h2") == "body.act"
    tab.wait_for_selector(".detail .around")
    assert "made by" in tab.inner_text(".detail .around")


def test_the_first_row_in_sight_is_a_whole_one(fresh: Any) -> None:
    fresh.wait_for_selector(".row-first")
    under, tops = fresh.evaluate("""() => [document.querySelector(".grid .head").getBoundingClientRect().bottom,
      [...document.querySelectorAll(".grid [data-row]")].map((row) => row.getBoundingClientRect().top)]""")
    assert tops[0] < under  # it has scrolled
    assert under in tops


def test_arrows_go_through_the_rows(fresh: Any, window: Any, first: int) -> None:
    fresh.click(f".grid [data-row='{first}']")  # which is in sight
    fresh.keyboard.press("ArrowDown")
    assert window.hash() == f"#/pair/{first + 1}"
    fresh.keyboard.press("ArrowUp")
    fresh.keyboard.press("ArrowUp")
    assert window.hash() == f"#/pair/{first - 1}"
    fresh.keyboard.press("?")
    assert "the previous call" in fresh.inner_text(".dialog")
    fresh.keyboard.press("Escape")
    assert fresh.locator(".dialog").count() == 0
    assert fresh.locator("[data-test=detail]").count() == 1


CONTRAST = """() => {
  const number = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const paper = light(number(getComputedStyle(document.querySelector(".pairs")).backgroundColor));
  const texts = [...document.querySelectorAll(".verdict, .dim, .cell, h1, .link, .chip")];
  return Math.min(...texts.map((text) => {
    const ink = light(number(getComputedStyle(text).color));
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
}"""


@pytest.mark.slow
def test_dark_and_light_can_both_be_read(fresh: Any) -> None:
    paper = "getComputedStyle(document.querySelector('.pairs')).backgroundColor"
    light = fresh.evaluate(paper)
    assert fresh.evaluate(CONTRAST) >= 4.5
    fresh.emulate_media(color_scheme="dark")
    dark = fresh.evaluate(paper)
    assert dark != light
    assert fresh.evaluate(CONTRAST) >= 4.5
    fresh.click("[data-test=theme]")  # from the system's to light
    assert fresh.evaluate(paper) == light
    fresh.reload()
    fresh.wait_for_selector(".grid [data-row]")
    assert fresh.evaluate(paper) == light  # it was remembered
    fresh.emulate_media(color_scheme="light")
    fresh.click("[data-test=theme]")
    assert fresh.evaluate(paper) == dark


def test_a_server_that_is_gone_is_told_of(fresh: Any, window: Any) -> None:
    fresh.route("**/api/pair/*", lambda route: route.abort())
    fresh.locator(".grid [data-row]").first.click()
    fresh.wait_for_selector(".detail .state-error")
    assert "Is `astray view` still running?" in fresh.inner_text(".detail .state-error")
    assert all("ERR_FAILED" in text for text in window.complaints)
    window.complaints.clear()


def test_a_tab_that_shows_an_older_comparison_says_so(fresh: Any, served: Any) -> None:
    served.workspace.open("0", None, {}).wait()  # as another tab would
    fresh.locator(".grid [data-row]").first.click()
    fresh.wait_for_selector(".detail .state-error")
    assert "Something else has been compared since" in fresh.inner_text(".detail .state-error")
    served.workspace.open("0", "1", {}).wait()


@pytest.mark.slow
def test_two_runs_are_chosen_in_the_page(fresh: Any, window: Any, served: Any) -> None:
    fresh.click("text=Choose runs…")
    fresh.select_option("select[name=reference]", label="bad")
    fresh.select_option("select[name=candidate]", label="bad")
    fresh.fill("input[name=steps]", "later")
    fresh.click("button[type=submit]")
    fresh.wait_for_selector("[role=alert]")
    assert re.search("later", fresh.inner_text("[role=alert]"))
    fresh.fill("input[name=steps]", "0:2")
    fresh.click("button[type=submit]")
    fresh.wait_for_selector(".headline-good")
    assert fresh.locator(".top-runs").inner_text().split() == ["bad", "→", "bad"]
    assert fresh.locator(".chip").all_inner_texts()[0].startswith("identical")
    fresh.click("text=Choose runs…")
    fresh.select_option("select[name=noise]", label="good")
    fresh.fill("input[name=offset]", "1")
    fresh.fill("input[name=steps]", "")
    fresh.click("button[type=submit]")
    fresh.wait_for_selector(".headline-bad")  # each step is held against the one before
    session = served.workspace.session()
    assert (session["noise"], session["options"]) == ("0", {"offset": 1})
    served.workspace.open("0", "1", {}).wait()
    window.complaints.clear()  # the browser tells of the refused request


def test_one_run_alone(fresh: Any, window: Any, served: Any) -> None:
    fresh.click("text=Choose runs…")
    fresh.select_option("select[name=reference]", label="broken")
    fresh.select_option("select[name=candidate]", "")
    fresh.click("button[type=submit]")
    fresh.wait_for_selector(".chip[data-verdict='non-finite']")
    assert "Infinity from step 2, forward" in fresh.inner_text("h1")
    fresh.click("h1 button")
    detail = fresh.locator("[data-test=detail]")
    assert "NaN or infinity at step 2" in detail.inner_text()
    assert fresh.locator(".tree .tag").inner_text() == "first"
    served.workspace.open("0", "1", {}).wait()


def test_progress_is_shown_and_can_be_stopped(fresh: Any) -> None:
    running = {"state": "running", "done": 3, "total": 12, "text": "comparing values"}
    session = fresh.evaluate("() => fetch('/api/session').then((answer) => answer.json())")
    stopped = []

    def stop(route: Any) -> None:
        stopped.append(route.request.headers)
        running.update(state="stopped", text="Stopped before it was done.")
        route.fulfill(status=202, body="{}", content_type="application/json")

    fresh.route("**/api/session", lambda route: route.fulfill(json=session | {"job": running}))
    fresh.route("**/api/stop", stop)
    fresh.reload()
    fresh.wait_for_selector("[data-test=progress] progress")
    assert "3 of 12" in fresh.inner_text("[data-test=progress]")
    fresh.click("text=Stop")
    fresh.wait_for_selector("text=Stopped before it was done.")
    assert stopped[0]["x-astray"]
