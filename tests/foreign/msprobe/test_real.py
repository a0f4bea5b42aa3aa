"""Beside the real msprobe, in its own environment (`make peers`): its comparison and ours of the same dumps."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astray.compat.msprobe import compare
from msprobe_cases import CASES, ENVIRONMENT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / "msprobe").exists(), reason="MISSING: msprobe is not installed; `make peers` does that"
    ),
]

JUDGED = ("Result", "Err_message", "NPU_Stack_Info")
"""Where the two differ on purpose, or speak of other lines."""


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as held:
        return list(csv.DictReader(held))


def number(cell: str) -> Any:
    """What equals a number in a cell that is nearly the same: msprobe's sums are in the tensor's own precision."""
    return pytest.approx(float(cell.rstrip("%")), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("asked", [("tensor", "statistics"), ("statistics", "statistics")])
def test_the_tables_are_the_same(asked: tuple[str, str], tmp_path: Path) -> None:
    dumps = []
    for factor in ("1.001", "1.0"):
        folder = tmp_path / factor
        command = [ENVIRONMENT / "python", CASES / "dump.py", folder, "mix", *asked, factor]
        environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        dumps += sorted((folder / "dump").glob("step0/*/dump.json"))
    npu, bench = dumps
    command = [ENVIRONMENT / "msprobe", "compare", "-tp", npu, "-gp", bench, "-o", tmp_path / "theirs"]
    subprocess.run(command, check=True, capture_output=True)
    (theirs,) = map(table, (tmp_path / "theirs").glob("*.csv"))
    ours = table(compare({"npu_path": npu, "bench_path": bench}, tmp_path / "ours")[0])
    assert list(ours[0]) == list(theirs[0])
    there = {row["NPU Name"]: row for row in theirs}
    # Of gradients that are none, which msprobe has rows of, ours has no rows; of arguments that are none it has.
    assert [row["NPU Name"] for row in ours] == [
        name for name, row in there.items() if row["NPU Dtype"] != "N/A" or ".forward." in name
    ]
    assert {"<class 'int'>", "<class 'float'>", "<class 'bool'>", "N/A"} <= {row["NPU Dtype"] for row in ours}
    assert sum(row["Result"] == "error" for row in ours) > 0
    assert asked[0] == "statistics" or {row["Result"] for row in theirs} == {"pass"}  # of a weight scaled by 1.001
    for row in ours:
        real = there[row["NPU Name"]]
        for name, cell in row.items():
            if name not in JUDGED and not is_unknown(real, name):
                assert cell == real[name] or float(cell.rstrip("%")) == number(real[name]), (row["NPU Name"], name)


def run_blocks(whose: str, folder: Path, *asked: object) -> Path:
    """The dump.json of the second step of a program, by msprobe's debugger or ours."""
    python = ENVIRONMENT / "python" if whose == "msprobe" else Path(sys.executable)
    command = [python, CASES / "blocks.py", whose, folder, *asked]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (found,) = (folder / "dump").glob("step1/*/dump.json")
    return found


def compared(npu: Path, bench: Path, folder: Path) -> list[dict[str, str]]:
    """The table of msprobe's own comparison."""
    command = [ENVIRONMENT / "msprobe", "compare", "-tp", npu, "-gp", bench, "-o", folder]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = map(table, folder.glob("*.csv"))
    return found


@pytest.mark.parametrize(
    ("level", "task"), [("L0", "tensor"), ("L1", "tensor"), ("mix", "tensor"), ("mix", "statistics")]
)
def test_its_comparison_finds_no_difference_between_its_dump_and_ours(level: str, task: str, tmp_path: Path) -> None:
    theirs = run_blocks("msprobe", tmp_path / "theirs", level, task)
    (listed,) = ENVIRONMENT.parent.glob("lib/*/site-packages/msprobe/pytorch/dump/api_dump/support_wrap_ops.yaml")
    ours = run_blocks("astray", tmp_path / "ours", level, task, listed)
    entries = [json.loads(file.read_text())["data"] for file in (theirs, ours)]
    assert {*entries[0]} == {*entries[1]}
    for npu, bench in ((theirs, ours), (ours, theirs)):
        rows = compared(npu, bench, tmp_path / f"out-{npu.parts[-5]}")
        assert len(rows) > {"L0": 100, "L1": 1000, "mix": 1000}[level]
        assert [row for row in rows if row["NPU Name"] != row["Bench Name"]] == []
        assert [row for row in rows if row["Result"] != "pass"] == []
        assert [row for row in rows if row["Err_message"] != "[]"] == []
        forward = [row for row in rows if ".forward." in row["NPU Name"]]
        assert [row for row in forward if float_of(row.get("MaxAbsErr", "0")) > 0] == []


def float_of(cell: str) -> float:
    """A number, where it is one: of arguments that are not tensors there is none."""
    try:
        return float(cell)
    except ValueError:
        return 0.0


def test_all_that_its_dump_has_is_in_ours(tmp_path: Path) -> None:
    """Without its list ours has more: every function, such as the views that it does not know."""
    theirs = run_blocks("msprobe", tmp_path / "theirs", "mix", "statistics")
    ours = run_blocks("astray", tmp_path / "ours", "mix", "statistics")
    entries = [json.loads(file.read_text())["data"] for file in (theirs, ours)]
    assert {*entries[0]} < {*entries[1]}
    rows = compared(theirs, ours, tmp_path / "out")
    assert [row for row in rows if row["NPU Name"] != row["Bench Name"] or row["Result"] != "pass"] == []


def is_unknown(row: dict[str, str], name: str) -> bool:
    """What msprobe cannot tell: means and norms of integers, and most of single numbers."""
    of_mean = name.startswith(("Mean", "L2norm", "Norm"))
    return row[name] in ("None", "unsupported") or (of_mean and row["NPU mean"] == "None")
