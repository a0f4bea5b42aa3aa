"""Whole comparisons: what is compared, what is told about the runs, and what cannot be compared at all."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from astray.comparison.blame.clues import differences
from astray.comparison.comparison import compare
from astray.comparison.problems import span
from astray.errors import CompareError
from astray.records import Call, MissedTensor, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import End, RunInfo, RunWriter

ONES = np.ones(8, np.float32)


def filled(builder, *sites: str, steps: range = range(1)):
    for step in steps:
        for site in sites:
            builder.tensor(builder.call(site, step=step), "output", "out", ONES)
    return builder.run


def test_same_runs(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder()))
    assert diff.same
    assert diff.exit_code == 0
    assert diff.first is None
    assert diff.counts["identical"] == len(diff.pairs) == 69
    assert diff.steps == [0, 1, 2]
    assert diff.calls == 36
    assert diff.problems == ()
    assert repr(diff) == "<Comparison of 69 tensors: 0 wrong, no divergence>"


def test_different_runs(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.01))
    assert not diff.same
    assert diff.exit_code == 1
    assert "first divergence at step 1, forward, mlp.proj (Linear), output" in repr(diff)


def test_only_selected_steps_are_compared(runs):
    diff = compare(runs.program(runs.Builder()), runs.program(runs.Builder(), proj=1.01, at=2), steps="0:2")
    assert diff.same
    assert diff.steps == [0, 1]


def test_rows_of_one_side_are_rows(runs):
    diff = compare(filled(runs.Builder(), "a", "b", "c"), filled(runs.Builder(), "a", "x", "c"))
    assert diff.pairs["site"].tolist() == ["a", "x", "b", "c"]
    assert diff.pairs["verdict"].tolist() == ["identical", "only in candidate", "only in reference", "identical"]
    assert diff.pairs["dtype_reference"].tolist() == ["float32", None, "float32", "float32"]
    assert not diff.same
    assert diff.first is None


def test_different_steps(runs):
    diff = compare(filled(runs.Builder(), "a", steps=range(20)), filled(runs.Builder(), "a", steps=range(18)))
    assert diff.problems == (
        "Runs have different steps: reference 0–19, candidate 0–17. Compare the shared part with --steps 0:18.",
    )
    assert diff.counts["only in reference"] == 2
    shared = compare(
        filled(runs.Builder(), "a", steps=range(20)), filled(runs.Builder(), "a", steps=range(18)), steps="0:18"
    )
    assert shared.same
    assert shared.problems == ()


def test_steps_with_gaps(runs):
    diff = compare(filled(runs.Builder(), "a", steps=range(0, 6, 2)), filled(runs.Builder(), "a", steps=range(5)))
    assert diff.problems == (
        "Runs have different steps: reference 0, 2, 4, candidate 0–4. Compare the shared part with --steps 0,2,4.",
    )


def test_different_ranks(runs):
    one, other = runs.Builder(world_size=2), runs.Builder()
    filled(other, "a")
    for rank in (0, 1):
        one.rank(rank).tensor(one.rank(rank).call("a"), "output", "out", ONES)
    diff = compare(one.run, other.run)
    assert diff.pairs["rank"].tolist() == [0, 1]
    assert diff.pairs["verdict"].tolist() == ["identical", "only in reference"]
    assert "Runs have different ranks: reference 0–1, candidate 0." in diff.problems


def test_an_incomplete_run_is_compared_and_said_to_be(runs):
    one, other = runs.Builder(), runs.Builder("runs/bad")
    filled(one, "a", "b")
    filled(other, "a")
    other.rank().end = None
    diff = compare(one.run, other.run)
    assert diff.problems == ("The candidate runs/bad is incomplete; what it holds is compared.",)


def test_torn_files_are_told(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        filled(builder, "a")
    other.rank().call_problems = ["calls.arrows ends in the middle of a batch; 120 bytes are left out."]
    other.rank().tensor(77, "output", "out", ONES)
    problems = compare(one.run, other.run).problems
    assert problems == (
        "In the candidate: calls.arrows ends in the middle of a batch; 120 bytes are left out.",
        "In the candidate: 1 of 2 tensors belong to calls whose rows are not there.",
    )


def test_what_was_not_observed_is_told(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        filled(builder, "a")
    one.rank().end = End(complete=True, missed=[MissedTensor("a sparse tensor", "its numbers cannot be read", 3)])
    assert compare(one.run, other.run).problems == (
        "Not observed in the reference: a sparse tensor (3 times): its numbers cannot be read.",
    )


def test_an_empty_run(runs):
    with pytest.raises(CompareError, match="the candidate runs/empty holds no tensors"):
        compare(filled(runs.Builder(), "a"), runs.Builder("runs/empty").run)


def test_renamed_everything(runs):
    with pytest.raises(CompareError) as caught:
        compare(filled(runs.Builder(), "h.0", "h.1"), filled(runs.Builder("runs/b"), "module.h.0", "module.h.1"))
    assert str(caught.value) == (
        "There is nothing to compare: no tensor has the same key in both runs. They have: reference runs/good ranks 0, "
        "steps 0, 2 sites, such as h.1; candidate runs/b ranks 0, steps 0, 2 sites, such as module.h.1. They share no "
        "site: was the model wrapped or renamed? Draft what belongs together with `astray map REFERENCE CANDIDATE`, or "
        "pair calls by their order with --by order."
    )


def test_no_shared_step(runs):
    with pytest.raises(CompareError, match="They share no step: record the same steps"):
        compare(filled(runs.Builder(), "a"), filled(runs.Builder(), "a", steps=range(1, 2)))
    with pytest.raises(CompareError, match="They share no step among --steps 5: choose from 0"):
        compare(filled(runs.Builder(), "a"), filled(runs.Builder(), "a"), steps=5)


def test_no_shared_rank(runs):
    one, other = runs.Builder(), runs.Builder()
    filled(one, "a")
    other.rank(1).tensor(other.rank(1).call("a"), "output", "out", ONES)
    with pytest.raises(CompareError, match="They share no rank"):
        compare(one.run, other.run)


def test_nothing_kept_in_common(runs):
    with pytest.raises(CompareError, match=r"1 tensors are in both runs.*keep='stats'"):
        compare(filled(runs.Builder(keep="stats"), "a"), filled(runs.Builder(keep="fingerprint"), "a"))


def test_progress_counts_the_pairs_whose_values_are_read(runs):
    told = []
    keep = "fingerprint,tensors"
    diff = compare(
        runs.program(runs.Builder(keep=keep)),
        runs.program(runs.Builder(keep=keep), proj=1.01),
        progress=lambda done, total: told.append((done, total)),
    )
    changed = len(diff.pairs) - diff.counts["identical"]
    assert told == [(number, changed) for number in range(1, changed + 1)]


def test_runs_on_disk(tmp_path):
    def write(name: str, factor: float) -> str:
        with RunWriter(tmp_path / name, info=RunInfo.of_process()) as writer:
            for step in range(2):
                writer.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))
                values = ONES * np.float32(1 + step * factor)
                found = measure(Strided.from_numpy(values))
                row = Tensor(step, "output", "out", "float32", (8,), (1,), "cpu", False, *found)
                writer.tensor(row, values)
        return str(tmp_path / name)

    diff = compare(write("a", 0), write("b", 0.5))
    assert (diff.first.step, diff.first.error, diff.first.measured_by) == (1, 0.5, "values")
    assert diff.sources == {"values": 1, "fingerprint": 1}


def test_span():
    assert [span(list(steps)) for steps in (range(20), [3], [0, 2, 9], range(0, 40, 2))] == [
        "0–19", "3", "0, 2, 9", "0, 2, 4, 6, 8 … 38",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": [1, True]}, {"a": [1, 1]}, [("a.1", "true", "1")]),
        ([1], [1, 2], [("", "[1]", "[1, 2]")]),
        ({"a": None}, {}, [("a", "null", "absent")]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_differences_of_arguments(left, right, found):
    assert list(differences(left, right)) == found


def test_no_framework_and_no_capture_is_imported():
    code = (
        "import sys, astray.comparison.comparison, astray.report.text, astray.report.csv, astray.report.json\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'paddle', 'jax')"
        " or name.startswith('astray.capture')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_steps_that_neither_run_has_are_answered_with_those_there_are(runs):
    made = [runs.program(runs.Builder(path)) for path in ("runs/a", "runs/b")]
    with pytest.raises(CompareError, match=r"no step among --steps 9:12: choose from 0–2\."):
        compare(*made, steps="9:12")
