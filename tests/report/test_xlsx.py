"""The workbook, opened again with another library."""

from __future__ import annotations

import sys
import time

import numpy as np
import openpyxl
import pytest

from astray import compare
from astray.errors import UsageError
from astray.report import xlsx

ONES = np.ones(4, np.float32)


@pytest.fixture
def diff(runs):
    keep = "stats,fingerprint,tensors"
    return compare(runs.program(runs.Builder(keep=keep)), runs.program(runs.Builder("runs/bad", keep=keep), proj=1.001))


def rows(sheet) -> list[dict]:
    head, *body = sheet.iter_rows(values_only=True)
    return [dict(zip(head, row, strict=True)) for row in body]


def facts(sheet) -> dict:
    return {name: value for name, value, *_ in sheet.iter_rows(values_only=True) if name is not None}


def test_sheets(diff, tmp_path):
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "new" / "diff.xlsx"))
    assert book.sheetnames == ["summary", "first divergence", "pairs"]


def test_rows_are_those_of_the_table_as_numbers(diff, tmp_path):
    sheet = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))["pairs"]
    found, table = rows(sheet), diff.table()
    assert list(found[0]) == table.names
    assert len(found) == len(diff.pairs)
    for name in ("error", "step", "cosine", "absmax_reference", "count_candidate"):
        cells = table[name]
        assert [row[name] is not None for row in found] == cells.known.tolist()
        written = np.array([row[name] for row in found if row[name] is not None], np.float64)
        np.testing.assert_allclose(written, cells.column[cells.known], rtol=1e-15)
    bad = next(row for row in found if row["verdict"] == "diverged")
    assert (bad["site"], bad["shape_reference"], bad["recompute"]) == ("mlp.proj", "4×8", False)
    assert bad["fingerprint_reference"] == f"{diff.first.reference.fingerprint:016x}"


def test_the_sheet_is_ready_to_be_read(diff, tmp_path):
    sheet = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))["pairs"]
    names = diff.table().names
    assert sheet.freeze_panes == "A2"
    last = openpyxl.utils.get_column_letter(len(names))
    assert sheet.auto_filter.ref == f"A1:{last}{len(diff.pairs) + 1}"
    letter = {name: openpyxl.utils.get_column_letter(at + 1) for at, name in enumerate(names)}
    assert sheet.column_dimensions[letter["site"]].width > 30
    assert sheet[f"{letter['error']}2"].number_format == "0.0E+00"
    verdicts = sheet.conditional_formatting[f"{letter['verdict']}2:{letter['verdict']}{len(diff.pairs) + 1}"]
    fills = {rule.formula[0]: rule.dxf.fill.bgColor.rgb for rule in verdicts}
    assert len(fills) == 10
    assert fills['"diverged"'] == "FFFFC7CE"
    assert fills['"identical"'] == "FFC6EFCE"


def test_columns_in_which_nothing_is_known_are_hidden_and_named(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))
    names = diff.table().names
    hidden = []
    for dimension in book["pairs"].column_dimensions.values():
        hidden += names[dimension.min - 1 : dimension.max] if dimension.hidden else []
    assert "cosine" in hidden
    assert "bound_mean" not in hidden
    assert facts(book["summary"])["note"] == f"Columns in which nothing is known are hidden: {', '.join(hidden)}."


def test_summary_and_first_divergence(diff, tmp_path):
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))
    summary = facts(book["summary"])
    assert summary["answer"] == "First divergence: step 1, forward, call 0 of mlp.proj (Linear), output"
    assert (summary["reference"], summary["candidate"]) == ("runs/good", "runs/bad")
    assert (summary["tensors"], summary["calls"]) == (69, 36)
    assert ("step", "phase", "tensors") in [row[:3] for row in book["summary"].iter_rows(values_only=True)]
    first = facts(book["first divergence"])
    assert first["place"] == "step 1, forward, call 0 of mlp.proj (Linear), output"
    assert (first["cause"], first["verdict"], first["wrong rows after it"]) == (
        "computation",
        "diverged",
        diff.first.victims,
    )
    assert first["line"] == "net.py:7 in MLP.forward"
    assert first["error"] == pytest.approx(diff.first.error)
    assert first["evidence 1"] == diff.first.evidence[0]
    assert first["mean, candidate"] == pytest.approx(diff.first.candidate.statistics.mean)


def test_runs_that_agree(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder()))
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "same.xlsx"))
    assert facts(book["summary"])["answer"] == "No divergence"
    assert book["first divergence"]["A1"].value == "No divergence."


