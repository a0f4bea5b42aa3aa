"""The benchmark of planted faults works from end to end, and what it declares is in the recordings."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import astray

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

EXACT_AT_LEAST = {"modules": 50, "functions": 46, "tensors": 50, "updates": 49, "noise": 46, "noise-tensors": 48}
"""Of 50 faults, at each setting. Raise a number when the comparison gets better."""


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def part(name: str) -> ModuleType:
    return importlib.import_module(f"faults.{name}")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with closing(part("running").Bench(tmp_path_factory.mktemp("faults"))) as bench:
        yield bench


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "faults"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# -- the declarations ------------------------------------------------------------------------------------------------


def missing(bench: Any, setting_name: str, *, ranks: int) -> list[str]:
    """The faults whose expected culprit is not in the reference recording."""
    setting = part("declared").SETTINGS[setting_name]
    is_recorded = part("running").is_recorded
    faults = [fault for fault in part("catalogue").FAULTS.values() if fault.program.ranks == ranks]
    assert faults
    return [
        fault.name
        for fault in faults
        if not is_recorded(fault.expected(setting), setting, astray.open(bench.reference(setting, fault.program)))
    ]


@pytest.mark.parametrize("setting", ["modules", "functions", "tensors", "updates"])
def test_every_declared_culprit_is_in_the_reference(bench: Any, setting: str) -> None:
    assert missing(bench, setting, ranks=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["modules", "functions", "tensors", "updates"])
def test_every_declared_culprit_is_in_the_reference_of_two_ranks(bench: Any, setting: str) -> None:
    assert missing(bench, setting, ranks=2) == []


def test_a_culprit_that_does_not_exist_is_not_found(bench: Any) -> None:
    declared, is_recorded = part("declared"), part("running").is_recorded
    for setting in (declared.SETTINGS["modules"], declared.SETTINGS["functions"]):
        reference = astray.open(bench.reference(setting, declared.PLAIN))
        there = declared.Culprit(4, "h.1.mlp.act", "forward", "computation", "gelu")
        assert is_recorded(there, setting, reference)
        assert not is_recorded(replace(there, step=5), setting, reference)
        assert not is_recorded(replace(there, site="h.3.mlp.act"), setting, reference)
        assert is_recorded(replace(there, function="relu"), setting, reference) is (not setting.functions)


def test_there_are_enough_faults_and_controls() -> None:
    catalogue = part("catalogue")
    assert len(catalogue.FAULTS) == 50
    assert len(catalogue.CONTROLS) == 11


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "setting", "found"),
    [
        ("weight-scaled", "modules", (3, "h.1.mlp.down", "forward", "parameter")),
        ("gelu-by-tanh", "functions", (0, "h.1.mlp.act/gelu", "forward", "computation")),
        ("adam-for-adamw", "updates", (0, "tokens.weight", "update", "computation")),
        ("loss-summed-once", "modules", (1, "<root>", "backward", "input")),
    ],
)
def test_a_fault_is_found_and_scored(bench: Any, fault: str, setting: str, found: tuple[Any, ...]) -> None:
    planted, chosen = part("catalogue").FAULTS[fault], part("declared").SETTINGS[setting]
    first = bench.measure(planted, chosen).comparison.first
    assert (first.step, first.site, first.phase, first.cause) == found
    assert part("scoring").score(first, planted.expected(chosen), chosen) == "exact"


@pytest.mark.slow
def test_a_rerun_is_bit_identical(bench: Any) -> None:
    comparison = bench.measure(part("catalogue").CONTROLS["rerun"], part("declared").SETTINGS["modules"]).comparison
    assert comparison.counts["identical"] == len(comparison.pairs) > 1000


def test_a_background_is_in_the_candidate(bench: Any) -> None:
    comparison = bench.measure(part("catalogue").CONTROLS["rerun"], part("declared").SETTINGS["noise"]).comparison
    assert comparison.counts["rounding"] > 1000


# -- scores ----------------------------------------------------------------------------------------------------------

IN_MLP = ("forward", "h.1.mlp", "computation")
IN_GELU = (*IN_MLP, "gelu")
OF_WEIGHT = ("backward", "h.1.mlp.up.weight", "computation")
IN_UPDATE = ("update", "AdamW", "parameter")
IN_ROOT = ("backward", "<root>", "input")
IN_ALL = ("forward", "*", "parameter")


@pytest.mark.parametrize(
    ("culprit", "setting", "found", "score"),
    [
        (IN_MLP, "modules", (2, "forward", "h.1.mlp", "computation"), "exact"),
        (IN_MLP, "modules", (3, "forward", "h.1.mlp", "computation"), "wrong"),
        (IN_MLP, "modules", (2, "forward", "h.1.mlp", "parameter"), "module"),
        (IN_MLP, "modules", (2, "backward", "h.1.mlp", "computation"), "module"),
        (IN_MLP, "modules", (2, "forward", "h.1", "computation"), "module"),
        (IN_MLP, "modules", (2, "forward", "h.1.mlp.up", "computation"), "module"),
        (IN_MLP, "modules", (2, "backward", "h.1.mlp.up.bias", "computation"), "module"),
        (IN_MLP, "modules", (2, "forward", "h.1.attn", "computation"), "wrong"),
        (IN_MLP, "modules", (2, "forward", "h.1.mlp_2", "computation"), "wrong"),
        (IN_MLP, "modules", (2, "forward", "<root>", "computation"), "wrong"),
        (IN_MLP, "functions", (2, "forward", "h.1.mlp/add", "computation"), "exact"),
        (IN_MLP, "functions", (2, "forward", "/add", "computation"), "wrong"),
        (IN_GELU, "modules", (2, "forward", "h.1.mlp", "computation"), "exact"),
        (IN_GELU, "functions", (2, "forward", "h.1.mlp/gelu", "computation"), "exact"),
        (IN_GELU, "functions", (2, "forward", "h.1.mlp", "computation"), "module"),
        (IN_GELU, "functions", (2, "forward", "h.1.mlp/add", "computation"), "module"),
        (OF_WEIGHT, "modules", (2, "backward", "h.1.mlp.up.weight", "computation"), "exact"),
        (OF_WEIGHT, "modules", (2, "backward", "h.1.mlp.up", "computation"), "module"),
        (IN_UPDATE, "updates", (2, "update", "tokens.weight", "parameter"), "exact"),
        (IN_UPDATE, "updates", (2, "update", "tokens.weight", "computation"), "module"),
        (IN_UPDATE, "functions", (2, "update", "AdamW/lerp_", "input"), "exact"),
        (IN_UPDATE, "updates", (3, "forward", "tokens", "parameter"), "wrong"),
        (IN_ROOT, "modules", (2, "backward", "<root>", "input"), "exact"),
        (IN_ROOT, "modules", (2, "backward", "head", "input"), "wrong"),
        (IN_ALL, "modules", (2, "forward", "h.1.mlp.up", "parameter"), "exact"),
        (IN_ALL, "modules", (2, "forward", "h.1.mlp.up", "computation"), "module"),
        (IN_ALL, "modules", (2, "backward", "h.1.mlp.up", "parameter"), "wrong"),
    ],
)
def test_score(culprit: tuple[str, ...], setting: str, found: tuple[Any, ...], score: str) -> None:
    declared = part("declared")
    phase, site, *rest = culprit
    first = SimpleNamespace(**dict(zip(("step", "phase", "site", "cause"), found, strict=True)))
    expected = declared.Culprit(2, site, phase, *rest)
    assert part("scoring").score(first, expected, declared.SETTINGS[setting]) == score


def test_no_alarm_is_a_miss() -> None:
    declared = part("declared")
    culprit = declared.Culprit(2, "h.1", "forward", "computation")
    assert part("scoring").score(None, culprit, declared.SETTINGS["modules"]) == "missed"


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run("--only", "mask-off-by-one,rerun", "--setting", "modules", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "| mask-off-by-one | step 0 forward h.0.attn/tril: computation | step 0 forward h.0.attn:" in done.stdout
    assert "| modules | 1 | 1 | 0 | 0 | 0 |" in done.stdout
    assert "| rerun | none |" in done.stdout
    fault, control = json.loads(file.read_text())
    assert (fault["score"], fault["found"]["site"], fault["found"]["cause"]) == ("exact", "h.0.attn", "computation")
    assert (control["name"], control["alarm"], control["found"]) == ("rerun", False, None)


def test_an_unknown_name() -> None:
    done = run("--only", "gelu")
    assert done.returncode == 2
    assert "'gelu' is not known. There are: data-order, " in done.stderr


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run("--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    for setting, least in EXACT_AT_LEAST.items():
        scores = [one["score"] for one in results if one["setting"] == setting and "score" in one]
        assert len(scores) == 50
        assert scores.count("exact") >= least, setting
    assert [(one["name"], one["setting"]) for one in results if one.get("alarm")] == []
    assert sum("alarm" in one for one in results) > 40
