"""How far a recorded result is from the exact one, and whether rounding explains it.

Errors are in ulps: the spacing of the dtype's numbers at the larger of the exact element and the root mean square of
its row, since sums that cancel are off by the size of what was summed. Takes results as tensors, returns a
`ResultJudgement`.

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

CHUNK = 1 << 20
"""Elements whose errors are computed at once: 8 MiB in float64, of which a few fit into the caches."""

_EXPONENT = 0x7FF0_0000_0000_0000
"""The bits of a float64 that hold its exponent: with these alone it is a power of two."""

FLUSHED = frozenset({torch.float32, torch.bfloat16})
"""Dtypes whose subnormal numbers chips flush to zero. In float16 many gradients are subnormal, and are kept."""


class UlpErrors(NamedTuple):
    """The errors of a result in ulps: the largest, the root mean square, that of each tile; and one per element.

    Elements are float32, for the place and the number of large ones; everything else is computed in float64.
    """

    elements: torch.Tensor
    max: float
    rms: float
    tiles: torch.Tensor


class ResultJudgement(NamedTuple):
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


def judge_equal(recorded: torch.Tensor, own: torch.Tensor) -> ResultJudgement:
    """Of integers and booleans: they are equal, or wrong."""
    if not recorded.numel():
        return _EMPTY._replace(unequal=0)
    differs = recorded != own
    unequal = int(differs.sum())
    at = _index(int(differs.flatten().to(torch.uint8).argmax()), tuple(recorded.shape)) if unequal else ()
    wrong = math.inf if unequal else 0.0
    first, second = (float(recorded[at]), float(own[at])) if unequal else (None, None)
    size = recorded.numel()
    return ResultJudgement(wrong, wrong, 0.0, 0.0, wrong, wrong, wrong, at, None, unequal, size, first, second, unequal)


class Scale:
    """The ulps of a result: how far apart the numbers of its dtype are, at each element of the exact one."""

    def __init__(self, exact: torch.Tensor, dtype: torch.dtype) -> None:
        self.exact = _real(exact)
        self.dtype = dtype
        info = torch.finfo(dtype)
        self._eps, self._tiny, self._largest = info.eps, info.tiny, info.max
        # A flushed number is off by the smallest normal one: half an ulp, then, is no less than that.
        self._least = 2 * info.tiny if dtype in FLUSHED else info.tiny * info.eps

    def errors(self, result: torch.Tensor, own: torch.Tensor) -> UlpErrors:
        """The errors of a result. Where it is not finite they are infinite, unless `own` is the same there."""
        shape = tuple(self.exact.shape)
        size = _rows(shape)
        exact, value, own = (_real(each).reshape(size) for each in (self.exact, result, own))
        elements = torch.empty(size, dtype=torch.float32)
        squares = torch.empty(_tile_count(shape), dtype=torch.float64)
        largest = 0.0
        height = max(CHUNK // max(size[1], 1) // TILE, 1) * TILE
        for begin in range(0, size[0], height):
            rows = slice(begin, begin + height)
            errors = self._of_rows(exact[rows], value[rows], own[rows])
            elements[rows] = errors
            if errors.numel():
                largest = max(largest, float(errors.max()))
                squares[begin // TILE : -(-(begin + height) // TILE)] = _sums(errors.square_())
        mean = float(squares.sum()) / elements.numel() if elements.numel() else 0.0
        return UlpErrors(elements.reshape(shape), largest, math.sqrt(mean), (squares / _tile_sizes(shape)).sqrt_())

    def _of_rows(self, exact: torch.Tensor, value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        exact, value = exact.to(torch.float64), value.to(torch.float64)
        errors = (value - exact).abs_()
        if math.isfinite(float(exact.sum()) + float(value.sum())):
            return errors.div_(self._spacing(exact))
        errors /= self._spacing(torch.where(exact.isfinite(), exact, 0.0))
        own = own.to(torch.float64)
        equal = (value == exact) | (value.isnan() & exact.isnan())
        equal |= ~value.isfinite() & ((value == own) | (value.isnan() & own.isnan()))
        equal |= value.isinf() & (value.sign() == exact.sign()) & (exact.abs() > self._largest)
        return torch.where(equal, 0.0, torch.where(errors.isfinite(), errors, math.inf))

    def _spacing(self, exact: torch.Tensor) -> torch.Tensor:
        """How far apart numbers are at these: as many bits below the largest power of two that is in them."""
        size = exact.abs()
        typical = size.square().mean(1, keepdim=True).sqrt_()
        size = torch.maximum(size, typical).clamp_(min=self._tiny)
        powers = size.view(torch.int64).bitwise_and_(_EXPONENT).view(torch.float64)
        return powers.mul_(self._eps).clamp_(min=self._least)


def worst(errors: Sequence[UlpErrors]) -> UlpErrors:
    """The errors of several ways together: for each tile the largest."""
    tiles = torch.stack([each.tiles for each in errors]).amax(0)
    return UlpErrors(errors[0].elements, max(each.max for each in errors), max(each.rms for each in errors), tiles)


def judge(
    recorded: torch.Tensor, scale: Scale, errors: UlpErrors, plain: UlpErrors, allowance: UlpErrors | None = None
) -> ResultJudgement:
    """The recorded result beside the plain one. allowance: what the order of summation may change besides."""
    if not errors.elements.numel():
        return _EMPTY
    shape = tuple(errors.elements.shape)
    limit, limits = _limits(scale.dtype, shape, plain, allowance)
    surprises = _by_tile(errors, limits)
    surprise = float(surprises.max())
    worst_tile = _place(int(surprises.argmax()), tuple(surprises.shape), _rows(shape)) if surprise > 1 else None
    most = int(errors.elements.argmax())
    return ResultJudgement(
        errors.max,
        errors.rms,
        plain.max,
        plain.rms,
        _divided(errors.max, max(plain.max, HALF_ULP)),
        float(_by_tile(errors, plain.tiles.clamp(min=max(plain.rms, HALF_ULP_RMS))).max()),
        max(_divided(errors.max, limit), surprise),
        _index(most, shape),
        worst_tile,
        int((errors.elements > limit).sum()),
        errors.elements.numel(),
        float(_real(recorded).reshape(-1)[most]),
        float(scale.exact.reshape(-1)[most]),
    )


_EMPTY = ResultJudgement(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (), None, 0, 0, None, None)


def _limits(
    dtype: torch.dtype, shape: tuple[int, ...], plain: UlpErrors, allowance: UlpErrors | None
) -> tuple[float, torch.Tensor]:
    """How far off an element may be, and the root mean square of each tile: so many roundings, each as large as the
    plain result has, or as is allowed.

    One element may be off by all of them at once; of many elements they add up as their squares do.
    """
    adds_in_it = dtype in (torch.float32, torch.float64)
    least = FUNCTION_ULPS if adds_in_it else HALF_ULP
    rounding = max(plain.max, least)
    # A sum that is added up in the dtype of the result has one error for all elements that are made of it, such as
    # those of a channel: a tile may have drawn it as large as the worst of them.
    usual = float(plain.tiles.max()) if adds_in_it else plain.rms
    roundings = plain.tiles.clamp(min=max(usual, least * HALF_ULP_RMS / HALF_ULP))
    if allowance is not None:
        rounding = max(rounding, allowance.max)
        roundings = torch.maximum(roundings, allowance.tiles).clamp_(min=allowance.rms)
    chance = 1 + SIGMAS * (2 / _tile_sizes(shape)).sqrt()
    return rounding * ROUNDINGS, roundings * (ROUNDINGS * chance).sqrt()


def _by_tile(errors: UlpErrors, limits: torch.Tensor) -> torch.Tensor:
    return torch.where(errors.tiles.isinf(), math.inf, errors.tiles / limits)


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


def _sums(squares: torch.Tensor) -> torch.Tensor:
    """The sum over each tile."""
    rows, columns = squares.shape
    down, across = -(-rows // TILE), -(-columns // TILE)
    if (rows, columns) != (down * TILE, across * TILE):
        padded = squares.new_zeros(down * TILE, across * TILE)
        padded[:rows, :columns] = squares
        squares = padded
    return squares.reshape(down, TILE, across, TILE).sum((1, 3))


def _tile_count(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = _rows(shape)
    return -(-rows // TILE), -(-columns // TILE)


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
