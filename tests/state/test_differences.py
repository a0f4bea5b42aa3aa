"""Two states beside each other: against plain float64 numpy, on the CPU and by the way that devices go."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.errors import StateError
from astray.state import differences as pairs_module
from astray.state.differences import PairSums, pairs


def two_states(dtype: torch.dtype = torch.float32) -> tuple[astray.state.StateDict, astray.state.StateDict]:
    torch.manual_seed(0)
    one = {"a": torch.randn(7, 5), "b": torch.randn(3), "s": torch.tensor(2.0), "none": torch.empty(0, 4)}
    other = {name: value + 0.01 * torch.randn_like(value) for name, value in one.items()}
    other["b"][1] = 0.0
    first, second = ({name: value.to(dtype) for name, value in state.items()} for state in (one, other))
    return astray.state.StateDict(first, name="one"), astray.state.StateDict(second, name="other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("by_device", [False, True])
def test_a_pair_is_what_numpy_says(dtype: torch.dtype, by_device: bool) -> None:
    one, other = two_states(dtype)
    found = pairs(one, other, one)
    if by_device:
        summed = {name: pairs_module._device_sums(one[name], other[name]) for name in one}  # type: ignore[arg-type]
        found = pairs_module._fetched(summed)
    for name in one:
        a, b = (np.asarray(torch.as_tensor(state[name]).double()).ravel() for state in (one, other))
        pair = found[name]
        assert (pair.count, pair.finite, pair.different) == (a.size, a.size, (a != b).sum())
        assert pair.first == pytest.approx((a**2).sum(), rel=1e-12)
        assert pair.second == pytest.approx((b**2).sum(), rel=1e-12)
        assert pair.difference == pytest.approx(((b - a) ** 2).sum(), rel=1e-9)
        assert pair.dot == pytest.approx((a * b).sum(), rel=1e-12)
        assert pair.largest == pytest.approx(np.abs(b - a).max(initial=0.0), rel=1e-9)
        if a.size:
            assert pair.cosine == pytest.approx((a @ b) / np.sqrt((a @ a) * (b @ b)), rel=1e-12)


def test_all_parameters_together_are_one_vector() -> None:
    one, other = two_states()
    a, b = (np.concatenate([np.asarray(state[name]).ravel() for name in one]).astype(float) for state in (one, other))
    assert astray.state.cosine(one, other) == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-12)
    by_layer = astray.state.cosine(one, other, lw=True)
    assert isinstance(by_layer, astray.state.StateDict)
    assert by_layer["s"] == 1.0
    assert math.isnan(by_layer["none"])
    assert astray.state.cosine(one, -one) == pytest.approx(-1.0, abs=1e-15)
    assert astray.state.cosine(one, other, pattern="[as]") == pytest.approx(
        astray.state.cosine(one.filter("[as]"), other.filter("[as]"))
    )


def test_the_table_has_what_differs_most_in_front() -> None:
    one, other = two_states()
    table = astray.state.diff(one, other)
    assert table["name"] == sorted(one, key=lambda name: -pairs(one, other, [name])[name].relative)
    assert list(table.columns) == ["name", "shape", "norm2", "other", "diff", "relative", "max", "cosine", "changed"]
    row = next(row for row in table if row["name"] == "a")
    difference = torch.as_tensor(other["a"]).double() - torch.as_tensor(one["a"]).double()
    assert row["diff"] == pytest.approx(difference.norm().item(), rel=1e-9)
    assert row["changed"] == 1.0
    assert astray.state.diff(one, other, sort=False)["name"] == list(one)
    assert astray.state.diff(one, one)["relative"] == [0.0] * 4
    assert "other − one" in str(table)


def test_nan_comes_first_and_is_counted() -> None:
    one, other = two_states()
    torch.as_tensor(other["s"]).fill_(math.nan)
    table = astray.state.diff(one, other)
    assert table["name"][0] == "s"
    assert table["non-finite"] == [1, 0, 0, 0]
    assert math.isnan(astray.state.cosine(one, other))


def test_what_only_one_has_and_other_shapes_come_last() -> None:
    one, other = two_states()
    del other["a"]
    other["b"] = torch.ones(9)
    other["new"] = torch.ones(2)
    table = astray.state.diff(one, other)
    unpaired = dict(zip(table["name"], table["unpaired"], strict=True))
    assert unpaired == {
        "s": "",
        "none": "",
        "a": "only in the first",
        "b": "(9,) in the second",
        "new": "only in the second",
    }
    with pytest.raises(StateError, match=r"only in 'one': a; only in 'other': new"):
        astray.state.cosine(one, other)
    with pytest.raises(StateError, match=r"'b' has shape \(3,\) in 'one' and \(9,\) in 'other'"):
        astray.state.cosine(one, other, pattern="b")


def test_pairs_add_up() -> None:
    assert PairSums(2, 2, 1.0, 2.0, 3.0, 4.0, 5.0, 1).plus(PairSums(3, 2, 1.0, 1.0, 1.0, 1.0, 9.0, 2)) == PairSums(
        5, 4, 2.0, 3.0, 4.0, 5.0, 9.0, 3
    )


class Noisy(nn.Module):
    """Its gradients are drawn: of one example with mean 0.1 and variance 1 in each of 50 directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50))

    def draw(self, batch: int) -> astray.state.StateDict:
        self.weight.grad = (0.1 + torch.randn(batch, 50)).mean(0)
        return astray.state.from_grad(self)


@pytest.mark.parametrize("batch", [1, 4])
def test_the_noise_scale_is_the_one_that_gradients_were_drawn_with(batch: int) -> None:
    torch.manual_seed(0)
    model = Noisy()
    found = astray.state.gradient_noise_scale((model.draw(batch) for _ in range(3000)), batch)
    assert found.noise == pytest.approx(50, rel=0.03)
    assert found.signal == pytest.approx(0.5, rel=0.1)
    assert found.scale == found.noise / found.signal
    assert found.batches == 3000


def test_gradients_without_signal_have_an_infinite_scale() -> None:
    one = astray.state.StateDict({"w": torch.tensor([1.0, 0.0])})
    found = astray.state.gradient_noise_scale([one, -one], batch=8)
    assert (found.scale, found.signal, found.noise) == (math.inf, -1.0, 16.0)


def test_noise_needs_two_gradients_of_the_same_parameters() -> None:
    one = astray.state.StateDict({"w": torch.ones(2)})
    with pytest.raises(StateError, match=r"there was 1\. Give those of two batches or more"):
        astray.state.gradient_noise_scale([one], batch=8)
    with pytest.raises(StateError, match="at least one example; got batch=0"):
        astray.state.gradient_noise_scale([one, one], batch=0)
    with pytest.raises(StateError, match="only in 'the first gradient': w"):
        astray.state.gradient_noise_scale([one, astray.state.StateDict({"v": torch.ones(2)})], batch=8)
