"""A tensor that only one run has counts for nothing where what was computed with it agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.cli import main
from record_builders import Builder

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def attention(path: str, *, way: str = "short", result: np.ndarray = X, weight: bool = False) -> Any:
    """A module that softmax is called in, or not, and whose weights it hands out then."""
    rows = Builder(path)
    root = rows.call("<root>", "Net")
    rows.tensor(root, "input", "0", X)
    attn = rows.call("attn", "Attention", parent=root)
    rows.tensor(attn, "input", "0", X)
    if way == "long":
        rows.tensor(attn, "input", "kwargs.mask", X * 2)
        soft = rows.call("attn.soft", "Softmax", parent=attn)
        rows.tensor(soft, "input", "0", X * 3)
        if weight:
            rows.tensor(soft, "parameter", "scale", X * 5)
        rows.tensor(soft, "output", "out", X * 4)
        rows.tensor(attn, "output", "out.1", X * 4)
    rows.tensor(attn, "output", "out.0", result)
    rows.tensor(root, "output", "out", result + 1)
    return rows.run


@pytest.mark.parametrize("ways", [("long", "short"), ("short", "long")])
def test_another_way_to_the_same_result_is_not_a_difference(ways: tuple[str, str]) -> None:
    diff = astray.compare(attention("a", way=ways[0]), attention("b", way=ways[1]))
    assert diff.same
    assert diff.exit_code == 0
    assert diff.detours.sum() == diff.lone.sum() == 4
    text = " ".join(str(diff).split())
    assert "✓ No divergence: 4 tensors of 1 step agree (4 identical)." in text
    assert "They lie on another way to results that agree." in text
    assert "--allow-missing" not in text


def test_another_way_to_another_result_is_one() -> None:
    diff = astray.compare(attention("a", way="long"), attention("b", result=X * 1.5))
    assert not diff.detours.any()
    assert diff.missing.sum() == 4


def test_a_parameter_that_one_run_does_not_have_counts() -> None:
    diff = astray.compare(attention("a", way="long", weight=True), attention("b"))
    assert [diff.pairs["role"][row] for row in np.flatnonzero(diff.missing)] == ["parameter"]
    assert diff.exit_code == 1


def outside(path: str, *names: str, extra: bool = False) -> Any:
    """Functions outside of every module, whose last result a module takes."""
    rows = Builder(path)
    x = X
    for name in names:
        call = rows.call(f"/{name}", f"torch.{name}", kind="function")
        rows.tensor(call, "input", "0", x)
        rows.tensor(call, "output", "out", x := x * 2)
    fc = rows.call("fc")
    rows.tensor(fc, "input", "0", X * 8)
    rows.tensor(fc, "output", "out", X * 9)
    if extra:
        call = rows.call("/sigmoid", "torch.sigmoid", kind="function")
        rows.tensor(call, "input", "0", X * 9)
        rows.tensor(call, "output", "out", X * 10)
    return rows.run


def test_what_a_call_takes_that_agrees_was_made_in_another_way() -> None:
    diff = astray.compare(outside("a", "mul", "add", "exp"), outside("b"))
    assert diff.detours.sum() == 6  # through one another
    assert diff.same


def test_what_leads_to_nothing_that_was_compared_counts_and_how_to_allow_it_is_said(tmp_path: Path) -> None:
    runs = outside("a"), outside("b", extra=True)
    diff = astray.compare(*runs)
    assert (diff.missing.sum(), diff.exit_code) == (2, 1)
    assert "Some are only in one run." in str(diff)
    assert "compare with --allow-missing." in " ".join(str(diff).split())
    assert 'failures="1"' in diff.to_junit(tmp_path / "junit.xml").read_text()
    allowed = astray.compare(*runs, allow_missing=True)
    assert (allowed.exit_code, allowed.counts["only in candidate"]) == (0, 2)
    assert 'failures="0"' in allowed.to_junit(tmp_path / "junit.xml").read_text()


class Twice(nn.Module):
    """Goes through a module of its own, or computes the same without it."""

    def __init__(self, long: bool) -> None:
        super().__init__()
        self.long, self.fc, self.act = long, nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        return self.act(hidden) if self.long else hidden.clamp(min=0)


def test_recorded_programs_forward_and_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, long in (("long", True), ("short", False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Twice(long))
        x = torch.randn(3, 4)
        with astray.record(tmp_path / name, model):
            model(x).sum().backward()
    assert main(["compare", str(tmp_path / "long"), str(tmp_path / "short")]) == 0
    assert "They lie on another way" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_a_detour_in_a_run_that_was_cut_short() -> None:
    cut = attention("b")
    assert cut.ranks[0].end is not None
    cut.ranks[0].end.complete = False
    assert not astray.compare(attention("a", way="long"), cut).detours.any()


@pytest.mark.parametrize("faulty", [False, True])
def test_what_was_added_to_zeros_counts_with_the_gradient_that_it_makes(tmp_path: Path, faulty: bool) -> None:
    """One run drops its gradients, the other fills them with zeros: only there something is added to one."""
    for name, to_none in (("dropped", True), ("zeroed", False)):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 2), torch.randn(3, 4)
        with astray.record(tmp_path / name, model) as rec:
            for step in range(2):
                model.zero_grad(set_to_none=to_none)
                loss = model(x).square().sum()
                (loss * 1.01 if faulty and step and not to_none else loss).backward()
                rec.step()
    diff = astray.compare(tmp_path / "dropped", tmp_path / "zeroed")
    added = [row for row in np.flatnonzero(diff.lone) if diff.pairs["path"][row] == "added"]
    assert len(added) == 2
    assert diff.detours[added].all() == (not faulty)
    assert diff.same == (not faulty)


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.01, False)])
def test_a_loss_that_is_computed_in_another_way_counts_by_its_gradient(
    tmp_path: Path, factor: float, same: bool
) -> None:
    for name in ("one", "other"):
        torch.manual_seed(0)
        model, x, target = nn.Linear(4, 3), torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
        with astray.record(tmp_path / name, model, level=["module", "function"]) as rec:
            made = model(x)
            if name == "one":
                loss = torch.nn.functional.cross_entropy(made, target)
            else:
                loss = -factor * made.log_softmax(-1).gather(-1, target[:, None]).mean()
            loss.backward()
            rec.step()
    diff = astray.compare(tmp_path / "one", tmp_path / "other")
    assert diff.same == same
    assert diff.lone.any()
    assert diff.missing.any() == (not same)


def test_what_is_done_outside_with_a_result_that_sends_no_gradient_counts(tmp_path: Path) -> None:
    for name in ("one", "other"):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 3), torch.randn(5, 4)
        with astray.record(tmp_path / name, model, level=["module", "function"]):
            made = model(x)
            made.sigmoid() if name == "one" else made.tanh()
    assert not astray.compare(tmp_path / "one", tmp_path / "other").same
