"""How far a recorded result is from the exact one, and whether rounding explains it.

Errors are in ulps: the spacing of the dtype's numbers at the larger of the exact element and the root mean square of
its row, since sums that cancel are off by the size of what was summed. Takes results as tensors, returns a `Judgement`.

A result stands out when its largest error, or the root mean square of the errors in one tile, is more than `ROUNDINGS`
explain, where one rounding is as large as the worst of the plain ways to compute it here, and half an ulp at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

HALF_ULP = 0.5
"""The largest error of one correct rounding."""

HALF_ULP_RMS = 1 / math.sqrt(12)
"""The root mean square of one correct rounding: errors are spread evenly over one ulp."""

ROUNDINGS = 4
"""How often a right implementation may round to the dtype of the result where the plain one rounds once: unfused
kernels round between their parts (a softmax its difference, exponential, sum and quotient), and sums split over blocks
round each."""

FUNCTION_ULPS = 2.0
"""What chips allow elementary functions (exp, erf, tanh, division, square root) in float32 and float64. Results of 16
bits are computed in float32 and rounded once, so that this does not show in them."""

SIGMAS = 6.0
"""By how many standard deviations the mean square of a tile may exceed that of many: a run has millions of tiles, and
of normal numbers one in a billion lies further out."""

TILE = 16
"""Rows and columns of a tile: the smallest that matrix units work on. A tile that is wrong has at least one such in it;
and the root mean square of 256 roundings strays by 3 % from that of all."""

ROW = 16
"""Fewer elements than this are no row of their own: one may hold nothing but sums that cancel."""

FLUSHED = frozenset({torch.float32, torch.bfloat16})
"""Dtypes whose subnormal numbers chips flush to zero. In float16 many gradients are subnormal, and are kept."""


class Errors(NamedTuple):
    """The errors of a result in ulps: the largest, the root mean square, that of each tile; and one per element."""

    elements: torch.Tensor
    max: float
    rms: float
    tiles: torch.Tensor


class Judgement(NamedTuple):
    """A result of a call beside the exact one.

    ulps, rms: of the recorded result. plain, plain_rms: of the worst plain way. ratio: `ulps` by `plain`, half an ulp
    at least. tile_ratio: the same of the root mean squares in the worst tile. surprise: how many times as large the
    error is as can be explained; beyond 1 it stands out. at: the index of the worst element. tile: the first and last
    index of rows and columns of the worst tile, with the rows counted through. unequal: how many elements differ, where
    nothing rounds.
    """

    ulps: float
    rms: float
    plain: float
    plain_rms: float
    ratio: float
    tile_ratio: float
    surprise: float
    at: tuple[int, ...]
    tile: tuple[int, int, int, int] | None
    beyond: int
    size: int
    recorded: float | None
    exact: float | None
    unequal: int | None = None


def judge_equal(recorded: torch.Tensor, own: torch.Tensor) -> Judgement:
    """Of integers and booleans: they are equal, or wrong."""
    if not recorded.numel():
        return Judgement(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), None, 0, 0, None, None, 0)
    differs = recorded != own
    unequal = int(differs.sum())
    at = _index(int(differs.flatten().to(torch.uint8).argmax()), tuple(recorded.shape)) if unequal else ()
    wrong = math.inf if unequal else 0.0
    first, second = (float(recorded[at]), float(own[at])) if unequal else (None, None)
    size = recorded.numel()
    return Judgement(wrong, wrong, 0.0, 0.0, wrong, wrong, wrong, at, None, unequal, size, first, second, unequal)


class Scale:
    """The ulps of a result: how far apart the numbers of its dtype are, at each element of the exact one."""

    def __init__(self, exact: torch.Tensor, dtype: torch.dtype) -> None:
        self.exact = _real(exact).to(torch.float64)
        self.dtype = dtype
        info = torch.finfo(dtype)
        self.largest = info.max
        finite = torch.where(self.exact.isfinite(), self.exact, 0.0).abs()
        rows = finite.reshape(_rows(tuple(finite.shape)))
        floor = rows.square().mean(1, keepdim=True).sqrt().expand_as(rows).reshape(finite.shape)
        # A flushed number is off by the smallest normal one: half an ulp, then, is no less than that.
        least = 2 * info.tiny if dtype in FLUSHED else info.tiny * info.eps
        size = torch.maximum(finite, floor).clamp(min=info.tiny)
        self.spacing = torch.ldexp(torch.full_like(finite, info.eps), torch.frexp(size)[1] - 1).clamp_(min=least)

    def errors(self, result: torch.Tensor, own: torch.Tensor) -> Errors:
        """The errors of a result. Where it is not finite they are infinite, unless `own` is the same there."""
        value, own = _real(result).to(torch.float64), _real(own).to(torch.float64)
        errors = (value - self.exact).abs() / self.spacing
        equal = (value == self.exact) | (value.isnan() & self.exact.isnan())
        if not bool(value.isfinite().all()) or not bool(self.exact.isfinite().all()):
            equal |= ~value.isfinite() & ((value == own) | (value.isnan() & own.isnan()))
            equal |= value.isinf() & (value.sign() == self.exact.sign()) & (self.exact.abs() > self.largest)
        errors = torch.where(equal, 0.0, torch.where(errors.isfinite(), errors, math.inf))
        return _summed(errors)


def _summed(errors: torch.Tensor) -> Errors:
    if not errors.numel():
        return Errors(errors, 0.0, 0.0, errors.new_zeros(1, 1))
    tiles = _tiles(errors)
    return Errors(errors, float(errors.max()), float(errors.square().mean().sqrt()), tiles)


def worst(errors: Sequence[Errors]) -> Errors:
    """The errors of several ways together: at each place the largest."""
    if len(errors) == 1:
        return errors[0]
    elements = torch.stack([each.elements for each in errors]).amax(0)
    tiles = torch.stack([each.tiles for each in errors]).amax(0)
    return Errors(elements, max(each.max for each in errors), max(each.rms for each in errors), tiles)


def judge(
    recorded: torch.Tensor, scale: Scale, errors: Errors, plain: Errors, allowance: Errors | None = None
) -> Judgement:
    """The recorded result beside the plain one. allowance: what the order of summation may change besides."""
    if not errors.elements.numel():
        return Judgement(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), None, 0, 0, None, None)
    working = scale.dtype in (torch.float32, torch.float64)
    least, least_rms = HALF_ULP, HALF_ULP_RMS
    explained, explained_rms = (
        max(plain.max, least),
        torch.clamp(torch.clamp(plain.tiles, min=plain.rms), min=least_rms),
    )
    ratio = _divided(errors.max, explained)
    by_tile = torch.where(errors.tiles.isinf(), math.inf, errors.tiles / explained_rms)
    tile_ratio = float(by_tile.max())
    if working:
        explained = max(explained, FUNCTION_ULPS)
        explained_rms = explained_rms.clamp(min=FUNCTION_ULPS * HALF_ULP_RMS / HALF_ULP)
    if allowance is not None:
        explained = max(explained, allowance.max)
        explained_rms = torch.clamp(torch.maximum(explained_rms, allowance.tiles), min=allowance.rms)
    # One element may be off by all roundings at once; of many they add up as their squares do.
    factor = (ROUNDINGS * (1 + SIGMAS * (2 / _tile_sizes(tuple(errors.elements.shape))).sqrt())).sqrt()
    surprises = torch.where(errors.tiles.isinf(), math.inf, errors.tiles / (explained_rms * factor))
    by_element = _divided(errors.max, explained * ROUNDINGS)
    place = int(surprises.argmax())
    limit = explained * ROUNDINGS
    flat = errors.elements.flatten()
    most = int(flat.argmax()) if flat.numel() else 0
    shape = tuple(errors.elements.shape)
    real = _real(recorded).flatten()
    return Judgement(
        errors.max,
        errors.rms,
        plain.max,
        plain.rms,
        ratio,
        tile_ratio,
        max(by_element, float(surprises.max())),
        _index(most, shape),
        _place(place, tuple(surprises.shape), _rows(shape)) if float(surprises.max()) > 1 else None,
        int((errors.elements > limit).sum()),
        flat.numel(),
        float(real[most]) if flat.numel() else None,
        float(scale.exact.flatten()[most]) if flat.numel() else None,
    )


def _divided(error: float, by: float) -> float:
    """A quotient, of which an infinite error stays infinite."""
    return error if math.isinf(error) else error / by if not math.isinf(by) else 0.0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """A shape as rows and columns: the last dimension, with those before it while that is too short."""
    columns = 1
    dims = list(shape)
    while dims and columns < ROW:
        columns *= dims.pop()
    return math.prod(dims), columns


def _tiles(errors: torch.Tensor) -> torch.Tensor:
    """The root mean square of each tile."""
    rows, columns = _rows(tuple(errors.shape))
    down, across = -(-rows // TILE), -(-columns // TILE)
    padded = errors.new_zeros(down * TILE, across * TILE)
    padded[:rows, :columns] = errors.reshape(rows, columns).square()
    sums = padded.reshape(down, TILE, across, TILE).sum((1, 3))
    return (sums / _tile_sizes(tuple(errors.shape))).sqrt()


def _tile_sizes(shape: tuple[int, ...]) -> torch.Tensor:
    """How many elements each tile has; those at the edges have fewer."""
    rows, columns = _rows(shape)
    heights, widths = (
        (size - TILE * torch.arange(-(-size // TILE), dtype=torch.float64)).clamp(max=TILE) for size in (rows, columns)
    )
    return heights[:, None] * widths


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        found.append(rest)
    return tuple(reversed(found))


def _place(tile: int, tiles: tuple[int, ...], rows: tuple[int, int]) -> tuple[int, int, int, int]:
    """Where a tile lies: rows from and to, columns from and to."""
    down, across = divmod(tile, tiles[1])
    return (
        down * TILE,
        min((down + 1) * TILE, rows[0]),
        across * TILE,
        min((across + 1) * TILE, rows[1]),
    )
