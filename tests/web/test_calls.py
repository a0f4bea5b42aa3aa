"""Which rows are of one call, and which call lies in which: beside a plain walk from row to row."""

from __future__ import annotations

import numpy as np

from astray.comparison.comparison import compare
from astray.web.columns import calls_of_pairs
from astray.web.views import RunView
from page_documents import program_comparison
from record_builders import Builder, linear_program


def test_a_damaged_run_leads_in_no_circle():
    builder = Builder()
    for seq, parent in ((0, 1), (1, 0), (2, 2), (3, 99)):
        builder.tensor(builder.call("a", seq=seq, parent=parent, call=seq), "output", "out", np.ones(2))
    for seq, parent in ((4, 5), (5, 4)):
        builder.tensor(
            builder.call("b", seq=seq, parent=parent, call=seq, phase="backward"), "output", "out", np.ones(2)
        )
    run = builder.run
    assert RunView(run).calls.parent.tolist() == [-1] * 6
    assert run.problems[0] == "5 calls would lie inside of each other, so what is around them is not known."


def test_calls_are_numbered_in_the_order_in_which_they_are_seen():
    comparison = program_comparison()
    calls = calls_of_pairs(comparison)
    pairs = comparison.pairs
    firsts = [int(np.flatnonzero(calls.of_row == call)[0]) for call in range(len(calls.parent))]
    assert firsts == sorted(firsts) == calls.first.tolist()
    for call in range(len(calls.parent)):
        rows = calls.rows(call)
        assert rows == np.flatnonzero(calls.of_row == call).tolist()
        assert len(set(pairs.numbers("call_reference")[rows].tolist())) == 1
    root, mlp = pairs.coded("site").code("<root>"), pairs.coded("site").code("mlp")
    sites = pairs.coded("site").codes[calls.first]
    assert calls.parent[sites == root].tolist() == [-1] * 6
    assert sites[calls.parent[sites == mlp]].tolist() == [root] * 6


def test_what_only_the_candidate_has_lies_in_the_call_that_both_made():
    runs = []
    for extra in (False, True):
        builder = Builder()
        outer = builder.call("outer")
        builder.tensor(outer, "input", "0", np.ones(2))
        if extra:
            inner = builder.call("outer.new", parent=outer)
            builder.tensor(inner, "output", "out", np.ones(3))
            builder.tensor(outer, "output", "second", np.ones(4))
        builder.tensor(outer, "output", "out", np.ones(2))
        runs.append(builder.run)
    comparison = compare(*runs)
    calls = calls_of_pairs(comparison)
    verdicts = comparison.pairs.coded("verdict").tolist()
    assert verdicts == ["identical", "only in candidate", "only in candidate", "identical"]
    assert calls.of_row.tolist() == [0, 1, 0, 0]
    assert calls.parent.tolist() == [-1, 0]


def test_a_call_without_rows_is_passed_over():
    builder = Builder()
    outer = builder.call("outer")
    silent = builder.call("outer.silent", parent=outer)
    inner = builder.call("outer.silent.inner", parent=silent)
    builder.tensor(outer, "input", "0", np.ones(2))
    builder.tensor(inner, "output", "out", np.ones(2))
    run = builder.run
    calls = calls_of_pairs(compare(run, run))
    assert calls.of_row.tolist() == [0, 1]
    assert calls.parent.tolist() == [-1, 0]


def test_ranks_do_not_share_calls():
    runs = []
    for path in ("runs/good", "runs/bad"):
        builder = Builder(path, world_size=2)
        linear_program(builder, steps=1)
        runs.append(linear_program(builder, steps=1, rank=1))
    comparison = compare(*runs)
    calls = calls_of_pairs(comparison)
    half = len(calls.parent) // 2
    assert calls.rank.tolist() == [0] * half + [1] * half
    assert (calls.parent[half:] == np.where(calls.parent[:half] < 0, -1, calls.parent[:half] + half)).all()
