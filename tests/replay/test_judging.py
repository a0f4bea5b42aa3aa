"""UlpErrors in ulps and in tiles, against the same written plainly in float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from astray.replay.judging import CHUNK, ROUNDINGS, ResultJudgement, Scale, UlpErrors, judge, judge_equal, worst

EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
TINY = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14, torch.float32: 2.0**-126, torch.float64: 2.0**-1022}


def plain_errors(exact: torch.Tensor, result: torch.Tensor) -> np.ndarray:
    """Of matrices: the distance over the spacing at the larger of the element and the root mean square of its row."""
    true, value = exact.numpy(), result.double().numpy()
    typical = np.sqrt((true**2).mean(1, keepdims=True))
    size = np.maximum(np.maximum(np.abs(true), typical), TINY[result.dtype])
    spacing = EPS[result.dtype] * 2.0 ** np.floor(np.log2(size))
    return np.abs(value - true) / spacing


def judged(exact: torch.Tensor, result: torch.Tensor) -> ResultJudgement:
    """Beside a result that is rounded once."""
    scale = Scale(exact, result.dtype)
    own = exact.to(result.dtype)
    return judge(result, scale, scale.errors(result, own), scale.errors(own, own))


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("shape", [(40, 50), (1, 17), (300, 16), (16, 16)])
def test_errors_are_those_of_a_plain_computation(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    exact = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    result = (exact * (1 + EPS[dtype] * torch.linspace(-5, 5, shape[1]))).to(dtype)
    errors, plain = Scale(exact, dtype).errors(result, result), plain_errors(exact, result)
    assert errors.max == pytest.approx(plain.max(), rel=1e-12)
    assert errors.rms == pytest.approx(np.sqrt((plain**2).mean()), rel=1e-12)
    np.testing.assert_allclose(errors.elements.numpy(), plain, rtol=1e-6)
    for row in range(errors.tiles.shape[0]):
        for column in range(errors.tiles.shape[1]):
            tile = plain[16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            assert float(errors.tiles[row, column]) == pytest.approx(np.sqrt((tile**2).mean()), rel=1e-12)


def test_a_result_in_several_pieces_has_the_same_errors() -> None:
    rows = CHUNK // 64 + 40
    exact = torch.randn(rows, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result = exact.bfloat16()
    result[-1, 5] += 1
    errors, plain = Scale(exact, torch.bfloat16).errors(result, result), plain_errors(exact, result)
    assert errors.max == pytest.approx(plain.max())
    assert int(errors.elements.argmax()) == (rows - 1) * 64 + 5
    assert errors.rms == pytest.approx(np.sqrt((plain**2).mean()))
    assert errors.tiles.shape == (-(-rows // 16), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_rounding_is_half_an_ulp_and_explained(dtype: torch.dtype) -> None:
    exact = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = judged(exact, exact.to(dtype))
    assert 0.4 < found.ulps <= 0.5
    assert found.ratio == pytest.approx(found.ulps / 0.5)
    assert found.surprise < 1
    assert found.beyond == 0


def test_a_sum_that_cancels_is_measured_by_the_size_of_what_was_summed() -> None:
    exact = torch.full((1, 64), 1000.0, dtype=torch.float64)
    exact[0, 3] = 1e-6
    result = exact.float()
    result[0, 3] += 1000 * 2.0**-23
    assert Scale(exact, torch.float32).errors(result, result).max == pytest.approx(2.0, rel=0.3)


def test_a_tile_that_is_off_by_little_stands_out_though_no_element_does() -> None:
    exact = 1 + torch.rand(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / 2
    result = exact.bfloat16()
    tile = (slice(16, 32), slice(32, 48))
    result[tile] = (exact[tile] + 1.4 * EPS[torch.bfloat16]).bfloat16()
    found = judged(exact, result)
    assert found.ulps < 0.5 * ROUNDINGS
    assert found.beyond == 0
    assert found.surprise > 1
    assert found.tile == (16, 32, 32, 48)


def test_what_is_not_finite_is_infinitely_off_unless_it_should_not_be() -> None:
    exact = torch.tensor([[1.0, math.inf, math.nan, 1e6, 2.0]], dtype=torch.float64)
    own = exact.half()
    right = Scale(exact, torch.float16).errors(own, own)
    assert right.max == 0  # 1e6 is beyond float16
    wrong = own.clone()
    wrong[0, 0] = math.inf
    assert Scale(exact, torch.float16).errors(wrong, own).max == math.inf
    found = judged(exact, wrong)
    assert found.surprise == math.inf
    assert found.at == (0, 0)


def test_a_flushed_subnormal_number_is_half_an_ulp() -> None:
    exact = torch.full((1, 16), 2.0**-130, dtype=torch.float64)
    assert Scale(exact, torch.bfloat16).errors(torch.zeros(1, 16).bfloat16(), exact.bfloat16()).max <= 0.5


def test_integers_and_booleans_are_equal_or_wrong() -> None:
    right = torch.arange(12).reshape(3, 4)
    assert judge_equal(right, right).surprise == 0
    wrong = right.clone()
    wrong[1, 2] = 99
    found = judge_equal(wrong, right)
    assert (found.surprise, found.unequal, found.at, found.recorded, found.exact) == (math.inf, 1, (1, 2), 99, 6)
    assert judge_equal(right > 5, right > 5).unequal == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 16)])
def test_without_elements_nothing_is_off(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape, dtype=torch.float64)
    assert judged(empty, empty.float()).surprise == 0
    assert judge_equal(empty.long(), empty.long()).surprise == 0


def test_scalars_and_complex_numbers() -> None:
    exact = torch.tensor(1 / 3, dtype=torch.float64)
    assert judged(exact, exact.float()).surprise < 1
    assert judged(exact, exact.float() * 1.01).surprise > 1
    numbers = torch.randn(8, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(4))
    scale = Scale(numbers, torch.float32)
    rounded = numbers.to(torch.complex64)
    assert scale.errors(rounded, rounded).max <= 0.5


def test_of_several_plain_results_the_worst_counts() -> None:
    few = UlpErrors(torch.zeros(1), 1.0, 0.5, torch.tensor([[1.0, 0.0]]))
    many = UlpErrors(torch.zeros(1), 2.0, 0.25, torch.tensor([[0.5, 3.0]]))
    both = worst([few, many])
    assert (both.max, both.rms, both.tiles.tolist()) == (2.0, 0.5, [[1.0, 3.0]])
