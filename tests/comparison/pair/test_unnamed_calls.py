"""Calls are paired by their order where only one of two runs tells modules, and the user has not said otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import astray
from astray.comparison.pair.alignment import knows_modules
from astray.comparison.problems import little_shared


def recorded(path: Path, *, factor: float = 1.0, level: str | list[str] = "function") -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight *= factor
    x = torch.randn(3, 4)
    with astray.record(path, model, level=level, keep="tensors"):  # type: ignore[arg-type]
        model(x).sum().backward()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("runs")
    found = {
        "functions": recorded(home / "functions"),
        "both": recorded(home / "both", level=["module", "function"]),
        "modules": recorded(home / "modules", level="module"),
        "wrong": recorded(home / "wrong", factor=1.001),
    }
    for name in ("functions", "wrong"):
        found[f"{name}.pkl"] = home / f"{name}.pkl"
        astray.convert(found[name], found[f"{name}.pkl"], to="torch_npu")
    return found


def test_who_tells_modules(runs: dict[str, Path]) -> None:
    known = {name: knows_modules(astray.open(path)) for name, path in runs.items()}
    assert known == {
        "functions": True, "both": True, "modules": None, "wrong": True, "functions.pkl": False, "wrong.pkl": False
    }  # fmt: skip


@pytest.mark.parametrize("reference", ["functions", "both"])
def test_a_dump_without_modules_is_paired_by_order(runs: dict[str, Path], reference: str) -> None:
    diff = astray.compare(runs[reference], runs["functions.pkl"])
    said = "does not say in which modules functions were called, so calls are paired by their order."
    assert f"{runs['functions.pkl']} {said}" in diff.problems
    assert len(diff.select("kind == 'function' and agrees")) > 10
    assert diff.counts["diverged"] == diff.counts["drifting"] == 0


def test_a_fault_is_found_across_formats(runs: dict[str, Path]) -> None:
    diff = astray.compare(runs["functions"], runs["wrong.pkl"])
    assert diff.first is not None
    assert (diff.first.site, diff.first.phase) == ("2/linear", "forward")


def test_modules_and_functions_alone_have_nothing_in_common_and_that_is_said(runs: dict[str, Path]) -> None:
    said = "The reference has rows of modules and the candidate of functions: record both with the same level."
    with pytest.raises(astray.errors.CompareError, match=said):
        astray.compare(runs["modules"], runs["functions.pkl"])


def test_who_pairs_by_order_is_not_told_to_do_so() -> None:
    fact = "Only 2 tensors are in both runs, of 10 in the reference and 9 in the candidate."
    assert little_shared(10, 9, 2, "order") == [fact]
    assert little_shared(10, 9, 2, "key")[0].endswith("or pair calls by their order with --by order.")


def dumped(path: Path, calls: dict[str, float]) -> Path:
    """A sampled dump of torch_npu: calls of functions whose results have twelve elements of one value."""
    lines = [[f"0_Torch_{call}_forward_output", [value] * 13, "torch.float32", [12]] for call, value in calls.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_sampled_dump_of_two_steps_is_paired_with_its_own_step(tmp_path: Path) -> None:
    """It tells no norms; the largest elements say to which step a call belongs that comes in another order there."""
    names = ["exp", "sin", "cos", "tan", "tanh", "abs", "neg", "sqrt"]
    values = {name: 2.0**place for place, name in enumerate(names)}
    one = dumped(tmp_path / "one.pkl", values)
    swapped = ["exp", "cos", "sin", *names[3:]]
    two = dumped(tmp_path / "two.pkl", {name: values[name] for name in swapped})
    later = dumped(tmp_path / "later.pkl", {name: 1.5 * values[name] for name in swapped})
    two.write_text(two.read_text() + later.read_text())
    for pair in ((one, two), (two, one)):
        diff = astray.compare(*pair, by="order")
        assert (diff.first, diff.counts["identical"]) == (None, 7)


def test_names_count_where_both_or_neither_tell_modules_or_the_user_says_so(runs: dict[str, Path]) -> None:
    for one, other in (("functions", "both"), ("functions.pkl", "wrong.pkl"), ("modules", "functions.pkl")):
        try:
            notes = astray.compare(runs[one], runs[other]).problems
        except astray.errors.CompareError:
            continue  # nothing in common, by names
        assert not any("by their order." in note for note in notes)
    diff = astray.compare(runs["functions"], runs["functions.pkl"], by="key")
    assert not any("so calls are paired" in note for note in diff.problems)
