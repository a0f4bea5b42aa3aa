"""Arithmetic with states: what comes out, what is written to, and what does not fit together."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.errors import StateError
from astray.state import StateDict


def state(seed: int = 0, **more: torch.Tensor) -> StateDict:
    generator = torch.Generator().manual_seed(seed)
    values = {
        "fc.weight": torch.rand(2, 3, generator=generator) + 0.5,
        "fc.bias": torch.rand(2, generator=generator) + 0.5,
    }
    return StateDict(values | more, name=f"state{seed}")


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow]


@pytest.mark.parametrize("function", [*OPERATORS, operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("other", [state(1), 2, 0.5, np.float64(1.5), torch.tensor(3.0), state(1).state_dict()])
def test_operators_work_on_every_parameter(function: Callable[[Any, Any], Any], other: Any) -> None:
    one = state()
    found, reflected = function(one, other), function(other, one)
    assert type(found) is StateDict
    assert found.name == "StateDict"
    for name in one:
        value = other[name] if hasattr(other, "keys") else other
        assert torch.equal(found[name], function(one[name], value))
        assert torch.equal(reflected[name], function(value, one[name]))


@pytest.mark.parametrize("function", IN_PLACE)
@pytest.mark.parametrize("other", [state(1), 2, torch.tensor(3.0)])
def test_operators_in_place_write_to_the_same_memory(function: Callable[[Any, Any], Any], other: Any) -> None:
    one, expected = state(), state()
    tensors = list(one.values())
    result = function(one, other)
    assert result is one
    for name, tensor in zip(expected, tensors, strict=True):
        value = other[name] if isinstance(other, StateDict) else other
        assert result[name] is tensor
        assert torch.equal(tensor, function(expected[name], value))


def test_unary_operators() -> None:
    one = state() - 1
    assert (-one)["fc.bias"].tolist() == (-one["fc.bias"]).tolist()
    assert abs(one) == one.abs()
    assert +one == one


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("sqrt", torch.sqrt), ("abs", torch.abs), ("sign", torch.sign), ("zeros", torch.zeros_like),
        ("ones", torch.ones_like), ("clip", lambda value: torch.clip(value, 0.7, 1.0)),
    ],
)  # fmt: skip
def test_methods_and_their_forms_in_place(method: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    one = state() - (0 if method == "sqrt" else 1)
    given = (0.7, 1.0) if method == "clip" else ()
    expected = {name: function(value) for name, value in one.items()}
    found = getattr(one, method)(*given)
    assert found == expected
    assert one != expected
    tensors = list(one.values())
    assert getattr(one, f"{method}_")(*given) is one
    assert one == expected
    assert all(value is tensor for value, tensor in zip(one.values(), tensors, strict=True))


def test_functions_of_torch() -> None:
    one, other = state(), state(1)
    assert torch.sqrt(one) == one.sqrt()
    assert torch.add(one, other, alpha=2) == one + 2 * other
    assert torch.where(one > 1, one, torch.tensor(0.0)) == one * (one > 1)
    assert torch.lerp(one, other, 0.5)["fc.bias"].tolist() == torch.lerp(one["fc.bias"], other["fc.bias"], 0.5).tolist()
    assert torch.stack([one, other])["fc.weight"].shape == (2, 2, 3)
    assert torch.zeros_like(one) == one.zeros()
    assert torch.nn.functional.relu(one - 1) == torch.clamp(one - 1, min=0)
    values, places = torch.max(one, dim=0)
    assert values["fc.weight"].tolist() == one["fc.weight"].max(dim=0).values.tolist()
    assert places["fc.weight"].dtype == torch.int64
    assert torch.allclose(one, one + 1e-9)
    assert not torch.allclose(one, other)
    assert torch.equal(one, state())


def test_functions_of_torch_in_place() -> None:
    one = state()
    expected = one.sqrt()
    assert torch.sqrt_(one) is one
    assert one == expected
    assert torch.clamp_(one, 0.8, 0.9) == expected.clip(0.8, 0.9)
    assert torch.xlogy_(one, state(1)) == torch.xlogy(expected.clip(0.8, 0.9), state(1))
    with pytest.raises(StateError, match="one other state"):
        torch.clamp_(one, state(1), state(2))
    tensor = torch.zeros(())
    with pytest.raises(StateError, match="not a state"):
        tensor += one
    assert tensor == 0


def test_adams_update_in_one_line() -> None:
    m, v = state(), state(1)
    found = -0.1 * m / (torch.sqrt(v) + 1e-8)
    assert torch.equal(found["fc.bias"], -0.1 * m["fc.bias"] / (torch.sqrt(v["fc.bias"]) + 1e-8))


def test_numbers_stay_numbers_and_divide_as_tensors_do() -> None:
    one, other = StateDict({"a": 1.0, "b": 0.0, "c": 3}), StateDict({"a": 0.0, "b": 0.0, "c": 2})
    ratio = one / other
    assert ratio["a"] == math.inf
    assert math.isnan(ratio["b"])
    assert ratio["c"] == 1.5
    assert all(type(value) is float for value in ratio.values())
    assert torch.sqrt(one)["c"] == math.sqrt(3)
    one *= 2
    assert one.state_dict() == {"a": 2.0, "b": 0.0, "c": 6.0}


def test_each_parameter_may_be_scaled_by_its_own_number() -> None:
    one = state()
    unit = one / one.norm2(lw=True)
    assert unit["fc.weight"].dtype == torch.float32
    assert unit.norm2(lw=True).state_dict() == pytest.approx({"fc.weight": 1.0, "fc.bias": 1.0}, rel=1e-6)


def test_shapes_that_do_not_fit_are_an_error_that_names_them() -> None:
    one, other = state(), StateDict({**state(), "fc.bias": torch.ones(1)})
    message = r"The shapes of 'fc\.bias' differ: \(2,\) and \(1,\)"
    for function in (*OPERATORS, *IN_PLACE, torch.add, torch.maximum, torch.allclose, torch.where):
        with pytest.raises(StateError, match=message):
            function(one > 0, one, other) if function is torch.where else function(one, other)  # type: ignore[operator]
    with pytest.raises(StateError, match=r"'fc\.weight' differ: \(2, 3\) and \(3,\) of a tensor"):
        one * torch.ones(3)
    assert one == state()


def test_different_names_are_an_error_that_names_them() -> None:
    one, other = state(head=torch.ones(1)), state(1, tail=torch.ones(1))
    with pytest.raises(StateError, match="only in 'state0': head; only in 'state1': tail"):
        one + other
    many = StateDict({f"p{number}": 1.0 for number in range(9)})
    with pytest.raises(StateError, match="only in the second: p0, p1, p2, p3 and 5 more"):
        StateDict() - many


def test_what_fails_for_a_parameter_names_it() -> None:
    one = state(steps=torch.tensor(3))
    with pytest.raises(StateError, match=r"iadd failed for 'steps' \(int64 \(\)\).*can't be cast"):
        one += 0.5
    with pytest.raises(TypeError, match="unsupported operand"):
        one + "two"


def test_apply_and_its_form_in_place() -> None:
    model = nn.Linear(3, 2)
    weight = astray.state.from_weight(model)
    doubled = weight.apply(lambda value: value * 2)
    before = weight.clone()
    assert doubled == before * 2
    weight.apply_(lambda value: value * 2)
    assert torch.equal(model.weight, doubled["weight"])  # the model's own
    weight.apply_(torch.zero_)
    assert model.weight.abs().max() == 0
    assert model.weight.requires_grad


def test_equality_is_of_names_shapes_dtypes_and_bits() -> None:
    one = state()
    assert one == one.clone()
    assert one != one.clone(dtype=torch.float64)
    assert one != one.filter(".*bias")
    assert one != StateDict({name: value.reshape(-1) for name, value in one.items()})
    assert one != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_no_gradient_is_recorded() -> None:
    weight = astray.state.from_weight(nn.Linear(3, 2))
    for result in (weight * 2, torch.sqrt(weight.abs()), weight.clone(), weight):
        assert not any(value.requires_grad for value in result.values())
