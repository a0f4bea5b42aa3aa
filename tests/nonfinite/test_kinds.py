"""What sort of accident it was, from names and numbers alone: also those that this version of torch no longer makes."""

from __future__ import annotations

import math

import pytest

from astray.nonfinite.alarm import TensorSummary
from astray.nonfinite.kinds import OriginCase, kind_of
from astray.nonfinite.step_rows import function_of
from astray.records import Statistics


def seen(path: str, low: float | None, high: float | None, *, role: str = "input", dtype: str = "float32",
         zeros: int = 0, nan: int = 0, inf: int = 0, count: int = 8, forward: bool = False,
         first: float | None = None) -> TensorSummary:  # fmt: skip
    size = None if low is None or high is None else max(abs(low), abs(high))
    bad = (None, None) if first is None else (0, first)
    statistics = Statistics(low, high, 0.0, 0.0, 0.0, size, zeros, nan, inf, count, *bad)
    return TensorSummary(role, path, dtype, (count,), statistics, forward)


def spoilt(dtype: str = "float32", nan: int = 0, inf: int = 2, count: int = 8) -> TensorSummary:
    return seen("out", None, None, role="output", dtype=dtype, nan=nan, inf=inf, count=count)


def forward_of(
    function: str, *given: TensorSummary, made: TensorSummary | None = None, args: str | None = None
) -> tuple[str, str]:
    kind = kind_of(OriginCase("produced", function, "forward", given, [made or spoilt()], args=args))
    return kind.word, kind.text


def backward_of(function: str, *forward: TensorSummary) -> str:
    return kind_of(
        OriginCase("produced", function, "backward", [seen("out", 1, 1)], [spoilt(nan=2, inf=0)], forward)
    ).word


@pytest.mark.parametrize(
    ("function", "low", "high", "zeros", "word"),
    [
        ("log", 0.0, 1.0, 3, "log of zero"),
        ("log", -0.5, 1.0, 0, "log of a negative"),
        ("log1p", -1.0, 0.0, 0, "log of zero"),
        ("log1p", -0.5, 1.0, 1, "unknown"),
        ("sqrt", -1e-9, 1.0, 0, "sqrt of a negative"),
        ("rsqrt", 0.0, 1.0, 1, "division by zero"),
        ("reciprocal", 0.0, 1.0, 1, "division by zero"),
        ("exp", -5.0, 89.0, 0, "overflow"),
        ("exp", -500.0, 80.0, 0, "unknown"),
        ("cosh", -200.0, 1.0, 0, "overflow"),
        ("acos", -2.0, 2.0, 0, "unknown"),
    ],
)
def test_one_input(function: str, low: float, high: float, zeros: int, word: str) -> None:
    assert forward_of(function, seen("0", low, high, zeros=zeros))[0] == word


def test_powers() -> None:
    base = seen("0", -1.0, 2.0, zeros=1)
    assert forward_of("pow", base, args='{"args":["<tensor>",0.5]}')[0] == "sqrt of a negative"
    assert forward_of("pow", base, args='{"args":["<tensor>",-2]}')[0] == "division by zero"
    assert forward_of("pow", seen("0", 1.0, 1e20), args='{"args":["<tensor>",2]}')[0] == "overflow"


def test_a_single_element_has_no_deviation() -> None:
    assert forward_of("std", seen("0", 1.0, 1.0, count=1), made=spoilt(count=1))[0] == "division by zero"


@pytest.mark.parametrize(
    ("dtype", "size", "word"),
    [("float16", 300.0, "overflow"), ("bfloat16", 300.0, "unknown"), ("float8_e5m2", 300.0, "overflow"),
     ("bfloat16", 1e20, "overflow"), ("float32", 1e20, "overflow"), ("float32", 1e15, "unknown")],
)  # fmt: skip
def test_a_product_overflows_by_the_range_of_its_dtype(dtype: str, size: float, word: str) -> None:
    given = [seen(path, -size, size, dtype=dtype) for path in "01"]
    assert forward_of("matmul", *given, made=spoilt(dtype))[0] == word


