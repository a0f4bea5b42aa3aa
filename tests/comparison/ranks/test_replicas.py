"""Ranks of one run against each other: which rank diverged from its replicas, where, and what is not a replica."""

from __future__ import annotations

import numpy as np
import pytest

from astray.comparison.ranks.replicas import compare_replicas
from astray.errors import CompareError


def trained(builder, ranks: int = 4, steps: int = 3, **off: float):
    """Data-parallel ranks: other activations, the same weights; `rank2=0.5` is off from step 1 on by so much."""
    for rank in range(ranks):
        rows, wrong = builder.rank(rank), off.get(f"rank{rank}", 0.0)
        for step in range(steps):
            seq = rows.call("fc", step=step)
            rows.tensor(seq, "parameter", "weight", np.full(3, step + wrong * (step > 0)))
            rows.tensor(seq, "output", "out", np.full(3, 10.0 * rank))
            seq = rows.call("fc.weight", "AdamW", step=step, kind="optimizer", phase="update")
            rows.tensor(seq, "state", "exp_avg", np.full(3, step + wrong))
    return builder.run


def test_replicas_that_agree(runs):
    found = compare_replicas(trained(runs.Builder(world_size=4)))
    assert (found.same, found.compared, found.first, found.exit_code) == (True, 6, None, 0)
    assert "All replicas agree to the bit." in str(found)


def test_the_one_that_is_off_is_named(runs):
    found = compare_replicas(trained(runs.Builder(world_size=4), rank2=0.5))
    assert (found.different, found.compared, found.exit_code) == (5, 6, 1)
    assert found.alone == {0: 0, 1: 0, 2: 5, 3: 0}
    assert found.first.groups == ((0, 1, 3), (2,))
    assert (found.first.place.step, found.first.place.site, found.first.place.path) == (0, "fc.weight", "exp_avg")
    assert "rank 2 went astray" in str(found)
    assert "ranks 0, 1, 3" in str(found)
    assert "Not what most hold: rank 2 5 times." in str(found)


def test_without_a_majority_nobody_is_blamed(runs):
    found = compare_replicas(trained(runs.Builder(world_size=2), ranks=2, rank1=0.5), sites="^fc$")
    assert found.first.odd == ()
    assert found.first.place.step == 1
    assert found.alone == {0: 0, 1: 0}
    assert "no value is held by most" in str(found)


def test_what_is_spread_over_ranks_is_not_a_replica(runs):
    builder = runs.Builder(world_size=2)
    for rank in (0, 1):
        rows = builder.rank(rank)
        seq = rows.call("fc")
        rows.tensor(seq, "parameter", "weight", np.full(3, float(rank)), placement='{"mesh": [2]}')
        rows.tensor(seq, "parameter", "bias", np.ones(3))
    found = compare_replicas(builder.run)
    assert (found.same, found.compared) == (True, 1)


def test_what_cannot_be_compared_is_told(runs):
    with pytest.raises(CompareError, match="has one rank, 0; replicas take two"):
        compare_replicas(trained(runs.Builder(), ranks=1))
    with pytest.raises(
        CompareError, match="No two ranks of runs/good have the same parameter or optimizer tensor in steps 7"
    ):
        compare_replicas(trained(runs.Builder(world_size=2), ranks=2), steps="7")
