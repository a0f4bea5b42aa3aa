"""Beside the real msprobe, in its own environment (`make peers`): its comparison and ours of the same dumps."""

from __future__ import annotations

import csv
import subprocess
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

DTYPES = ("torch.float32", "torch.int64")
"""Of rows that are tensors; arguments of other kinds have rows of their own in msprobe's table."""


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
    assert [row["NPU Name"] for row in ours] == [name for name, row in there.items() if row["NPU Dtype"] in DTYPES]
    assert sum(row["Result"] == "error" for row in ours) > 0
    assert asked[0] == "statistics" or {row["Result"] for row in theirs} == {"pass"}  # of a weight scaled by 1.001
    for row in ours:
        real = there[row["NPU Name"]]
        for name, cell in row.items():
            if name not in JUDGED and not is_unknown(real, name):
                assert cell == real[name] or float(cell.rstrip("%")) == number(real[name]), (row["NPU Name"], name)


def is_unknown(row: dict[str, str], name: str) -> bool:
    """What msprobe cannot tell: means and norms of integers, and most of single numbers."""
    of_mean = name.startswith(("Mean", "L2norm", "Norm"))
    return row[name] in ("None", "unsupported") or (of_mean and row["NPU mean"] == "None")
