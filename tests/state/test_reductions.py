"""Every statistic against float64 numpy, for all elements, for each parameter, filtered and in groups."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import astray
from astray.errors import StateError
from astray.state import StateDict, measuring
from astray.state.measuring import DeviceMeasurements
from astray.state.reductions import REDUCTIONS

Array = np.ndarray[Any, np.dtype[np.float64]]


def central(x: Array, power: int) -> float:
    return float(np.mean((x - x.mean()) ** power))


def standardised(power: int, normal: float) -> Callable[[Array], float]:
    def statistic(x: Array) -> float:
        if not x.size or x.min() == x.max() or not np.isfinite(x).all():
            return math.nan
        return central(x, power) / central(x, 2) ** (power / 2) - normal

    return statistic


def norm(p: float) -> Callable[[Array], float]:
    return lambda x: float(np.linalg.norm(x, p)) if x.size else 0.0


REFERENCE: dict[str, Callable[[Array], float]] = {
    "max": lambda x: float(x.max()) if x.size else math.nan,
    "min": lambda x: float(x.min()) if x.size else math.nan,
    "sum": lambda x: float(x.sum()),
    "mean": lambda x: float(x.mean()),
    "var": lambda x: float(x.var(ddof=1)),
    "std": lambda x: float(x.std(ddof=1)),
    "skew": standardised(3, 0.0),
    "kurtosis": standardised(4, 3.0),
    "norm1": norm(1),
    "norm2": norm(2),
    "norm1_mean": lambda x: float(np.abs(x).mean()),
    "abs_max": lambda x: float(np.abs(x).max()) if x.size else math.nan,
    "abs_min": lambda x: float(np.abs(x).min()) if x.size else math.nan,
}

NORMS = [0, 0.5, 1, 2, 3, 7.5, -1, math.inf, -math.inf]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (1,), (0,), (5,), (3, 4), (2, 3, 7), (40, 30)]
STEADY = settings(deadline=None, derandomize=True, database=None)
SPECIALS = [math.nan, math.inf, -math.inf]


def tensor(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, special: float | None, transposed: bool
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0 ** (seed % 5) + seed % 3
    if not dtype.is_floating_point:
        values = values.abs().floor() if dtype in (torch.uint8, torch.bool) else values.round()
    elif special is not None and values.numel() and dtype != torch.float8_e4m3fn:
        values.view(-1)[seed % values.numel()] = special
    found = values.to(dtype)
    return found.mT if transposed and found.dim() > 1 else found


tensors = st.builds(
    tensor,
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
    st.one_of(st.none(), st.none(), st.sampled_from(SPECIALS)),
    st.booleans(),
)
states = st.lists(tensors, min_size=1, max_size=6).map(
    lambda found: StateDict({f"h.{number % 2}.w{number}": value for number, value in enumerate(found)})
)


def numbers(*values: Any) -> Array:
    return np.concatenate([value.double().contiguous().numpy().ravel() for value in values] or [np.empty(0)])


def check(found: float, statistic: Callable[[Array], float], x: Array) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # numpy warns of what is NaN by definition
        expected = statistic(x)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


ALL = REFERENCE | {f"norm{p:g}": norm(p) for p in NORMS}


@settings(STEADY, max_examples=200)
@given(
    states, st.sampled_from([None, r"h\.0\..*", r".*w[12]"]), st.sampled_from(list(REFERENCE)), st.sampled_from(NORMS)
)
def test_every_reduction_is_numpys(state: StateDict, pattern: str | None, key: str, p: float) -> None:
    names = [name for name in state if pattern is None or re.match(pattern, name)]
    if not names:
        return
    x, parts = numbers(*(state[name] for name in names)), [numbers(state[name]) for name in names]
    whole = state.describe(pattern=pattern, include_keys=list(ALL), display=False)
    layers = state.describe(lw=True, pattern=pattern, include_keys=list(ALL), display=False)
    for column, statistic in ALL.items():
        check(whole[column][0], statistic, x)
        for found, part in zip(layers[column], parts, strict=True):
            check(found, statistic, part)
    check(getattr(state, key)(pattern=pattern), ALL[key], x)
    check(state.norm(p, pattern=pattern), norm(p), x)
    by_name = [getattr(state, key)(lw=True, pattern=pattern), state.norm(p, lw=True, pattern=pattern)]
    assert [list(each) for each in by_name] == [names, names]
    for name, part in zip(names, parts, strict=True):
        check(by_name[0][name], ALL[key], part)
        check(by_name[1][name], norm(p), part)


@settings(STEADY, max_examples=50)
@given(states)
def test_groups_are_reduced_together(state: StateDict) -> None:
    found = state.std(group=r"h\.(\d)\.")
    assert list(found) == [str(layer) for layer in range(min(len(state), 2))]
    for layer, value in found.items():
        members = [state[name] for name in state if name.startswith(f"h.{layer}.")]
        check(value, REFERENCE["std"], numbers(*members))


@settings(STEADY, max_examples=60)
@given(states)
def test_the_way_of_devices_gives_the_same(state: StateDict) -> None:
    """By torch operations, block by block, which run on any device."""
    queue = DeviceMeasurements()
    filled = {name: value for name, value in state.items() if value.numel()}
    for name, value in filled.items():
        queue.add(name, value, (3.0, -1.0))
    found = queue.fetch()
    assert list(found) == list(filled)
    for name, value in filled.items():
        x = numbers(value)
        for key, statistic in REFERENCE.items():
            formula = REDUCTIONS[key].formula
            assert formula is not None
            check(formula(found[name]), statistic, x)


def test_nothing_is_copied_and_large_tensors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from astray.state import mapping

    monkeypatch.setattr(mapping, "BLOCK", 7)
    queue = DeviceMeasurements()
    values = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).t()  # neither whole rows nor contiguous
    queue.add("x", values, ())
    assert queue.fetch()["x"].moments.l2 == pytest.approx(values.double().norm().item(), rel=1e-14)
    parts = list(mapping.blocks(values))
    assert max(part.numel() for part in parts) <= 7
    assert torch.cat(parts).tolist() == values.reshape(-1).tolist()


def test_tensors_for_the_kernel_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a GPU, by a stand-in that gives two rows for each tensor."""
    launches = []

    def measure(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        launches.append(len(tensors))
        halves = [half for tensor in tensors for half in tensor.double().reshape(-1).tensor_split(2)]
        return torch.stack([measuring._row(half, ()) for half in halves]), [2] * len(tensors)

    monkeypatch.setattr(measuring.kernel, "can_measure", lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(measuring.kernel, "measure", measure)
    monkeypatch.setattr(measuring, "HELD_BYTES", 100)
    values = {
        f"w{number}": torch.randn(9 + number, generator=torch.Generator().manual_seed(number)) for number in range(5)
    }
    values["other"] = values["w0"].double()
    queue = DeviceMeasurements()
    for name, value in values.items():
        queue.add(name, value, ())
    found = queue.fetch()
    assert launches == [3, 2]  # what would hold more memory than that is let go of
    for name, value in values.items():
        assert found[name].moments.std(ddof=1) == pytest.approx(value.double().std().item(), rel=1e-12)
        assert found[name].moments.count == value.numel()


def test_one_element_has_no_spread_and_no_warning() -> None:
    state = StateDict({"a": torch.tensor(2.0), "b": torch.tensor([3.0])})
    assert math.isnan(state.std(lw=True)["a"])
    assert math.isnan(state.var(lw=True)["b"])
    assert state.std() == pytest.approx(math.sqrt(0.5))


def test_an_empty_state() -> None:
    state = StateDict()
    assert (state.sum(), state.norm1(), state.norm2(), state.norm(3), state.numel()) == (0.0, 0.0, 0.0, 0.0, 0)
    assert all(math.isnan(getattr(state, key)()) for key in ("max", "min", "mean", "std", "abs_max", "skew"))


def test_sums_are_accumulated_in_float64() -> None:
    state = StateDict({"a": torch.full((1 << 20,), 0.1), "b": torch.full((1 << 12,), 1000.25)})
    assert state.mean(pattern="a") == pytest.approx(float(np.float32(0.1)), rel=1e-15)
    assert state.norm2(pattern="b") == pytest.approx(1000.25 * 64, rel=1e-15)
    assert state.std(pattern="b") == 0.0


def test_complex_numbers_have_magnitudes_only() -> None:
    state = StateDict({"z": torch.tensor([3 + 4j, 0j])})
    assert (state.norm2(), state.norm1(), state.abs_max(), state.norm(3), state.numel()) == (5.0, 5.0, 5.0, 5.0, 2)
    assert math.isnan(state.mean())


def test_extreme_numbers_do_not_leave_the_range() -> None:
    state = StateDict({"a": torch.tensor([3e300, 4e300], dtype=torch.float64), "b": torch.tensor([1e-300, 0.0])})
    assert state.norm(2) == 5e300
    assert state.norm(40) == pytest.approx(4e300, rel=1e-4)


def test_numbers_are_reduced_like_tensors() -> None:
    state = StateDict({"a": 3.0, "b": -4.0})
    assert (state.norm2(), state.sum(), state.numel()) == (5.0, -1.0, 2)


def test_a_reduction_of_your_own() -> None:
    state = StateDict({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 0.0, 2.0])})
    astray.state.register_reduction("sparsity", lambda tensor: (tensor == 0).double().mean())
    try:
        assert state.sparsity() == pytest.approx(0.6)
        assert state.sparsity(lw=True).state_dict() == pytest.approx({"a": 0.5, "b": 2 / 3})
        table = state.describe(lw=True, include_keys=["name", "sparsity", "norm2"], display=False)
        assert table["sparsity"] == pytest.approx([0.5, 2 / 3])
        assert table["norm2"] == [1.0, 2.0]
        astray.state.register_reduction("sparsity", lambda tensor: tensor.no_such_thing())
        with pytest.raises(StateError, match=r"'sparsity' failed for 'a'.*no_such_thing"):
            state.sparsity(lw=True)
    finally:
        del REDUCTIONS["sparsity"]
    with pytest.raises(AttributeError, match=r"no 'sparsity'.*register_reduction"):
        state.sparsity  # noqa: B018


@pytest.mark.parametrize("name", ["std", "clone", "describe", "not a word"])
def test_a_reduction_takes_no_name_that_is_taken(name: str) -> None:
    with pytest.raises(ValueError, match="Choose another"):
        astray.state.register_reduction(name, torch.sum)


def test_what_cannot_be_read_is_named() -> None:
    with torch.device("meta"):
        state = StateDict({"fc.weight": torch.empty(3)})
    with pytest.raises(StateError, match=r"'fc.weight' cannot be read: it is on the meta device.*filter"):
        state.norm2()
    with pytest.raises(StateError, match=r"'x' cannot be read: its layout is sparse_coo.*to_dense"):
        StateDict({"x": torch.eye(2).to_sparse()}).norm2()


def test_a_pattern_that_matches_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match=r"'conv' matches none of 1 name such as 'layer.conv'.*'\.\*'"):
        assert StateDict({"layer.conv": torch.ones(1)}).norm2(pattern="conv") == 0.0
    with pytest.raises(StateError, match="not a regular expression"):
        StateDict({"a": 1.0}).norm2(pattern="(")
