"""The page as HTML: what is in the one-file report, what cannot break out of it, and that it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astray import compare
from astray.errors import UsageError
from astray.web import html
from astray.web.detail import detail_of
from astray.web.html import PageAssets, contents, file_html, read_page, write_html
from astray.web.overview import overview_of
from astray.web.views import ComparisonView
from astray.web.wire import encode
from page_documents import HOSTILE, hostile_run, pair_of, program_comparison, unpack

PAGE = PageAssets("const answer = 6 * 7;\n", "body { margin: 0 }\n")


class Parsed(HTMLParser):
    """The tags of a file with their attributes, and the text inside of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


def embedded(text: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The documents of a file as the page unpacks them."""
    data = re.search(r'<script type="text/plain" id="astray-data">([^<]*)</script>', text)
    assert data is not None
    raw = zlib.decompress(base64.b64decode(data[1], validate=True), wbits=-15)
    length = int.from_bytes(raw[:4], "little")
    assert (4 + length) % 8 == 0
    return json.loads(raw[4 : 4 + length]), unpack(raw[4 + length :])


def test_the_file_holds_all_documents(tmp_path: Path):
    comparison = program_comparison(proj=1.5)
    file = write_html(comparison, tmp_path / "out" / "diff.html", PAGE)
    documents, table = embedded(file.read_text(encoding="utf-8"))
    view = ComparisonView(comparison)
    assert documents["overview"] == json.loads(encode(overview_of(view)))
    assert documents["session"]["mode"] == "file"
    assert [run["label"] for run in documents["session"]["runs"]] == ["good", "bad"]
    first = documents["overview"]["first"]["row"]
    assert documents["pairs"][str(first)] == json.loads(encode(detail_of(view, first)))
    assert table["site"] == comparison.pairs.coded("site").tolist()
    assert np.allclose(table["error"], comparison.pairs.numbers("error"), rtol=2e-7, atol=0, equal_nan=True)


def test_the_details_that_matter_come_first():
    comparison = program_comparison(proj=1.5)
    view = ComparisonView(comparison)
    page = file_html(PAGE, contents(view, {}), "")
    pairs = embedded(page)[0]["pairs"]
    first = overview_of(view)["first"]
    wrong = [row for row in range(len(view)) if comparison.pairs["verdict"][row] == "diverged"]
    around = [detail_of(view, first["row"])[name] for name in ("previous", "next")]
    for row in (
        first["row"],
        first["before"]["row"],
        *view.calls.rows(view.calls.of_row[first["row"]]),
        *around,
        *wrong,
    ):
        assert str(row) in pairs
    assert len(pairs) < len(view)


def test_a_budget_is_kept_and_the_first_divergence_is_always_there(monkeypatch: pytest.MonkeyPatch):
    view = ComparisonView(program_comparison(proj=1.5))
    first = str(overview_of(view)["first"]["row"])
    for budget in (0, 100_000):
        pairs = embedded(file_html(PAGE, contents(view, {}, budget), ""))[0]["pairs"]
        assert first in pairs
        assert len(json.dumps(pairs)) < max(budget, 1) * 2 + 20_000
    monkeypatch.setattr(html, "MOST_READ", 0)
    assert list(embedded(file_html(PAGE, contents(view, {}), ""))[0]["pairs"]) == [first]


def test_runs_that_agree_have_a_file_too(tmp_path: Path):
    documents, _ = embedded(write_html(program_comparison(), tmp_path / "same.html", PAGE).read_text())
    assert documents["overview"]["agree"] is True
    assert documents["pairs"] == {}


def test_no_name_can_break_out(tmp_path: Path):
    comparison = compare(hostile_run("runs/<script>alert(1)<").run, hostile_run("runs/a&b", 1.5).run)
    text = write_html(comparison, tmp_path / "diff.html", PAGE).read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert [tag for tag, _ in parsed.tags] == [
        "html", "head", "meta", "meta", "meta", "meta", "title", "link", "style", "body", "div", "noscript", "script",
        "script",
    ]  # fmt: skip
    for name in HOSTILE:
        if name not in ("<!--", "]]>"):
            assert name not in text
    assert parsed.texts["title"] == ["astray: <script>alert(1)< and a&b"]
    documents, table = embedded(text)
    assert table["site"] == HOSTILE
    assert {pair["key"]["site"] for pair in documents["pairs"].values()} == set(HOSTILE)


def test_the_policy_allows_this_script_and_no_other(tmp_path: Path):
    text = write_html(pair_of(np.ones(2), np.ones(2)), tmp_path / "diff.html", PAGE).read_text(encoding="utf-8")
    parsed = Parsed(text)
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    for tag, body in (("script", parsed.texts["script"][-1]), ("style", parsed.texts["style"][-1])):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert parsed.texts["script"][-1] == PAGE.script


def test_nothing_is_fetched_from_elsewhere(tmp_path: Path):
    text = write_html(pair_of(np.ones(2), np.ones(2)), tmp_path / "diff.html", PAGE).read_text(encoding="utf-8")
    assert "http://" not in text
    assert "https://" not in text
    addresses = [a.get("src") or a.get("href") for _, a in Parsed(text).tags if a.get("src") or a.get("href")]
    assert addresses == ["data:,"]


def test_lines_end_as_the_hash_was_taken(tmp_path: Path):
    page = PageAssets("let a = 1;\r\nlet b = 2;\r", "a{}\r\n")
    file = write_html(pair_of(np.ones(2), np.ones(2)), tmp_path / "diff.html", page)
    assert b"\r" not in file.read_bytes()


@pytest.mark.parametrize(
    "page",
    [
        PageAssets("x = '</script>'", ""),
        PageAssets("x = '</SCRIPT '", ""),
        PageAssets("<!-- x", ""),
        PageAssets("", "</style>"),
    ],
)
def test_a_page_that_would_end_its_own_tag_is_refused(page: PageAssets):
    with pytest.raises(UsageError, match="Build it again"):
        file_html(page, "", "")


def test_without_a_built_page_there_is_a_sentence_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(html, "STATIC", tmp_path / "nothing")
    with pytest.raises(UsageError, match="The page was not built when astray was installed"):
        program_comparison().to_html(tmp_path / "diff.html")
    assert not (tmp_path / "diff.html").exists()


def test_a_built_page_is_found(tmp_path: Path):
    (tmp_path / "page.js").write_text(PAGE.script)
    (tmp_path / "page.css").write_text(PAGE.style)
    assert read_page(tmp_path) == PAGE
