"""Names that no program gives, and a folder whose name is not text, in every report: each can be read."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pyarrow
import pytest

from astray import Comparison, compare
from astray.cli import main
from astray.store.convert import convert
from record_builders import Builder

NAMES = [
    "a\0b",
    "\ud800",
    "x\udcff",
    "\ufffe\uffff",
    "\x01\x1b[31m",
    "9" * 5000,
    "h.²",
    "</script>",
    "]]>",
    "x" * 40_000,
]


def built(path: str, factor: float) -> Builder:
    run = Builder(path, keep="stats,fingerprint,tensors")
    for name in NAMES:
        run.tensor(run.call(name, name), "output", f"out.{name}", np.ones(4, np.float32) * factor)
    return run


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(built("runs/a\udcff", 1).run, built("runs/b\ud800", 2).run)


def test_json(found: Comparison, tmp_path: Path) -> None:
    content = json.loads(found.to_json(tmp_path / "a.json").read_text(encoding="utf-8"))
    assert content["reference"] == "runs/a\udcff"  # as an escape, from which the name can be had again
    assert {row["site"] for row in content["differences"]} == set(NAMES)


def test_csv(found: Comparison, tmp_path: Path) -> None:
    with found.to_csv(tmp_path)[0].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(NAMES)
    assert rows[1]["site"] == "\\ud800"


def test_xlsx(found: Comparison, tmp_path: Path) -> None:
    with zipfile.ZipFile(found.to_xlsx(tmp_path / "a.xlsx")) as book:
        for name in book.namelist():
            if name.endswith(".xml"):
                ElementTree.fromstring(book.read(name))


def test_junit(found: Comparison, tmp_path: Path) -> None:
    cases = ElementTree.parse(found.to_junit(tmp_path / "a.xml")).iter("testcase")
    assert len(list(cases)) == len(NAMES)


def test_text_and_tables(found: Comparison) -> None:
    assert "First divergence" in str(found)
    assert len(found.select(sort="site")) == len(found.select(sort="-path")) == len(NAMES)
    assert pyarrow.table(found.select())["site"].to_pylist()[1:3] == ["\\ud800", "x\\udcff"]
    found._repr_html_()


@pytest.mark.parametrize("report", ["--json", "--csv", "--xlsx", "--html", "--junit"])
def test_a_folder_whose_name_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str) -> None:
    if report == "--html" and not (Path(__file__).parents[2] / "src/astray/web/static/page.js").exists():
        pytest.skip("the page was not built")
    runs = [str(tmp_path / os.fsdecode(name)) for name in (b"a\xff", b"b\xfe")]
    for place, factor in zip(runs, (1, 2), strict=True):
        run = Builder(keep="stats,tensors")
        run.tensor(run.call("h"), "output", "out", np.ones(4, np.float32) * factor)
        convert(run.run, place, "astray")
    assert main(["compare", *runs, report, str(tmp_path / "report")]) == 1
    assert "fault" not in capsys.readouterr().err
    assert main(["map", *runs, "-o", str(tmp_path / "mapping.yaml")]) == 0