def test_a_conversion_overflows() -> None:
    word, text = forward_of("to", seen("0", 1.0, 70_000.0), made=spoilt("float16"))
    assert (word, text) == (
        "overflow",
        "Its input `0` reaches 70000 in float32, and the largest float16 is 65504.",
    )


def test_an_overflow_that_is_only_possible_says_so() -> None:
    word, text = forward_of("my_kernel", seen("0", 0.0, 1e38))
    assert (word, text.endswith("The sizes allow it; they do not prove it.")) == ("overflow", True)


@pytest.mark.parametrize(
    ("function", "word"),
    [("norm", "norm at zero"), ("atan2", "atan2(0, 0)"), ("cdist", "norm at zero"), ("pow", "power at zero")],
)
def test_derivatives_at_zero(function: str, word: str) -> None:
    assert backward_of(function, seen("0", 0.0, 0.0, zeros=8, forward=True)) == word
    assert backward_of(function, seen("0", 1.0, 2.0, forward=True)) == "unknown"


def test_the_deviation_of_a_constant_is_zero_in_the_result() -> None:
    constant = seen("0", 1.0, 1.0, forward=True)
    assert backward_of("std", constant, seen("out", 0, 0, role="output", zeros=8, forward=True)) == "std of a constant"


def test_infinities_of_both_signs() -> None:
    given = seen("0", None, None, inf=8)
    assert kind_of(OriginCase("converted", "sub", "forward", [given, given], [spoilt(nan=8, inf=0)])).word == "inf−inf"
    assert (
        kind_of(OriginCase("converted", "sin", "forward", [given], [spoilt(nan=8, inf=0)])).word == "NaN from infinity"
    )


@pytest.mark.parametrize(
    ("function", "signs", "word", "part"),
    [
        ("softmax", [-math.inf], "fully masked", "is −inf there is nothing to divide by"),
        ("softmax", [math.inf], "inf−inf", "the first of them +inf"),
        ("softmax", [None], "fully masked", "is −inf"),
        ("sub", [math.inf, math.inf], "inf−inf", "infinities of one sign, subtracted,"),
        ("sub", [math.inf, -math.inf], "inf−inf", "infinities of both signs"),
        ("add", [math.inf, math.inf], "inf−inf", "infinities of both signs"),
    ],
)
def test_what_the_sign_of_infinities_tells(function: str, signs: list[float | None], word: str, part: str) -> None:
    given = [seen(str(at), -1.0, 1.0, inf=2, first=sign) for at, sign in enumerate(signs)]
    kind = kind_of(OriginCase("converted", function, "forward", given, [spoilt(nan=8, inf=0)]))
    assert kind.word == word
    assert part in kind.text


def test_nan_that_stands_in_the_arguments() -> None:
    assert forward_of("full", made=spoilt(nan=8, inf=0), args='{"args":[[8],"nan"]}')[0] == "constant"


@pytest.mark.parametrize(
    ("type_", "name"),
    [("torch.Tensor.__truediv__", "div"), ("aten.div.Tensor", "div"), ("torch.nn.functional.linear", "linear"),
     ("torch.Tensor.mul_", "mul"), ("aten._softmax.default", "softmax"), ("LogSoftmax", "log_softmax"),
     ("torch.Tensor.__rdiv__", "rdiv"), ("c10d.allreduce_.default", "all_reduce"), ("aten._to_copy.default", "to")],
)  # fmt: skip
def test_one_name_for_functions_ops_and_modules(type_: str, name: str) -> None:
    assert function_of(type_) == name


def test_ranges_are_those_of_the_formats() -> None:
    assert "3.38953e+38" in forward_of("mul", seen("0", 0, 1e38), seen("1", 0, 1e38), made=spoilt("bfloat16"))[1]
    assert math.isclose(OriginCase("produced", "mul", "forward", [], [spoilt("float8_e4m3fn")]).limit, 448.0)


@pytest.mark.parametrize("digits", [400, 4000])
def test_an_argument_that_no_float_can_hold(digits: int) -> None:
    case = OriginCase("produced", "pow", "forward", [], [spoilt()], args=f'{{"args": ["<tensor>", {"9" * digits}]}}')
    assert case.constant(1) is None
    assert kind_of(case).word
