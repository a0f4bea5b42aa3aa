"""Tensors in pieces, each side cut in its own way."""

from __future__ import annotations

import numpy as np
import pytest

from astray.comparison.measure.pieces import Pieces, contrast_pieces, stretches
from astray.stats.kernels import Strided, contrast

WHOLE = np.arange(48, dtype=np.float32).reshape(8, 3, 2)


def pieces(tensor: np.ndarray, *cuts: int, dim: int = 0) -> Pieces:
    return Pieces(dim, np.split(tensor, cuts, axis=dim))


def test_stretches_lie_in_one_part_on_both_sides():
    found = list(stretches(pieces(WHOLE, 2, 4, 6), pieces(WHOLE, 3)))
    assert [len(here) for here, _ in found] == [2, 1, 1, 2, 2]
    assert np.array_equal(np.concatenate([here for here, _ in found]), WHOLE)
    assert all(np.array_equal(here, there) for here, there in found)
    assert all(np.shares_memory(here, WHOLE) for here, _ in found)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_pieces_are_compared_like_the_whole(dim):
    other = WHOLE.copy()
    other[5, 1, 1] += 3
    found, equal = contrast_pieces(pieces(WHOLE, 1, dim=dim), Pieces(dim, [other]), ("float32", "float32"))
    whole = contrast(Strided.from_numpy(WHOLE), Strided.from_numpy(other))
    assert (found.different, found.max_abs_error, found.count) == (1, 3.0, 48)
    assert found.l2_error == pytest.approx(whole.l2_error)
    assert not equal
    assert contrast_pieces(pieces(WHOLE, 1, dim=dim), Pieces(dim, [WHOLE]), ("float32", "float32"))[1]


def test_bits_count_and_not_only_values():
    zero = Pieces(0, [np.zeros(2, np.float32)])
    minus = Pieces(0, [np.full(1, -0.0, np.float32), np.zeros(1, np.float32)])
    found, equal = contrast_pieces(zero, minus, ("float32", "float32"))
    assert (found.different, equal) == (0, False)


def test_empty_parts_take_no_place():
    found, equal = contrast_pieces(pieces(WHOLE, 0, 4), Pieces(0, [WHOLE]), ("float32", "float32"))
    assert (found.count, equal) == (48, True)


def test_samples_that_lie_inside_another_dimension():
    time, width = 5, 3
    batch = np.random.default_rng(1).normal(size=(time, 8, width)).astype(np.float32)
    cut = [part.reshape(-1, width) for part in np.split(batch, [2, 5], axis=1)]
    parts = Pieces(0, cut, (2, 3, 3)).samples_last()
    whole = Pieces(0, [batch.reshape(-1, width)], (8,)).samples_last()
    assert parts is not None
    assert whole is not None
    assert parts.fits(whole)
    assert contrast_pieces(parts, whole, ("float32", "float32"))[1]
    assert np.array_equal(parts.whole, batch)


@pytest.mark.parametrize("samples", [(), (2, 2), (2, 0, 3), (10, 15, 15), (2, 3, 5), (4, 3, 3)], ids=str)
def test_sizes_that_tell_no_inner_dimension(samples):
    parts = [np.ones((rows, 3), np.float32) for rows in (10, 15, 15)]
    assert Pieces(0, parts, samples).samples_last() is None


def test_only_pieces_of_one_shape_fit():
    assert pieces(WHOLE, 2).fits(Pieces(0, [WHOLE]))
    assert not pieces(WHOLE, 2).fits(Pieces(0, [WHOLE[:7]]))
    assert not pieces(WHOLE, 2).fits(Pieces(0, [WHOLE[:, :2]]))
    assert not pieces(WHOLE, 2).fits(Pieces(0, [WHOLE[..., 0]]))
