"""Which part of a distributed tensor a row is."""

from __future__ import annotations

import pytest

from astray.part import period_of, whole_shape


@pytest.mark.parametrize(
    ("runs", "size", "period"),
    [
        ([(0, 2), (4, 2)], 8, 4),
        ([(2, 2), (6, 2)], 8, 4),
        ([(0, 2), (4, 2), (8, 2)], 12, 4),
        ([(0, 2), (4, 2)], 9, None),  # the whole is not a matrix of that width
        ([(0, 2), (4, 1)], 8, None),
        ([(0, 1), (2, 1), (5, 1)], 6, None),
        ([(3, 2), (7, 2)], 8, None),  # a stretch would go over the edge of a line
    ],
)
def test_stretches_that_repeat_are_a_box(runs: list[tuple[int, int]], size: int, period: int | None) -> None:
    assert period_of(runs, size) == period


def test_the_whole_is_known_where_the_offset_is() -> None:
    assert whole_shape('{"shape":[10,6],"offset":[5,0]}') == (10, 6)
    assert whole_shape('{"shape":[],"offset":[]}') == ()
    assert whole_shape('{"shape":[10,6],"offset":null}') is None
    assert whole_shape('{"shape":[8],"offset":[0],"runs":{"0":[[0,2],[4,2]]}}') == (8,)
    assert whole_shape('{"shape":[8],"offset":[0],"runs":{"0":[[0,2],[4,1]]}}') is None


@pytest.mark.parametrize("text", ["mesh(2)[Shard(0)]", "{}", "[]", '{"shape":3,"offset":[0]}'])
def test_an_unknown_placement_is_ignored(text: str) -> None:
    assert whole_shape(text) is None
