"""Several faults that do not hang together: each is listed, and none of their victims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.compare.comparison import compare
from astray.report.json import document

ONES = np.ones(4, np.float32)


def call(builder: Any, site: str, given: float = 1.0, made: float = 1.0, **rest: Any) -> int:
    """A call whose input and output are ones, off by these factors; with `weight` it has a parameter."""
    weight = rest.pop("weight", None)
    seq = builder.call(site, **rest)
    builder.tensor(seq, "input", "0", ONES * np.float32(given))
    if weight is not None:
        builder.tensor(seq, "parameter", "weight", ONES * np.float32(weight))
    builder.tensor(seq, "output", "out", ONES * np.float32(made))
    return seq


def gradient(builder: Any, name: str, value: float = 1.0, **rest: Any) -> None:
    seq = builder.call(name, "Parameter", kind="parameter", phase="backward", **rest)
    builder.tensor(seq, "gradient", "grad", ONES * np.float32(value))


def origins(runs: Any, program: Any) -> list[tuple[int, str, str]]:
    """The first and the others, of a program that is run right and wrong."""
    one, other = runs.Builder(), runs.Builder()
    program(one, 1.0)
    program(other, 1.5)
    found = compare(one.run, other.run)
    return [(each.step, each.site, each.place.phase) for each in (*found.firsts, *found.others)]


def test_two_branches_and_what_follows_from_them(runs):
    def program(builder, off):
        call(builder, "left", made=off)
        call(builder, "right", made=off)
        call(builder, "join", given=off, made=off)

    assert origins(runs, program) == [(0, "left", "forward"), (0, "right", "forward")]


def test_what_is_around_a_culprit_is_no_culprit(runs):
    def program(builder, off):
        outer = builder.call("outer")
        builder.tensor(outer, "input", "0", ONES)
        call(builder, "outer.a", made=off, parent=outer)
        call(builder, "outer.b", made=off, parent=outer)
        builder.tensor(outer, "output", "out", ONES * np.float32(off))

    assert origins(runs, program) == [(0, "outer.a", "forward"), (0, "outer.b", "forward")]


def test_a_wrong_weight_explains_every_call_of_its_step(runs):
    def program(builder, off):
        call(builder, "early", made=off)
        call(builder, "a", made=off, weight=off)
        call(builder, "a", made=off, call=1)  # whose weight is not recorded again
        call(builder, "a", made=off, step=1, weight=1.0)

    assert origins(runs, program) == [(0, "early", "forward"), (1, "a", "forward")]


def test_the_same_fault_in_later_steps_is_told_once(runs):
    def program(builder, off):
        for step in range(3):
            outer = builder.call("outer", step=step)
            builder.tensor(outer, "input", "0", ONES)
            # From step 1 on its input is a little off, so that only what is around it is beyond doubt.
            call(builder, "outer.a", given=1 + (off - 1) * 1e-5 * (step > 0), made=off, parent=outer, step=step)
            builder.tensor(outer, "output", "out", ONES * np.float32(off))

    assert origins(runs, program) == [(0, "outer.a", "forward")]


def test_inputs_that_drift_and_results_that_are_off_by_little_prove_nothing(runs):
    def program(builder, off):
        call(builder, "a", made=off)
        call(builder, "drifting", given=1 + (off - 1) * 1e-5, made=off)
        call(builder, "little", made=1 + (off - 1) * 4e-5)
        builder.tensor(builder.call("nothing_given"), "output", "out", ONES * np.float32(off))

    assert origins(runs, program) == [(0, "a", "forward")]


def test_a_backward_is_explained_by_its_forward_and_by_what_is_inside(runs):
    def program(builder, off):
        bad = call(builder, "bad", made=off)
        outer = call(builder, "outer")
        good = call(builder, "outer.good", parent=outer)
        call(builder, "bad", made=off, phase="backward", parent=bad)
        call(builder, "outer", made=off, phase="backward", parent=outer)
        call(builder, "outer.good", made=off, phase="backward", parent=good)
        gradient(builder, "bad.weight", off)
        gradient(builder, "outer.good.weight", off)

    assert origins(runs, program) == [(0, "bad", "forward"), (0, "outer.good", "backward")]


def test_the_gradient_of_a_weight_alone(runs):
    def program(builder, off):
        call(builder, "early", made=off)
        good = call(builder, "good")
        call(builder, "good", phase="backward", parent=good)
        gradient(builder, "good.weight", off)
        gradient(builder, "lost.weight", off)  # of a module that was not called

    assert origins(runs, program) == [(0, "early", "forward"), (0, "good.weight", "backward")]


class Towers(nn.Module):
    """Two networks that meet only in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.image = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.text(x) * self.image(x)).sum()


@pytest.mark.parametrize("level", ["module", ["module", "function"]])
def test_a_real_model_with_two_faults(tmp_path, level):
    for name in ("good", "bad"):
        torch.manual_seed(0)
        model = Towers()
        if name == "bad":
            model.text[1].forward = lambda x: torch.tanh(x) * 1.1
            model.image[2].forward = lambda x, own=model.image[2]: nn.functional.linear(x, own.weight * 2, own.bias)
        with astray.record(tmp_path / name, model, level=level) as rec:
            model(torch.randn(3, 4, generator=torch.Generator().manual_seed(1))).backward()
            rec.step()
    found = astray.compare(tmp_path / "good", tmp_path / "bad")
    assert found.first.site.startswith("text.1")
    assert [other.site.partition("/")[0] for other in found.others] == ["image.2"]
    assert "by itself" in str(found)
    assert "image.2" in str(found)
    file = found.to_junit(tmp_path / "found.xml").read_text()
    assert "First divergence: step 0, forward, call 0 of text.1" in file
    assert "Wrong by itself: step 0, forward, call 0 of image.2" in file
    assert [other["site"].partition("/")[0] for other in document(found)["others"]] == ["image.2"]


def test_a_gradient_is_the_victim_of_the_backward_in_its_own_micro_step(runs):
    def program(builder, off):
        for micro in range(2):  # the first is a validation pass, or the micro step before
            fc, head = call(builder, "fc", micro=micro), call(builder, "head", micro=micro)
        call(builder, "head", made=off, phase="backward", parent=head, micro=1)
        call(builder, "fc", given=off, made=off, phase="backward", parent=fc, micro=1)
        gradient(builder, "fc.weight", off, micro=1)

    assert origins(runs, program) == [(0, "head", "backward")]
