"""What has come of a fault is its victim and no fault; faults that do not hang together are listed, each once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray import compare
from astray.report.json import document
from block_models import scaled, train

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


def test_what_is_around_a_culprit_is_not_a_culprit(runs):
    def program(builder, off):
        outer = builder.call("outer")
        builder.tensor(outer, "input", "0", ONES)
        call(builder, "outer.a", made=off, parent=outer)
        call(builder, "outer.b", made=off, parent=outer)
        builder.tensor(outer, "output", "out", ONES * np.float32(off))

    assert origins(runs, program) == [(0, "outer.a", "forward"), (0, "outer.b", "forward")]


def test_a_wrong_weight_explains_every_call_of_its_step(runs):
    def program(builder, off):
        call(builder, "a", made=off, weight=off)
        call(builder, "a", made=off, call=1)  # whose weight is not recorded again
        call(builder, "b", made=off)

    one, other = runs.Builder(), runs.Builder()
    program(one, 1.0)
    program(other, 1.5)
    found = compare(one.run, other.run)
    assert [(each.site, each.cause) for each in (*found.firsts, *found.others)] == [
        ("a", "parameter"),
        ("b", "computation"),
    ]
    assert found.pairs["origin"].tolist() == [False, True, False, False, False, False, True]


def test_the_same_fault_in_later_steps_is_told_once(runs):
    def program(builder, off):
        for step in range(3):
            outer = builder.call("outer", step=step)
            builder.tensor(outer, "input", "0", ONES)
            # From step 1 on its input is a little off, so that only what is around it is beyond doubt.
            call(builder, "outer.a", given=1 + (off - 1) * 1e-5 * (step > 0), made=off, parent=outer, step=step)
            builder.tensor(outer, "output", "out", ONES * np.float32(off))

    assert origins(runs, program) == [(0, "outer.a", "forward")]


def test_inputs_that_drift_do_not_explain_what_is_far_beyond_them(runs):
    def program(builder, off):
        call(builder, "a", made=off)
        call(builder, "drifting", given=1 + (off - 1) * 1e-5, made=off)
        call(builder, "little", made=1 + (off - 1) * 4e-5)

    assert origins(runs, program) == [(0, "a", "forward"), (0, "drifting", "forward"), (0, "little", "forward")]


def test_what_came_from_nothing_that_was_recorded_may_have_come_of_anything_before(runs):
    def program(builder, off):
        call(builder, "a", made=off)
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


def verdicts(runs: Any, program: Any) -> list[str]:
    one, other = runs.Builder(), runs.Builder()
    program(one, 1.0)
    program(other, 1.5)
    return compare(one.run, other.run).pairs["verdict"].tolist()


def test_where_a_difference_has_healed_everything_agrees_again(runs):
    """What was computed from wrong numbers and is right is not wrong; nor is what comes after it."""

    def program(builder, off):
        little = 1 + (off - 1) * 2e-6
        call(builder, "wrong", made=off)
        call(builder, "clamped", given=off, made=little)
        call(builder, "after", given=little, made=little**2)

    found = verdicts(runs, program)
    assert found[:3] == ["identical", "diverged", "diverged"]
    assert set(found[3:]) == {"rounding"}


def test_a_value_that_was_seen_before_is_as_wrong_as_it_was_there(runs):
    values = np.linspace(1, 2, 32, dtype=np.float32)  # a repeated number could be any
    sides = []
    for off in (np.float32(1), np.float32(1.5)):
        builder = runs.Builder()
        for site, given, made in (("wrong", values, values * off), ("user", values * off, values * off * 2)):
            seq = builder.call(site)
            builder.tensor(seq, "input", "0", given)
            builder.tensor(seq, "output", "out", made)
        sides.append(builder.run)
    pairs = compare(*sides).pairs
    assert pairs["rule"].tolist() == ["bits", "model", "seen before", "model"]
    assert np.isnan(pairs["surprise"][2])
    assert pairs["origin"].tolist() == [False, True, False, False]
    assert "what it came from is wrong" in pairs["reason"][3]


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("layer", ["up", "norm", "act"])
def test_one_fault_in_a_net_of_equal_blocks_is_the_only_one(tmp_path, layer, noise):
    """Its siblings get no freedom from it, and its victims are not blamed: what it did to them is not noise."""
    reference = train(tmp_path / "right")
    candidate = train(tmp_path / "wrong", lambda net: scaled(getattr(net.h[2], layer), 1.05), noise=noise)
    found = astray.compare(reference, candidate)
    assert (found.first.site, found.first.phase, found.first.cause) == (f"h.2.{layer}", "forward", "computation")
    assert found.others == ()
    rows = zip(*(found.pairs[name] for name in ("site", "phase", "role", "verdict")), strict=True)
    after = [
        verdict for site, phase, role, verdict in rows if site in ("h.3.up", "head", "<root>") and role == "output"
    ]
    assert set(after[:2]) == {"diverged"}


def test_a_fault_of_the_backward_leaves_the_forward_of_its_step_alone(tmp_path):
    def plant(net: Any) -> None:
        net.h[3].up.register_full_backward_hook(lambda _, given, __: tuple(one * 2 for one in given))

    found = astray.compare(train(tmp_path / "right", steps=2), train(tmp_path / "wrong", plant, steps=2))
    assert (found.first.step, found.first.phase) == (0, "backward")
    assert found.first.site in ("h.3.up", "h.3")
    rows = zip(*(found.pairs[name] for name in ("step", "phase", "verdict")), strict=True)
    assert {verdict for step, phase, verdict in rows if (step, phase) == (0, "forward")} == {"identical"}


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
