"""The ends of dtypes, against what torch makes of numbers near them."""

from __future__ import annotations

import math

import pytest
import torch

from astray.errors import UsageError
from astray.headroom.dtype_limits import limits, targets

FLOATS = [
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip


def cast(value: float, name: str) -> float:
    """A number after a round trip through the dtype."""
    return float(torch.tensor([value], dtype=torch.float64).to(torch.float32).to(getattr(torch, name)).double()[0])


@pytest.mark.parametrize("name", FLOATS)
def test_torch_agrees_about_the_ends(name: str) -> None:
    ends, theirs = limits(name), torch.finfo(getattr(torch, name))
    assert ends is not None
    assert (ends.largest, ends.tiny) == (theirs.max, theirs.tiny)
    if name != "float8_e5m2fnuz":  # of which torch says 0.125, though its numbers after 1 are 1.25 and 1.5
        assert ends.eps == theirs.eps
    assert cast(1 + ends.eps, name) == 1 + ends.eps or name == "float64"  # which the cast's float32 cannot tell
    assert cast(1 + ends.eps * 0.49, name) == 1


@pytest.mark.parametrize("name", [name for name in FLOATS if name not in ("float64", "float32", "bfloat16")])
def test_what_overflows_and_what_vanishes_is_what_a_cast_makes_of_it(name: str) -> None:
    ends = limits(name)
    assert ends is not None
    below = torch.nextafter(torch.tensor(ends.overflows, dtype=torch.float32), torch.tensor(0.0))
    at = torch.nextafter(below, torch.tensor(math.inf))  # the first float32 that is not below
    at = at if float(at) >= ends.overflows else torch.nextafter(at, torch.tensor(math.inf))
    made = cast(float(at), name)
    assert not math.isfinite(made) or (name == "float8_e4m3fn" and made == 448)  # some versions of torch clip instead
    assert cast(float(below), name) == ends.largest
    assert cast(ends.vanishes, name) == 0
    assert cast(ends.vanishes * (1 + 2**-20), name) == 2 * ends.vanishes  # the smallest number there is


def test_the_coarsest_have_names_for_what_they_are() -> None:
    assert [name for name in FLOATS if limits(name).coarse] == FLOATS[4:]
    assert [name for name in FLOATS if limits(name).narrow] == ["float16", *FLOATS[4:]]


def test_float32_and_bfloat16_overflow_half_a_step_beyond_their_largest() -> None:
    assert limits("float32").overflows == 2.0**128 - 2.0**103
    assert limits("bfloat16").overflows == 2.0**128 - 2.0**119
    assert limits("float64").overflows == math.inf


def test_complex_numbers_have_the_ends_of_their_parts_and_integers_none() -> None:
    assert limits("complex64").largest == limits("float32").largest
    assert limits("int32") is None
    assert limits("bool") is None
    assert limits("float4_of_tomorrow") is None


def test_an_exponent_without_a_zero_never_vanishes() -> None:
    assert limits("float8_e8m0fnu").vanishes == 0


def test_targets_by_many_names_each_once() -> None:
    assert [one.name for one in targets("fp16, bf16,torch.float16,e4m3")] == ["float16", "bfloat16", "float8_e4m3fn"]
    assert [one.name for one in targets(["float8_e5m2"])] == ["float8_e5m2"]
    assert targets("") == []


@pytest.mark.parametrize("wrong", ["flaot16", "int8", "complex64", "float16,,"])
def test_what_is_not_a_target_is_answered_with_those_there_are(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"is not a floating-point dtype\..* There are float64, float32, float16"):
        targets(wrong)
