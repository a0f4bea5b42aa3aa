"""What a notebook shows: the same facts as the terminal, escaped, in one small piece."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from astray import compare
from astray.report.text import render

ONES = np.ones(4, np.float32)
VOID = {"br", "hr", "img", "meta", "link", "input"}


class Page(HTMLParser):
    """The text of each element by its tag, and a check that every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag not in VOID
        assert {name for name, _ in attributes} <= {"style"}
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag] = self.texts.get(tag, "") + data


@pytest.mark.parametrize("fault", [{}, {"proj": 1.001}, {"data": 1.1}, {"rate": 1.01}])
def test_the_same_facts_as_the_terminal(runs, fault):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), **fault))
    page = Page(diff._repr_html_())
    assert page.texts["pre"] == render(diff, width=100)
    assert page.tags <= {"div", "pre", "span", "details", "summary", "table", "tr", "td", "th"}
    assert ("details" in page.tags) == (not diff.same)


def test_the_first_rows_that_do_not_agree(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001), exact=True)
    text = diff._repr_html_()
    assert Page(text).texts["summary"] == f"rows that do not agree: the first 20 of {diff.counts['diverged']}"
    assert text.count("<tr>") == 21
    assert len(text) < 20_000


def test_names_are_escaped(runs):
    one, other = runs.Builder("<b>good"), runs.Builder()
    for builder, factor in ((one, 1), (other, 2)):
        builder.tensor(builder.call("<script>alert(1)</script>"), "output", "&out", ONES * np.float32(factor))
    diff = compare(one.run, other.run)
    for text in (diff._repr_html_(), diff.select("site ~ '<script>'")._repr_html_()):
        assert "<script" not in text
        assert "<b>" not in text
        assert "\x1b" not in text
        Page(text)


def test_rows_that_were_asked_for(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    page = Page(diff.select("wrong", "-error,-absmax_reference", 3)._repr_html_())
    assert page.texts["div"].startswith(f"3 of {diff.counts['diverged']} rows where wrong, sorted by -error")
    assert "absmax ref" in page.texts["th"]
    assert len(re.findall("<tr>", diff.table()._repr_html_())) == 26
    assert "table" not in Page(diff.select("error > 9e9")._repr_html_()).tags


def test_what_went_wrong_by_itself_is_there_too(runs):
    made = []
    for factor in (1.0, 1.5):
        builder = runs.Builder()
        for site in ("left", "right"):
            seq = builder.call(site)
            builder.tensor(seq, "input", "0", np.ones(4, np.float32))
            builder.tensor(seq, "output", "out", np.full(4, factor, np.float32))
        made.append(builder.run)
    html = compare(*made)._repr_html_()
    assert "These are not its victims, for their inputs agree:" in html
    assert html.index("call 0 of left (Linear)") < html.index("step 0, forward, right (Linear), output (more than")
