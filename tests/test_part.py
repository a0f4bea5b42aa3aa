"""Parts of tensors select what numpy's indexing does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from astray.errors import UsageError
from astray.part import Part


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("0:1, ..., :64", "0:1, ..., :64"),
        ("0,...,0:64", "0:1, ..., :64"),
        ((0, ..., slice(64)), "0:1, ..., :64"),
        ([0, "...", ":64"], "0:1, ..., :64"),
        (np.s_[0:1, ..., :64], "0:1, ..., :64"),
        (Part.parse("0:1, ..., :64"), "0:1, ..., :64"),
        ("3", "3:4"),
        (3, "3:4"),
        (-1, "-1:"),
        ("-2", "-2:-1"),
        (slice(None, None, 2), "::2"),
        (" 2 : -2 : 3 ", "2:-2:3"),
        ("0:", ":"),
        ("0:1, ...", "0:1"),
        ("...", "..."),
        (..., "..."),
        ("..., :, 5:", "..., :, 5:"),
    ],
)
def test_every_meaning_has_one_text(given: Any, text: str) -> None:
    part = Part.parse(given)
    assert str(part) == text
    assert Part.parse(text) == part
    assert hash(Part.parse(text)) == hash(part)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "'' is not a part of a tensor"),
        ((), r"\(\) names no dimension"),
        ("a:b", "'a:b' is not a part of a tensor"),
        ("1:2:3:4", "is not a part of a tensor"),
        ("0,,1", "is not a part of a tensor"),
        (1.5, "1.5 is not a part of a tensor"),
        (True, "True is not a part of a tensor"),
        (slice(0, 1.5), "is not a part of a tensor"),
        (None, "None is not a part of a tensor"),
        ("..., 0, ...", r"has more than one '\.\.\.'"),
        ("::0", "has a step of 0; it must be at least 1"),
        (slice(None, None, -1), "has a step of -1; it must be at least 1"),
        ("5:2", "'5:2' keeps nothing of any tensor"),
        ("3:3", "'3:3' keeps nothing of any tensor"),
        (":0", "':0' keeps nothing of any tensor"),
        ("-1:-2", "'-1:-2' keeps nothing of any tensor"),
    ],
)
def test_an_invalid_part_is_answered_with_the_form(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"{message}.*Write it like an index: '0:1, \.\.\., :64'"):
        Part.parse(given)


SPANS = [slice(0, 1), slice(None), slice(1, None, 2), slice(-1, None), slice(-3, -1), slice(2, 9), slice(7, 9)]
SHAPES = [(), (1,), (4,), (2, 3), (5, 1, 4), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_it_cuts_what_numpy_does(shape: tuple[int, ...], order: Any) -> None:
    array = np.array(np.arange(np.prod(shape)).reshape(shape), order=order)
    stride = tuple(size // array.itemsize for size in array.strides)
    memory = array.reshape(-1, order="A")
    for spans in [*itertools.product(SPANS, repeat=1), *itertools.product(SPANS, repeat=2)]:
        for index in [(*spans[:at], ..., *spans[at:]) for at in range(len(spans) + 1)]:
            part = Part.parse(index)
            found = part.apply_shape(shape, stride)
            if len(spans) > len(shape):
                assert found is None
                assert part.shape_of(shape) == shape
                assert part.cut(array) is array
                continue
            expected = array[index]
            assert np.array_equal(part.cut(array), expected)
            assert part.shape_of(shape) == expected.shape
            if expected.shape == shape:
                assert found is None
                continue
            assert found is not None
            offset, cut, steps = found
            sizes = [step * array.itemsize for step in steps]
            assert np.array_equal(np.lib.stride_tricks.as_strided(memory[offset:], cut, sizes), expected)
