"""Arguments out of their skeleton; damaged and hostile skeletons are refused with a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from astray.replay.arguments import NotPlainError, Rebuilding, Skeleton, parse_skeleton, paths, rebuild

TENSOR = torch.ones(2)
PLAIN = Rebuilding(lambda _: TENSOR, lambda dtype: dtype, "cpu", True, torch.default_generator)


def rebuilt(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return rebuild(Skeleton(list(args), kwargs), PLAIN)


def test_plain_values_stay_and_tensors_are_put_in() -> None:
    args, kwargs = rebuilt("<tensor>", 3, 0.5, None, True, [1, ["<tensor>"]], "mean", dim=-1, weights={"a": "<tensor>"})
    assert args == [TENSOR, 3, 0.5, None, True, [1, [TENSOR]], "mean"]
    assert kwargs == {"dim": -1, "weights": {"a": TENSOR}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("torch.bfloat16", torch.bfloat16), ("<torch.dtype torch.float16>", torch.float16), ("<ellipsis>", ...),
        ("torch.channels_last", torch.channels_last), ("torch.strided", torch.strided), ("inf", math.inf),
        ("-inf", -math.inf), ("slice(0, 3, None)", slice(0, 3, None)), ("slice(None, None, -1)", slice(None, None, -1)),
        ("cuda:1", "cpu"), ("<torch.device cuda:0>", "cpu"), ("<Generator>", torch.default_generator),
    ],
)  # fmt: skip
def test_texts_that_stand_for_others(text: str, value: Any) -> None:
    assert rebuilt(text)[0] == [value]


def test_dtypes_of_floats_are_those_of_the_way() -> None:
    wide = PLAIN._replace(dtype=lambda dtype: torch.float64 if dtype.is_floating_point else dtype)
    assert rebuild(Skeleton(["torch.bfloat16", "torch.int64"], {}), wide)[0] == [torch.float64, torch.int64]


def test_a_list_as_an_index_is_a_tuple_where_the_way_says_so() -> None:
    skeleton = Skeleton(["<tensor>", [0, "slice(None, 2, None)"]], {})
    assert rebuild(skeleton, PLAIN)[0][1] == (0, slice(None, 2, None))
    assert rebuild(skeleton, PLAIN._replace(tuples=False))[0][1] == [0, slice(None, 2, None)]


def test_paths_of_tensors() -> None:
    skeleton = Skeleton(["<tensor>", [1, "<tensor>"]], {"mask": "<tensor>", "out": None})
    assert paths(skeleton) == ["0", "1.1", "kwargs.mask"]


@pytest.mark.parametrize(
    "text", ["<function relu>", "<CustomConfig>", "range(0, 3)", "torch.nonsense", "torch.load", "a…"]
)
def test_what_only_has_a_description_is_refused(text: str) -> None:
    with pytest.raises(NotPlainError, match="its argument 0 is "):
        rebuilt(text)


DAMAGED = {
    "none": None,
    "cut": '{"args": [1, 2',
    "a list": "[1, 2]",
    "other types": '{"args": {"a": 1}}',
    "kwargs": '{"args": [], "kwargs": [1]}',
    "long": json.dumps({"args": ["x" * 300_000]}),
    "many": json.dumps({"args": [[0] * 20_000]}),
    "deep": '{"args": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "not a number": '{"args": [' + "9" * 6_000 + "]}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_skeletons_are_refused(name: str) -> None:
    with pytest.raises(NotPlainError, match="arguments"):
        parse_skeleton(DAMAGED[name])
