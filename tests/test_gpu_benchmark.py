"""The GPU benchmark runs from end to end, on a tiny model and on the CPU if there is nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(report: str, section: str) -> list[list[str]]:
    """The cells of the tables in a section, without their heads."""
    text = report.partition(f"### {section}\n")[2].partition("\n### ")[0]
    lines = text.splitlines()
    under = [number + 1 for number, line in enumerate(lines) if line.startswith("| ---")]
    found = []
    for number in under:
        while number < len(lines) and lines[number].startswith("| "):
            found.append([cell.strip() for cell in lines[number].strip("| ").split(" | ")])
            number += 1
    return found


@pytest.mark.slow
def test_every_section_but_the_peers(tmp_path: Path) -> None:
    done = run("--small", "--only", "steps,kernels,memory,bits,values", "--out", str(tmp_path / "report.md"))
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout
    assert (tmp_path / "report.md").read_text() == done.stdout
    steps = rows(done.stdout, "Recorded steps")
    names = ["modules", "functions", "both"]
    expected = [*(f"statistics, {name}" for name in names), "fingerprints, ops", "statistics, both, updates too"]
    assert [row[0] for row in steps] == expected * 2
    tensors = {row[0]: int(row[6].replace(",", "")) for row in steps[:5]}
    assert tensors["statistics, modules"] < tensors["statistics, both"] < tensors["statistics, both, updates too"]
    bits = rows(done.stdout, "Bits")
    assert [row[-1] for row in bits] == ["**yes**"] * 8
    assert rows(done.stdout, "Values")[0][0] == "astray"
    if not torch.cuda.is_available():
        assert done.stdout.count("Not measured: there is no GPU.") == 2


@pytest.mark.slow
def test_peers() -> None:
    """DebugMode comes with torch. msprobe is measured where it is installed, and said to be missing where it is not."""
    done = run("--small", "--only", "peers")
    assert done.returncode == 0, done.stderr
    *msprobe, debug = rows(done.stdout, "Peers")
    assert debug[1] == "DebugMode"
    assert float(debug[3]) > 1
    for row in msprobe:
        assert (row[3] == "missing") == (f"MISSING: {row[1]}, which could not be run" in done.stdout)


def test_an_unknown_section_is_refused() -> None:
    done = run("--small", "--only", "steps,stpes")
    assert done.returncode == 2
    assert "stpes is not a section; there are defaults, kernels, steps, memory, bits, values, peers" in done.stderr


def test_stand_ins_take_the_place_of_missing_packages_alone() -> None:
    program = """
import stand_ins
stand_ins.PACKAGES = ("numpy", "no_such_package")
stand_ins.install()
import numpy, no_such_package.part as part
class Writer(part.Writer): ...
print(numpy.zeros(1).sum(), part.__name__, Writer.__mro__[1].__name__)
"""
    folder = BENCHMARKS / "peers"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "0.0 no_such_package.part Writer\n"
    assert done.stderr == "not installed, replaced by empty modules: no_such_package\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_nothing_is_measured() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (0, "")
    assert "NOT MEASURED: there is no CUDA device here" in done.stderr
