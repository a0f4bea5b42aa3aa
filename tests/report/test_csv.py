"""CSV: every row, clear columns, numbers a person can read."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from astray import compare

ONES = np.ones((2, 4), np.float32)


def read(path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_pairs(runs, tmp_path):
    keep = "stats,fingerprint,tensors"
    reference = runs.program(runs.Builder(keep=keep))
    diff = compare(reference, runs.program(runs.Builder("runs/bad", keep=keep), proj=1.001))
    files = diff.to_csv(tmp_path / "out")
    assert [file.name for file in files] == ["pairs.csv", "summary.csv"]
    rows = read(files[0])
    assert list(rows[0]) == diff.table().names
    assert len(rows) == len(diff.pairs)
    assert rows[0]["verdict"] == "identical"
    assert rows[0]["cosine"] == ""
    bad = next(row for row in rows if row["verdict"] == "diverged")
    assert (bad["step"], bad["site"], bad["role"], bad["path"]) == ("1", "mlp.proj", "output", "out")
    assert (bad["dtype_reference"], bad["shape_candidate"], bad["recompute"]) == ("float32", "4×8", "false")
    assert bad["error"] == "0.00100008"
    assert bad["cosine"] == "1"
    assert bad["fingerprint_reference"] == f"{diff.first.reference.fingerprint:016x}"
    assert bad["mean_reference"] == f"{diff.first.reference.statistics.mean:.6g}"


def test_a_slice_is_named(runs, tmp_path):
    one, other = (runs.Builder(keep="stats,tensors") for _ in range(2))
    for builder, factor in ((one, 1), (other, 3)):
        builder.tensor(builder.call("a"), "output", "out", ONES * np.float32(factor), part="0:1, ..., :2")
    row = read(compare(one.run, other.run).to_csv(tmp_path)[0])[0]
    assert (row["source"], row["verdict"]) == ("values of the slice 0:1, ..., :2", "diverged")
    assert (row["different"], row["shape_reference"], row["count_reference"]) == ("2", "2×4", "8")


def test_unmatched_rows_have_empty_cells(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, sites in ((one, "ab"), (other, "bc")):
        for site in sites:
            builder.tensor(builder.call(site), "output", "out", ONES)
    rows = read(compare(one.run, other.run).to_csv(tmp_path)[0])
    assert [(row["site"], row["mean_reference"], row["mean_candidate"]) for row in rows] == [
        ("a", "1", ""),
        ("b", "1", "1"),
        ("c", "", "1"),
    ]
    assert rows[2]["shape_reference"] == rows[2]["fingerprint_reference"] == ""


def test_means_come_from_values_when_no_statistics_were_kept(runs, tmp_path):
    one, other = runs.Builder(keep="tensors"), runs.Builder(keep="tensors")
    for builder, factor in ((one, 1), (other, 3)):
        builder.tensor(builder.call("a"), "output", "out", ONES * np.float32(factor))
    row = read(compare(one.run, other.run).to_csv(tmp_path)[0])[0]
    assert (row["mean_reference"], row["mean_candidate"], row["mean_difference"], row["l2_reference"]) == (
        "1", "3", "2", "",
    )  # fmt: skip


def test_summary(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    rows = read(diff.to_csv(tmp_path)[1])
    assert [(row["step"], row["phase"], row["tensors"], row["identical"], row["diverged"]) for row in rows[:4]] == [
        ("0", "forward", "12", "12", "0"),
        ("0", "backward", "11", "11", "0"),
        ("1", "forward", "12", "9", "3"),
        ("1", "backward", "11", "0", "11"),
    ]
    assert rows[0]["largest_error"] == "0"
    assert rows[2]["largest_error"] == "0.00100008"


def test_infinite_and_unknown_errors(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, factor in ((one, 0), (other, 1)):
        builder.tensor(builder.call("zeros"), "output", "out", ONES * np.float32(factor))
        builder.tensor(builder.call("bits"), "output", "out", ONES * np.float32(factor), keep={"fingerprint"})
    rows = read(compare(one.run, other.run).to_csv(tmp_path)[0])
    assert [row["error"] for row in rows] == ["inf", ""]


def test_the_columns_are_those_of_the_documentation(runs):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "reports.md").read_text(encoding="utf-8")
    begin, end = page.index("## Columns"), page.index("## Filters")
    documented = re.findall(r"`([a-z_0-9]+)`", "".join(re.findall(r"^\|([^|]+)\|", page[begin:end], re.MULTILINE)))
    names = compare(runs.program(runs.Builder()), runs.program(runs.Builder())).table().names
    both = {f"{name}_{side}" for name in documented for side in ("reference", "candidate")}
    assert [name for name in names if name not in documented and name not in both] == []
    assert [name for name in documented if name not in names and f"{name}_reference" not in names] == []


def test_some_rows_in_another_order(runs, tmp_path):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.001))
    seen = []
    pairs, summary = diff.to_csv(
        tmp_path, filter="wrong and phase == forward", sort="-step,site", progress=lambda *at: seen.append(at)
    )
    order = [(-int(row["step"]), row["site"]) for row in read(pairs)]
    assert order == sorted(order)
    assert len({step for step, _ in order}) == 2
    assert {(row["verdict"], row["phase"]) for row in read(pairs)} == {("diverged", "forward")}
    assert sum(int(row["tensors"]) for row in read(summary)) == len(diff.pairs)
    assert seen == [(len(read(pairs)), len(read(pairs)))]


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2", "@SUM(A1)", "\t=1", "h=1"]


def test_no_name_is_run_as_a_formula(runs, tmp_path):
    one, other = runs.Builder(), runs.Builder()
    for builder, factor in ((one, -1), (other, -3)):
        for name in FORMULAS:
            builder.tensor(builder.call(name, phase=name), "output", name, ONES * np.float32(factor))
    pairs, summary = (read(file) for file in compare(one.run, other.run).to_csv(tmp_path))
    guarded = [*(f"'{name}" for name in FORMULAS[:-1]), "h=1"]
    assert [row["site"] for row in pairs] == [row["path"] for row in pairs] == guarded
    assert pairs[0]["mean_candidate"] == "-3"  # numbers stay numbers
    assert {row["phase"] for row in summary} >= {*guarded}
