"""Pairing: by key and nothing else, every row kept, in an order that reads like one execution."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from astray.comparison.pair.alignment import Alignment, Words, align, merge
from astray.comparison.rows import RowReader, StringTable, read_rows
from astray.graph.keys import find, number_repeats, one_key
from astray.steps import StepSelection


def pairs_of(reference, candidate, steps=None, **ways) -> Alignment:
    vocabularies = defaultdict(StringTable)
    reading = RowReader(StepSelection.parse(steps))
    sides = [read_rows(side.run.ranks[0], vocabularies, reading) for side in (reference, candidate)]
    return align(*sides, Words(*(vocabularies[name].words for name in Words._fields)), **ways)


def add(builder, *sites: str, **rest) -> None:
    for site in sites:
        seq = builder.call(site, **rest)
        builder.tensor(seq, "output", "out", np.ones(2))


def as_lists(found: Alignment) -> list[tuple[int, int]]:
    return list(zip(found.reference.tolist(), found.candidate.tolist(), strict=True))


def test_equal_runs_are_paired_row_by_row(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        add(builder, "a", "b", "c")
    assert as_lists(pairs_of(one, other)) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(("phase", "paired"), [("forward", False), ("backward", True)])
def test_recomputation_parts_forward_calls_only(runs, phase, paired):
    """With reentrant checkpointing the backward of a recomputed call is the ordinary one."""
    plain, checkpointed = runs.Builder(), runs.Builder()
    add(plain, "a", phase=phase)
    add(checkpointed, "a", phase=phase, recompute=True)
    assert as_lists(pairs_of(plain, checkpointed)) == ([(0, 0)] if paired else [(-1, 0), (0, -1)])


def test_order_of_execution_does_not_matter(runs):
    one, other = runs.Builder(), runs.Builder()
    add(one, "a", "b", "c")
    add(other, "c", "a", "b")
    assert as_lists(pairs_of(one, other)) == [(0, 1), (1, 2), (2, 0)]


def test_lone_rows_of_the_candidate_follow_the_row_they_followed_there(runs):
    one, other = runs.Builder(), runs.Builder()
    add(one, "a", "b", "gone", "c")
    add(other, "early", "a", "new", "newer", "b", "c", "late")
    assert as_lists(pairs_of(one, other)) == [
        (-1, 0),  # early
        (0, 1),  # a
        (-1, 2),  # new
        (-1, 3),  # newer
        (1, 4),  # b
        (2, -1),  # gone
        (3, 5),  # c
        (-1, 6),  # late
    ]


def test_an_extra_call_renumbers_no_other_site(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        add(builder, "a", call=0)
    add(other, "a", call=1)
    for builder in (one, other):
        add(builder, "b", call=0)
    assert as_lists(pairs_of(one, other)) == [(0, 0), (-1, 1), (1, 2)]


def test_repeats_of_a_key_are_paired_in_order(runs):
    one, other = runs.Builder(), runs.Builder()
    add(one, "a", "a", "b")
    add(other, "a", "a", "a")
    assert as_lists(pairs_of(one, other)) == [(0, 0), (1, 1), (-1, 2), (2, -1)]


@pytest.mark.parametrize(
    "field",
    [{"step": 1}, {"micro": 1}, {"call": 1}, {"phase": "backward"}, {"recompute": True}],
    ids=lambda field: next(iter(field)),
)
def test_every_field_of_the_key_separates(runs, field):
    one, other = runs.Builder(), runs.Builder()
    add(one, "a")
    add(other, "a", **field)
    assert not pairs_of(one, other).matched.any()


def test_role_and_path_separate(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder, role, path in ((one, "input", "0"), (other, "input", "1")):
        builder.tensor(builder.call("a"), role, path, np.ones(2))
    assert not pairs_of(one, other).matched.any()


def test_only_selected_steps_are_read(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        for step in range(4):
            add(builder, "a", step=step)
    assert as_lists(pairs_of(one, other, "1:3")) == [(0, 0), (1, 1)]


def test_a_tensor_whose_call_was_lost_is_left_out(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder in (one, other):
        add(builder, "a")
    one.tensor(99, "output", "out", np.ones(2))
    assert as_lists(pairs_of(one, other)) == [(0, 0)]


def test_one_key_is_exact_beyond_64_bits():
    random = np.random.default_rng(0)
    columns = [random.integers(0, 1 << 40, 300) for _ in range(4)]
    for column in columns:
        column[100:200] = column[:100]  # the second hundred repeats the first
    key = one_key(columns)
    assert len(np.unique(key)) == 200
    assert np.array_equal(key[:100], key[100:200])


def test_number_repeats():
    assert number_repeats(np.array([7, 3, 7, 7, 3])).tolist() == [0, 0, 1, 2, 1]
    assert number_repeats(np.array([], np.int64)).tolist() == []


def test_find():
    assert find(np.array([5, 1, 9]), np.array([9, 5])).tolist() == [1, -1, 0]
    assert find(np.array([5]), np.array([], np.int64)).tolist() == [-1]


def test_merge_keeps_every_row_exactly_once():
    random = np.random.default_rng(1)
    for _ in range(50):
        left, right = random.integers(0, 30, 2)
        partner = np.full(left, -1)
        shared = min(left, right) // 2
        partner[random.permutation(left)[:shared]] = random.permutation(right)[:shared]
        found = merge(partner, right)
        assert found.reference[found.reference >= 0].tolist() == list(range(left))
        assert sorted(found.candidate[found.candidate >= 0].tolist()) == list(range(right))
