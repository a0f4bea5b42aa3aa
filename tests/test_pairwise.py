"""The selection of a grid that `make test` runs has every pair of values, and the rest is among the slow tests."""

from __future__ import annotations

import math

import pytest

from pairwise import diagonal, grid, missing_pairs, pairwise


@pytest.mark.parametrize(
    "sizes", [(4,), (3, 5), (21, 14, 2), (9, 6, 2, 2), (2, 2, 2, 2, 2), (5, 3, 3, 3), (2, 7, 3, 4, 2)], ids=str
)
def test_every_pair_of_values_is_selected(sizes: tuple[int, ...]) -> None:
    selected = pairwise(sizes)
    assert not missing_pairs(sizes, selected)
    assert len(set(selected)) == len(selected) <= math.prod(sizes)
    assert all(0 <= at < size for row in selected for at, size in zip(row, sizes, strict=True))
    if len(sizes) > 2:
        assert len(selected) <= 2 * math.prod(sorted(sizes)[-2:])


def test_a_pair_that_is_missing_is_seen() -> None:
    assert missing_pairs((2, 2), [(0, 0), (1, 1), (0, 1)]) == {(0, 1, 1, 0)}


def test_each_value_once() -> None:
    assert diagonal((3, 2)) == [(0, 0), (1, 1), (2, 0)]


def test_the_rest_of_the_grid_is_slow() -> None:
    parameters = grid(dtype=["a", "b"], layout=[1, 2], backend=["x", "y"], ids={"layout": ["one", "two"]}).args[1]
    slow = [parameter for parameter in parameters if parameter.marks]
    assert (len(parameters), len(slow)) == (8, 4)
    assert parameters[0].id == "a-one-x"
    assert all(mark.name == "slow" for parameter in slow for mark in parameter.marks)
