"""The first divergence: planted faults in a small network, and single cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from astray.compare.comparison import compare

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
    assert first.limit == 32 * 2.0**-23
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


def test_a_wrong_inner_value_that_never_reaches_the_result_is_still_named(runs):
    def run(off: float):
        builder = runs.Builder()
        outer = builder.call("net", "Net")
        builder.tensor(outer, "input", "0", ONES)
        inner = builder.call("net.layer", parent=outer)
        builder.tensor(inner, "input", "0", ONES * np.float32(off))
        builder.tensor(outer, "output", "out", ONES)
        return builder.run

    first = compare(run(1), run(2)).first
    assert (first.site, first.role, first.cause, first.seen) == ("net.layer", "input", "computation", None)


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
    assert first.evidence[1] == (
        "The call of norm (LayerNorm) in step 0 has other arguments: `args.1` is 1e-05 in the reference and 1e-06 in "
        "the candidate."
    )
    assert len(first.evidence) == 2


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