def test_some_rows_in_another_order_are_said_to_be_some(diff, tmp_path):
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx", filter="wrong", sort="-error"))
    errors = [row["error"] for row in rows(book["pairs"])]
    assert len(errors) == diff.counts["diverged"]
    assert errors == sorted(errors, reverse=True)
    notes = [value for name, value, *_ in book["summary"].iter_rows(values_only=True) if name == "note"]
    assert notes[0] == f"The rows are {len(errors)} rows where wrong, sorted by -error, of 69 in all."


def test_more_rows_than_a_sheet_can_hold_go_on_in_the_next_and_it_is_said(diff, tmp_path, monkeypatch):
    assert xlsx.SHEET_ROWS == 1_048_576
    assert xlsx.sheet_ranges(1_048_575) == [range(1_048_575)]
    assert xlsx.sheet_ranges(1_048_576) == [range(1_048_575), range(1_048_575, 1_048_576)]
    monkeypatch.setattr(xlsx, "SHEET_ROWS", 31)
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))
    assert book.sheetnames[2:] == ["pairs", "pairs 2", "pairs 3"]
    sheets = [rows(book[name]) for name in book.sheetnames[2:]]
    assert [len(sheet) for sheet in sheets] == [30, 30, 9]
    assert [row["site"] for sheet in sheets for row in sheet] == diff.pairs["site"].tolist()
    notes = [value for name, value, *_ in book["summary"].iter_rows(values_only=True) if name == "note"]
    assert "69 rows are more than a sheet can hold (31): they go on in pairs 2, pairs 3." in notes


def test_odd_cells(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, factor in ((one, 0), (other, 1)):
        builder.tensor(builder.call("=1+1"), "output", "out", ONES * np.float32(factor))
        builder.tensor(builder.call("https://x"), "output", "out", ONES * np.float32(factor), keep={"fingerprint"})
    found = rows(openpyxl.load_workbook(compare(one.run, other.run).to_xlsx(tmp_path / "odd.xlsx"))["pairs"])
    assert [(row["site"], row["error"]) for row in found] == [("=1+1", "inf"), ("https://x", None)]


def test_without_xlsxwriter_there_is_a_sentence(diff, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    with pytest.raises(UsageError, match=r"needs XlsxWriter, which is not installed: pip install 'astray\[xlsx\]'"):
        diff.to_xlsx(tmp_path / "diff.xlsx")
    assert not (tmp_path / "diff.xlsx").exists()


def test_what_went_wrong_by_itself_has_a_sheet_of_its_own(runs, tmp_path):
    made = []
    for factor in (1.0, 1.5):
        builder = runs.Builder()
        for site, off in (("left", factor), ("right", factor), ("fine", 1.0)):
            seq = builder.call(site)
            builder.tensor(seq, "input", "0", ONES)
            builder.tensor(seq, "output", "out", ONES * np.float32(off))
        made.append(builder.run)
    diff = compare(*made)
    assert [other.site for other in diff.others] == ["right"]
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "diff.xlsx"))
    assert book.sheetnames == ["summary", "first divergence", "wrong by itself", "pairs"]
    assert facts(book["first divergence"])["place"] == "step 0, forward, call 0 of left (Linear), output"
    assert facts(book["wrong by itself"])["place"] == "step 0, forward, call 0 of right (Linear), output"
    assert facts(book["wrong by itself"])["evidence 1"] == diff.others[0].evidence[0]
    assert facts(book["summary"])["wrong by itself"] == "step 0, forward, call 0 of right (Linear), output"


def test_no_name_is_a_formula(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    names = ["=1+1", "{=1+1}", "+1", "-2", "@SUM(A1)", "http://x"]
    for builder, factor in ((one, 1), (other, 3)):
        for name in names:
            builder.tensor(builder.call(name), "output", "out", ONES * np.float32(factor))
    book = openpyxl.load_workbook(compare(one.run, other.run).to_xlsx(tmp_path / "diff.xlsx"))
    assert [row["site"] for row in rows(book["pairs"])] == names
    kinds = {cell.data_type for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None}
    assert kinds <= {"s", "n", "b"}  # no formula anywhere
    assert [cell.hyperlink for row in book["pairs"].iter_rows() for cell in row if cell.hyperlink] == []


def test_equal_reports_have_equal_bytes(diff, tmp_path):
    first = diff.to_xlsx(tmp_path / "one.xlsx").read_bytes()
    time.sleep(2.1)  # dates in a zip file count by two seconds
    assert diff.to_xlsx(tmp_path / "other.xlsx").read_bytes() == first
