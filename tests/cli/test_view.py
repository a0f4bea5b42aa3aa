"""`astray view` and `astray compare --html` as a person calls them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import numpy as np
import pytest

from astray.cli import main, parser, view
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunInfo, RunWriter
from astray.web import html


def write(path: Path, factor: float) -> str:
    with RunWriter(path, info=RunInfo.of_process()) as writer:
        for number, site in enumerate(("a", "b")):
            array = np.ones((2, 4), np.float32) * np.float32(factor**number)
            memory = Strided.from_numpy(array)
            writer.call(Call(number, 0, 0, "module", site, "Linear", 0, "forward"))
            row = Tensor(number, "output", "out", "float32", (2, 4), (4, 1), "cpu", False, *measure(memory))
            writer.tensor(row, array)
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "good", 1.0), write(tmp_path / "bad", 1.5)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was built."""
    static = tmp_path / "static"
    static.mkdir()
    (static / "page.js").write_text("let page;")
    (static / "page.css").write_text("a{}")
    monkeypatch.setattr(html, "STATIC", static)


@pytest.mark.usefixtures("page")
def test_the_comparison_as_a_file(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *runs, "--html", str(tmp_path / "diff.html")]) == 1
    assert f"written   {tmp_path / 'diff.html'}" in capsys.readouterr().err
    assert 'id="astray-data"' in (tmp_path / "diff.html").read_text()


def test_without_a_page_it_is_said_before_the_work(
    runs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(html, "STATIC", tmp_path / "nothing")
    for command in (["compare", *runs, "--html", str(tmp_path / "diff.html")], ["view", *runs]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"astray {command[0]}: The page was not built when astray was installed" in captured.err


def test_html_does_not_go_with_replicas(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    assert main(["compare", runs[0], "--replicas", "--html", "x.html"]) == 2
    assert "--html does not go with --replicas" in capsys.readouterr().err


@pytest.mark.usefixtures("page")
def test_what_cannot_be_served_is_said(
    runs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for arguments, why in (
        ([str(tmp_path / "nowhere")], "does not exist"),
        ([runs[0], "--port", "99999"], "ports end at 65535"),
        ([*runs, "--ranks", "x"], "ranks is 'x'"),
        ([*runs, "--tolerance", "x"], "tolerance is 'x'"),
    ):
        assert main(["view", *arguments]) == 2
        assert why in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "astray.web.server", raising=False)
    assert main(["view", *runs]) == 2
    assert "uvicorn is not installed: pip install 'astray[web]'" in capsys.readouterr().err


def test_options_of_the_page_and_options_that_are_fixed():
    given = ["view", "a", "b", "--steps", "0:3", "--tolerance", "x=1", "--exact", "--noise", "again", "--by", "order"]
    options = parser().parse_args(given)
    assert view._page_options(options) == {"steps": "0:3", "tolerance": ["x=1"], "exact": True, "by": "order"}
    assert view._fixed(options) == {"noise": ["again"]}
    assert (options.host, options.port, options.no_browser) == ("127.0.0.1", 0, False)
    assert view._page_options(parser().parse_args(["view", "a"])) == {}


def test_where_a_browser_could_open(monkeypatch: pytest.MonkeyPatch):
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not view._has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view._has_browser()
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    assert not view._has_browser()
    monkeypatch.setenv("BROWSER", "firefox")
    assert view._has_browser()


def test_it_serves_until_it_is_interrupted(runs: tuple[str, str], tmp_path: Path):
    for name in ("page.js", "page.css"):
        (tmp_path / name).write_text("")
    program = (
        "import pathlib, sys; from astray.web import html; html.STATIC = pathlib.Path(sys.argv[1]); "
        "from astray.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "view", *runs, "--no-browser"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", process.stderr.readline())
            assert found is not None
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            assert b'id="app"' in opener.open(found[0], timeout=20).read()
            base = found[0].partition("?")[0]
            assert b'"mode":"live"' in opener.open(f"{base}api/session", timeout=20).read()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
