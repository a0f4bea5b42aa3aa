"""The first divergence: planted faults in a small network, and single cases by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray import compare
from astray.comparison.blame.first import _oddness
from astray.comparison.verdict import Verdict
from astray.store import DictionaryColumn, Table
from block_models import train

ONES = np.ones(8, np.float32)


def first_of(runs, keep="stats,fingerprint", **fault):
    reference = runs.program(runs.Builder(keep=keep))
    return compare(reference, runs.program(runs.Builder("runs/bad", keep=keep), **fault)).first


@pytest.mark.parametrize(
    ("fault", "place", "cause"),
    [
        ({"data": 1.01}, "step 1, forward, <root> (Net), input `0`", "input"),
        ({"init": 1.001, "at": 0}, "step 0, forward, mlp.fc (Linear), output", "parameter"),
        ({"proj": 1.001}, "step 1, forward, mlp.proj (Linear), output", "computation"),
        ({"between": 1.01}, "step 1, forward, mlp (MLP), output", "computation"),
        ({"residual": 1.01}, "step 1, forward, <root> (Net), output", "computation"),
        ({"loss": 2}, "step 1, backward, <root> (Net), input", "input"),
        ({"weight_gradient": 1.01}, "step 1, backward, mlp.proj.weight (Parameter), gradient", "computation"),
        ({"rate": 1.01}, "step 2, forward, mlp.fc (Linear), output", "parameter"),
        ({"proj": np.inf}, "step 1, forward, mlp.proj (Linear), output", "computation"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("keep", ["stats,fingerprint", "fingerprint", "stats,fingerprint,tensors", "stats"])
def test_planted_fault_is_named(runs, keep, fault, place, cause):
    first = first_of(runs, keep, **fault)
    assert (str(first.place), first.cause) == (place, cause)


def test_no_fault_no_divergence(runs):
    assert first_of(runs) is None


def test_what_is_told_about_a_computation(runs):
    first = first_of(runs, proj=1.001)
    assert (first.step, first.site, first.type, first.call, first.phase) == (1, "mlp.proj", "Linear", 0, "forward")
    assert (first.role, first.path, first.verdict, first.measured_by) == ("output", "out", "diverged", "statistics")
    assert first.error == pytest.approx(1e-3, rel=1e-3)
    assert first.deviation == pytest.approx(1e-3, rel=1e-2)
    assert 4 * 2.0**-24 < first.limit < 1e-5
    assert first.surprise == pytest.approx(first.deviation / first.limit)
    assert (first.measure, first.rule, first.given) == ("norm", "model", 0)
    assert first.enclosing == (("<root>", "Net"), ("mlp", "MLP"))
    assert (first.frame.file, first.frame.line) == ("net.py", 7)
    assert [frame.function for frame in first.stack] == ["MLP.forward", "Net.forward", "<module>"]
    assert (first.previous.site, first.previous.verdict) == ("mlp.act", "identical")
    assert first.evidence == ("Its input and its parameter agree (identical), but its output does not.",)
    assert [step for step, _ in first.growth] == [1, 2]
    assert first.candidate.statistics.l2 == pytest.approx(first.reference.statistics.l2 * 1.001)
    assert first.reference.fingerprint != first.candidate.fingerprint
    assert first.victims > 20


def test_magnitude_is_exact_from_values_and_a_bound_from_statistics(runs):
    measured, bounded = first_of(runs, "stats,tensors", proj=1.001), first_of(runs, proj=1.001)
    assert measured.magnitude == measured.metrics["max_abs"]
    assert 0 < bounded.magnitude <= measured.magnitude * (1 + 1e-9)


def test_a_parameter_of_the_first_step_points_at_initialisation(runs):
    first = first_of(runs, init=1.001, at=0)
    assert (first.parameter.role, first.parameter.path, first.other_parameters) == ("parameter", "weight", 0)
    assert "initialisation" in first.evidence[0]


def test_a_parameter_of_a_later_step_points_at_the_update(runs):
    first = first_of(runs, rate=1.01)
    assert (first.parameter.site, first.other_parameters) == ("mlp.fc", 1)
    assert "though its gradient in step 1 agrees (identical): look at the update of step 1" in first.evidence[0]
    assert "clips or scales the gradients" in first.evidence[0]


def test_the_first_step_of_a_selection_is_not_called_the_first(runs):
    reference = runs.program(runs.Builder())
    first = compare(reference, runs.program(runs.Builder("runs/bad"), rate=1.01), steps=2).first
    assert first.cause == "parameter"
    assert "The step before was not compared" in first.evidence[0]
    assert "This is the first step" not in first.evidence[0]


def with_weight(runs, *steps: dict, role="parameter", tied=False):
    """Steps of a call whose weight, gradient and output are given; the rest is the same."""
    builder = runs.Builder()
    for step in steps:
        seq = builder.call("layer", step=step["step"], micro=step.get("micro", 0))
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, role, "weight", step["weight"])
        builder.tensor(seq, "output", "out", step.get("output", step["weight"]))
        if tied:
            other = builder.call("head", step=step["step"])
            builder.tensor(other, role, "weight", step["weight"])
        if "gradient" in step:
            event = builder.call("layer.weight", "Parameter", step=step["step"], kind="parameter", phase="backward")
            builder.tensor(event, "gradient", "grad", step["gradient"], **step.get("rest", {}))
    return builder.run


def said_of(runs, before: dict, good: dict, bad: dict, other: dict | None = None, **options) -> str:
    reference = with_weight(runs, {"step": 0, **before}, {"step": 1, **good}, **options)
    candidate = with_weight(runs, {"step": 0, **before, **(other or {})}, {"step": 1, **bad}, **options)
    return compare(reference, candidate).first.evidence[0]


W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def test_a_transposed_weight_is_a_wrong_parameter(runs):
    first = compare(with_weight(runs, {"step": 0, "weight": W}), with_weight(runs, {"step": 0, "weight": W.T})).first
    assert (first.cause, first.parameter.verdict) == ("parameter", "diverged")
    assert math.isnan(first.parameter.error)
    assert first.evidence[0].startswith(
        "Its input agrees (identical), but its parameter `weight` already differs on entry (diverged), as the only"
    )


def test_a_weight_with_other_bits_is_wrong_though_no_statistic_differs(runs):
    with_zero = W.copy()
    with_zero[1, 2] = 0
    first = compare(
        with_weight(runs, {"step": 0, "weight": with_zero, "output": ONES}),
        with_weight(runs, {"step": 0, "weight": with_zero.T, "output": ONES * 2}),
    ).first
    assert (first.cause, first.parameter.path) == ("parameter", "weight")  # a weight of the first step is exact
    assert "its parameter `weight` already differs on entry (diverged)" in first.evidence[0]
    assert "a tiny change, or the same values in another order" in first.parameter.reason


def test_a_gradient_that_could_not_be_compared_is_not_called_agreeing(runs):
    before = {"weight": W, "gradient": W, "rest": {"keep": {"stats"}}}
    text = said_of(runs, before, {"weight": W}, {"weight": W * 2}, {"rest": {"keep": {"fingerprint"}}})
    assert "Its gradient in step 0 was not compared" in text


def test_a_negligible_gradient_is_called_so(runs):
    def run(noise: float, factor: float):
        builder = runs.Builder()
        layer = builder.call("layer")
        builder.tensor(layer, "input", "0", ONES)
        builder.tensor(layer, "parameter", "bias", ONES)
        builder.tensor(builder.call("layer", phase="backward", parent=layer), "input", "out", ONES)
        event = builder.call("layer.bias", "Parameter", kind="parameter", phase="backward")
        builder.tensor(event, "gradient", "grad", ONES * np.float32(noise))
        builder.tensor(builder.call("layer", step=1), "parameter", "bias", ONES * np.float32(factor))
        return builder.run

    text = compare(run(1e-9, 1), run(-3e-9, 2)).first.evidence[0]
    assert "its gradient in step 0 agrees (negligible: both sides are rounding noise)" in text


def test_a_buffer_is_not_a_parameter(runs):
    text = said_of(runs, {"weight": W}, {"weight": W}, {"weight": W * 2, "output": W}, role="state")
    assert text == (
        "Its input agrees (identical), but its buffer `weight` already differs on entry (diverged, 1.0e+00), as the "
        "only buffer in this step. It still agreed at step 0, forward, layer (Linear), buffer `weight`: look at what "
        "wrote to it since, be it the forward of layer (Linear) itself or other code."
    )


def test_a_parameter_that_changes_within_a_step_is_not_a_matter_of_the_initialisation(runs):
    steps = [{"step": 0, "weight": W}, {"step": 0, "micro": 1, "weight": W}]
    wrong = [steps[0], {**steps[1], "weight": W * 2}]
    text = compare(with_weight(runs, *steps), with_weight(runs, *wrong)).first.evidence[0]
    assert "It still agreed at step 0, forward, layer (Linear), parameter `weight`" in text
    assert "initialisation" not in text


def test_two_names_of_one_weight_count_once(runs):
    steps = [{"step": 0, "weight": W}]
    first = compare(with_weight(runs, *steps, tied=True), with_weight(runs, {"step": 0, "weight": W * 2}, tied=True))
    assert first.first.other_parameters == 0
    assert "as the only parameter" in first.first.evidence[0]


def test_equal_constants_are_not_taken_for_one_weight(runs):
    steps = [{"step": 0, "weight": ONES}]
    first = compare(with_weight(runs, *steps, tied=True), with_weight(runs, {"step": 0, "weight": ONES * 2}, tied=True))
    assert first.first.other_parameters == 1


def test_parameters_and_buffers_are_counted_apart(runs):
    def run(factor: float):
        builder = runs.Builder()
        seq = builder.call("norm", "BatchNorm1d")
        for role, path in (("parameter", "weight"), ("parameter", "bias"), ("state", "mean"), ("state", "var")):
            builder.tensor(seq, role, path, ONES * np.float32(factor))
        return builder.run

    first = compare(run(1), run(2)).first
    assert (first.other_parameters, first.other_buffers) == (1, 2)
    assert "and so do another parameter and 2 other buffers in this step" in first.evidence[0]


def test_code_between_submodules_is_the_parents(runs):
    first = first_of(runs, between=1.01)
    assert (first.seen.site, first.seen.role) == ("mlp.proj", "input")
    assert first.frame.function == "MLP.forward"  # a line of the culprit, where the wrong value is used
    assert "no observed call produced it" in first.evidence[0]


def test_backward_code_between_submodules_is_the_parents(runs):
    def run(off: float):
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        inner = builder.call("net.layer", parent=outer)
        back_outer = builder.call("net", "Net", phase="backward", parent=outer)
        builder.tensor(back_outer, "input", "out", ONES)
        back_inner = builder.call("net.layer", phase="backward", parent=inner)
        builder.tensor(back_inner, "input", "out", ONES * np.float32(off))
        builder.tensor(back_inner, "output", "0", ONES * np.float32(off))
        builder.tensor(back_outer, "output", "0", ONES * np.float32(off))
        return builder.run

    first = compare(run(1), run(2)).first
    assert (str(first.place), first.cause) == ("step 0, backward, net (Net), output `0`", "computation")
    assert first.enclosing == ()


def test_a_gradient_that_reaches_an_inner_call_first_still_comes_from_outside(runs):
    """The output of a module is often that of its last submodule, whose hook is then told first."""

    def run(off: float):
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        inner = builder.call("net.head", parent=outer)
        back_inner = builder.call("net.head", phase="backward", parent=inner)
        builder.tensor(back_inner, "input", "out", ONES * np.float32(off))
        back_outer = builder.call("net", "Net", phase="backward", parent=outer)
        builder.tensor(back_outer, "input", "out", ONES * np.float32(off))
        builder.tensor(back_inner, "output", "0", ONES * np.float32(off))
        return builder.run

    first = compare(run(1), run(2)).first
    assert (str(first.place), first.cause) == ("step 0, backward, net (Net), input", "input")
    assert "look at the loss" in first.evidence[0]


def test_a_wrong_inner_value_that_never_reaches_the_result_is_still_blamed_on_the_code_around(runs):
    def run(off: float):
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        builder.tensor(outer, "input", "0", ONES)
        inner = builder.call("net.layer", parent=outer)
        builder.tensor(inner, "input", "0", ONES * np.float32(off))
        builder.tensor(outer, "output", "out", ONES)
        return builder.run

    first = compare(run(1), run(2)).first
    assert (str(first.place), first.cause) == ("step 0, forward, net (Net)", "computation")
    assert (first.site, first.type, first.role, first.path) == ("net", "Net", "", "")
    assert (str(first.seen), first.error) == ("step 0, forward, net.layer (Linear), input `0`", 1)
    assert (first.enclosing, first.victims) == ((), 0)
    assert first.evidence == (
        "The wrong value shows first as input `0` of net.layer (Linear), and no observed call produced it: the code of "
        "net (Net) around its submodules did.",
    )


@pytest.mark.parametrize("block_too", [False, True])
def test_the_backward_of_a_recomputed_call_lies_where_the_call_lay_first(runs, block_too):
    """Reentrant checkpointing computes again inside the backward pass, where no call is around it."""

    def run(off: float):
        builder = runs.Builder()
        root = builder.call("<root>", "Net")
        block = builder.call("block", "Block", parent=root)
        layer = builder.call("block.layer", parent=block)
        builder.tensor(layer, "output", "out", ONES)
        builder.tensor(builder.call("<root>", "Net", phase="backward", parent=root), "input", "out", ONES)
        around = None
        if block_too:  # the block as a whole is computed again, else only a part of its code
            around = block = builder.call("block", "Block", recompute=True)
        again = builder.call("block.layer", parent=around, recompute=True)
        builder.tensor(again, "output", "out", ONES)
        back_block = builder.call("block", "Block", phase="backward", parent=block, recompute=block_too)
        builder.tensor(back_block, "input", "out", ONES)
        back = builder.call("block.layer", phase="backward", parent=again, recompute=True)
        builder.tensor(back, "input", "out", ONES * np.float32(off))
        builder.tensor(back, "output", "0", ONES * np.float32(off))
        builder.tensor(back_block, "output", "0", ONES * np.float32(off))
        return builder.run

    first = compare(run(1), run(2)).first
    assert (str(first.place), first.cause) == ("step 0, backward, block (Block), output `0`", "computation")
    assert first.enclosing == (("<root>", "Net"),)


def test_a_recomputed_call_without_surroundings_does_not_point_at_the_loss(runs):
    def run(off: float):
        builder = runs.Builder()
        again = builder.call("layer", recompute=True)
        builder.tensor(again, "output", "out", ONES)
        back = builder.call("layer", phase="backward", parent=again, recompute=True)
        builder.tensor(back, "input", "out", ONES * np.float32(off))
        return builder.run

    text = compare(run(1), run(2)).first.evidence[0]
    assert "loss" not in text
    assert "look at the code around it" in text


def test_recomputation_has_rows_of_its_own(runs):
    def run(off: float):
        builder = runs.Builder()
        for recompute, factor in ((False, 1), (True, off)):
            builder.tensor(builder.call("layer", recompute=recompute), "output", "out", ONES * np.float32(factor))
        return builder.run

    assert str(compare(run(1), run(2)).first.place) == "step 0, recomputed forward, layer (Linear), output"


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (np.ones(4, np.float32), "shape"),
        (np.ones(8, np.int64), "dtype"),
        (np.full(8, np.nan, np.float32), "non-finite"),
    ],
)
def test_other_wrong_verdicts_are_divergences_too(runs, other, verdict):
    def run(array):
        builder = runs.Builder()
        seq = builder.call("layer")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", array)
        return builder.run

    first = compare(run(ONES), run(other)).first
    assert (first.site, first.verdict, first.cause) == ("layer", verdict, "computation")


def test_arguments_that_differ_are_told(runs):
    def run(eps: str, off: float):
        builder = runs.Builder()
        early = builder.call("drop", "Dropout", args='{"args":["<tensor>"],"kwargs":{"p":0.1}}')
        builder.tensor(early, "output", "out", ONES)
        seq = builder.call("norm", "LayerNorm", args=f'{{"args":["<tensor>",{eps}]}}')
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(off))
        return builder.run

    first = compare(run("1e-5", 1), run("1e-6", 1.1)).first
    assert first.evidence == (
        "norm is called with argument 1 1e-05 in the reference and 1e-06 in the candidate.",
        "Its input agrees (identical), but its output does not.",
    )
    assert [(one.kind, one.name) for one in first.settings] == [("argument", "1")]


def test_arguments_of_earlier_calls_that_differ_are_told(runs):
    def run(p: str, off: float):
        builder = runs.Builder()
        early = builder.call("drop", "Dropout", args=f'{{"args":["<tensor>"],"kwargs":{{"p":{p}}}}}')
        builder.tensor(early, "output", "out", ONES)
        seq = builder.call("norm", "LayerNorm")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(off))
        return builder.run

    first = compare(run("0.1", 1), run("0.2", 1.1)).first
    assert (first.site, first.settings) == ("norm", ())  # what was set differently had no effect
    assert first.evidence[1] == (
        "The call of drop (Dropout) in step 0 has other arguments: `kwargs.p` is 0.1 in the reference and 0.2 in the "
        "candidate."
    )


def test_rows_of_one_run_only_are_told(runs):
    def run(extra: bool):
        builder = runs.Builder()
        builder.tensor(builder.call("a"), "output", "out", ONES)
        if extra:
            builder.tensor(builder.call("b", "Dropout"), "output", "out", ONES)
        builder.tensor(builder.call("c"), "output", "out", ONES * np.float32(1 + extra))
        return builder.run

    first = compare(run(False), run(True)).first
    assert first.site == "c"
    assert (
        "One tensor is only in candidate before it, the last at step 0, forward, b (Dropout), output." in first.evidence
    )


def test_the_first_bit_that_differs_is_told(runs):
    def run(*factors: float):
        builder = runs.Builder()
        for number, factor in enumerate(factors):
            builder.tensor(builder.call(f"site{number}"), "output", "out", ONES * np.float32(factor))
        return builder.run

    first = compare(run(1, 1, 1), run(1, 1 + 2.0**-23, 1.5)).first
    assert (first.site, first.onset.site) == ("site2", "site1")
    assert first.evidence[-1].startswith("The runs are bit-identical until step 0, forward, site1 (Linear), output")


@pytest.mark.parametrize("off", [1 + 2.0**-14, 1.5])
def test_rounding_before_a_divergence_is_not_blamed_for_it(runs, off):
    def run(*factors: float):
        builder = runs.Builder()
        for number, factor in enumerate(factors):
            seq = builder.call(f"site{number}")
            builder.tensor(seq, "input", "0", ONES * np.float32(factors[number - 1] if number else 1))
            builder.tensor(seq, "output", "out", ONES * np.float32(factor))
        return builder.run

    diff = compare(run(1, 1, 1), run(1, 1 + 2.0**-21, off))
    assert (diff.first.site, diff.first.onset.site) == ("site2", "site1")
    assert (diff.pairs["verdict"][3], diff.others) == ("rounding", ())
    assert "The runs are bit-identical until step 0, forward, site1 (Linear), output" in diff.first.evidence[-1]


def test_an_input_in_another_order_is_suspected(runs):
    values = np.arange(64, dtype=np.float32)

    def run(order: int):
        builder = runs.Builder()
        builder.tensor(builder.call("before"), "output", "out", ONES)
        seq = builder.call("layer")
        builder.tensor(seq, "input", "0", values[::order])
        builder.tensor(seq, "output", "out", ONES * np.float32(order))
        return builder.run

    first = compare(run(1), run(-1)).first
    assert "the same values in another order" in " ".join(first.evidence)


def test_the_earliest_rank_wins(runs):
    reference, candidate = runs.Builder(world_size=2), runs.Builder("runs/bad", world_size=2)
    for builder, faults in ((reference, ({}, {})), (candidate, ({"proj": 1.01, "at": 2}, {"loss": 2, "at": 1}))):
        for rank, fault in enumerate(faults):
            runs.program(builder, rank=rank, **fault)
    diff = compare(reference.run, candidate.run)
    assert [(first.rank, first.step) for first in diff.firsts] == [(1, 1), (0, 2)]
    assert diff.first.rank == 1


def test_an_unknown_error_stays_unknown(runs):
    first = first_of(runs, "fingerprint", proj=1.001)
    assert math.isnan(first.error)
    assert first.reference.statistics is None


@pytest.mark.parametrize(("factor", "site"), [(1.05, "a"), (1.5, "c")])
@pytest.mark.parametrize("phase", ["forward", "update"])
def test_of_weights_that_differ_at_once_the_one_that_stands_out_is_named(runs, phase, factor, site):
    one, other = runs.Builder(), runs.Builder()
    values = np.linspace(1, 2, 64, dtype=np.float32)
    role, path = ("parameter", "weight") if phase == "forward" else ("input", "grad")
    for builder, scales in ((one, (1, 1, 1)), (other, (1.01, 1.01, factor))):
        for name, scale in zip("abc", scales, strict=True):
            seq = builder.call(name, phase=phase)
            builder.tensor(seq, role, path, values * np.float32(scale))
    assert compare(one.run, other.run).first.site == site


# ---- what only one run has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True])
def test_a_parameter_that_only_one_run_has_is_the_cause(runs, turned):
    sides = []
    for bias in (True, False):
        builder = runs.Builder()
        seq = builder.call("fc")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "parameter", "weight", ONES)
        if bias:
            builder.tensor(seq, "parameter", "bias", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(1 + bias))
        sides.append(builder.run)
    first = compare(*(sides[::-1] if turned else sides)).first
    assert (first.cause, first.site, first.parameter.path) == ("parameter", "fc", "bias")
    side = "candidate" if turned else "reference"
    assert first.evidence[0].startswith(
        f"Its parameter `bias` is there only in the {side}: the other run computed without it."
    )
    assert "bias" in str(compare(*sides))


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_that_tells_no_buffers_at_all_did_not_compute_without_them(runs, turned):
    """Dumps of hooktools have none, those of msprobe no buffers."""
    sides = []
    for told in (True, False):
        builder = runs.Builder()
        seq = builder.call("bn")
        builder.tensor(seq, "input", "0", ONES)
        builder.tensor(seq, "parameter", "weight", ONES)
        if told:
            builder.tensor(seq, "state", "running_mean", ONES)
        builder.tensor(seq, "output", "out", ONES * np.float32(1 + told))
        sides.append(builder.run)
    first = compare(*(sides[::-1] if turned else sides)).first
    assert (first.cause, first.parameter) == ("computation", None)
    assert first.evidence[0] == "Its input and its parameter agree (identical), but its output does not."


# ---- where the bits begin to differ ----------------------------------------------------------------------------------


def chain(builder, *factors: float):
    before = 1.0
    for number, factor in enumerate(factors):
        seq = builder.call(f"site{number}")
        builder.tensor(seq, "input", "0", ONES * np.float32(before))
        builder.tensor(seq, "output", "out", ONES * np.float32(factor))
        before = factor
    return builder.run


def test_statistics_beside_fingerprints_do_not_tell_where_bits_begin_to_differ(runs):
    """They may have been summed in another order by another tool."""
    wrong = [1.0, 1.0, 1 + 2.0**-21, 1.5]
    other = chain(runs.Builder(), *wrong)
    assert compare(chain(runs.Builder(), *[1.0] * 4), other).first.onset.site == "site2"
    first = compare(chain(runs.Builder(keep="stats"), *[1.0] * 4), other).first
    assert (first.site, first.onset) == ("site3", None)
    checked = chain(runs.Builder(), *[1.0] * 4)
    checked.ranks[0].fingerprints = "another tool's"
    first = compare(checked, other).first
    assert (first.site, first.onset) == ("site3", None)


# ---- weights that are wrong at once, and gradients that stop --------------------------------------------------------


def test_the_odd_one_out_of_weights_that_differ_at_once(tmp_path: Path) -> None:
    """One gradient is too large, so clipping makes all the others smaller: every weight is another one."""

    def clip(net: Any) -> None:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    def scale_and_clip(net: Any) -> None:
        net.h[3].up.weight.grad.mul_(100)
        clip(net)

    options: dict[str, Any] = {"steps": 2, "lr": 0.1}
    right = train(tmp_path / "right", before_update=clip, **options)
    wrong = train(tmp_path / "wrong", before_update=scale_and_clip, **options)
    found = astray.compare(right, wrong)
    assert found.first is not None
    assert (found.first.site, found.first.phase, found.first.cause) == ("h.3.up", "forward", "parameter")


def test_a_gradient_stops_in_the_code_around_calls_that_it_never_reaches(tmp_path: Path) -> None:
    def detach(net: Any) -> None:
        block = net.h[2]
        block.forward = lambda x: x + block.down(block.act(block.up(block.norm(x)))).detach()

    found = astray.compare(train(tmp_path / "right"), train(tmp_path / "wrong", detach))
    assert found.first is not None
    assert (found.first.site, found.first.phase) == ("h.2", "backward")


@pytest.mark.parametrize(("sent", "site"), [("hidden_states", "net"), (None, "net.layer")])
def test_a_gradient_by_another_name_was_not_stopped(runs: Any, sent: str | None, site: str) -> None:
    """A call that is given its argument by keyword sends its gradient under that name; only one that sends less stops.

    The gradient that the call around them sends is wrong in both cases.
    """

    def run(path: str | None, off: float) -> Any:
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        inner = builder.call("net.layer", parent=outer)
        back_outer = builder.call("net", "Net", phase="backward", parent=outer)
        builder.tensor(back_outer, "input", "out", ONES)
        back_inner = builder.call("net.layer", phase="backward", parent=inner)
        builder.tensor(back_inner, "input", "out", ONES)
        if path is not None:
            builder.tensor(back_inner, "output", path, 3 * ONES)
        builder.tensor(back_outer, "output", "0", ONES * np.float32(off))
        return builder.run

    found = compare(run("0", 1), run(sent, 2))
    assert "only in reference" in found.pairs["verdict"]
    assert found.first is not None
    assert (found.first.site, found.first.phase, found.first.cause) == (site, "backward", "computation")


def test_weights_that_are_off_without_end_are_no_overflow() -> None:
    """As the statistics of a damaged run may have it."""
    sites = DictionaryColumn.of([f"h.{number}" for number in range(4)])
    words = {
        "verdict": DictionaryColumn.of([Verdict.DIVERGED] * 4),
        "site": sites,
        "path": DictionaryColumn.of(["weight"] * 4),
    }
    score = _oddness(Table({**words, "error": np.array([1e308, 1e308, 1e308, 1e-3])}), np.arange(4))
    assert not np.isnan(score).any()
