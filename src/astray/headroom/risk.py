"""How close the numbers of a run come to trouble: for each place in the program, the worst over all steps and ranks.

Reads the statistics of a run (no values) and returns a `Risk`, a table with the places in trouble first. `judge`
decides what is trouble, `in_dtype` computes the same for another dtype; docs/guides/risk.md has every column, with what
is exact, what is a bound and what is an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import UsageError
from astray.headroom.dtype_limits import DtypeLimits, limits, targets
from astray.headroom.measures import PlaceMeasures, ShareBelow, ShareBounds, at_least, lost, measure
from astray.headroom.motion import WeightMotion
from astray.headroom.observations import Floats, Ints, Observations, SkippedRows, StatisticColumns
from astray.steps import StepSelection
from astray.store import DictionaryColumn, RunData, Table
from astray.store.arrow import PIECE_ROWS, batch_of, schema_of, stream_of
from astray.store.columns import BoolArray, Column


class Risk:
    """The places of a run, those in trouble first.

    >>> risk = astray.open("runs/a").risk(what_if="float16")
    >>> risk
    <Risk of runs/a: 1 non-finite, 2 overflow, 3 tight, 210 calm>
    >>> print(risk)                                 # as `astray show RUN --risk` shows it
    >>> pyarrow.table(risk), polars.DataFrame(risk) # every column of `astray help risk`

    table: one row per place.
    left_out: which tensors say nothing about head-room, and how many.
    targets: the dtypes of `what_if`; `loss_scales` has for each the scale for all gradients (NaN where there are none).
    """

    def __init__(
        self,
        run: RunData,
        table: Table,
        left_out: SkippedRows,
        targets: list[DtypeLimits],
        loss_scales: dict[str, float],
    ) -> None:
        self.run = run
        self.table = table
        self.left_out = left_out
        self.targets = targets
        self.loss_scales = loss_scales

    @property
    def counts(self) -> dict[str, int]:
        """How many places are of each level, the worst level first; every level is there."""
        counts = np.bincount(self.table.coded("risk").codes, minlength=len(LEVELS)).tolist()
        return dict(zip(LEVELS, counts, strict=True))

    def __len__(self) -> int:
        return len(self.table)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        columns = self.table.columns
        schema = schema_of(columns)
        pieces = []
        for begin in range(0, len(self), PIECE_ROWS):
            part = self.table.take(slice(begin, begin + PIECE_ROWS)).columns.values()
            pieces.append(batch_of(schema, len(next(iter(part))), [(column, _known(column)) for column in part]))
        return stream_of(schema, pieces, requested_schema)

    def __str__(self) -> str:
        from astray.headroom.report import render  # imports this module

        return render(self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count:,} {level}" for level, count in self.counts.items() if count)
        return f"<Risk of {self.run.path}: {counts or 'no tensor'}>"


def risk(
    run: RunData,
    *,
    steps: str | int | Sequence[int] | StepSelection | None = None,
    ranks: Sequence[int] | None = None,
    what_if: str | Iterable[str] = (),
) -> Risk:
    """How close the numbers of a run come to trouble, over these steps and ranks (all by default).

    steps: such as "0:10:2" or [3, 7], as `astray compare` takes them.
    what_if: other dtypes to compute it for, such as "float16" or ["bfloat16", "float8_e4m3fn"].
    """
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing:
        raise UsageError(f"{run.path} has no rank {missing[0]}. It has {', '.join(map(str, run.ranks))}.")
    target_dtypes = targets(what_if)
    observations = Observations(run, StepSelection.parse(steps), ranks)
    if not len(observations):
        return Risk(
            run,
            Table({"risk": DictionaryColumn(np.zeros(0, np.int32), list(LEVELS))}),
            observations.left_out,
            target_dtypes,
            {},
        )
    measured = measure(observations)
    judged = judge(measured.columns)
    columns = {"risk": judged.level, "cause": judged.cause} | measured.columns
    columns["tensor"] = _tensors(observations, measured.row, judged.level.codes)
    converted = [in_dtype(observations, measured, target) for target in target_dtypes]
    for what_if_columns in converted:
        columns |= what_if_columns.columns()
    order = np.lexsort((judged.severity, judged.level.codes))
    scales = {each.limits.name: each.loss_scale for each in converted}
    return Risk(run, Table(columns).take(order), observations.left_out, target_dtypes, scales)


def _tensors(observations: Observations, row: Ints, levels: npt.NDArray[np.int32]) -> Ints:
    """One number for all places whose worst tensor is the same: an output of one call is an input of another.

    The same tensor has the same value, in the same step of the same rank, with as many elements: a slice is another
    tensor. Places with different levels have different numbers.
    """
    at = observations.numbers
    identity = [*(at[name][row] for name in ("value", "rank", "step", "count")), levels]
    keys = np.stack([column.astype(np.int64) for column in identity])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _known(column: Column) -> BoolArray:
    """Where a column has a value; in a column of floats NaN is null."""
    if isinstance(column, DictionaryColumn):
        return column.codes >= 0
    return ~np.isnan(column) if column.dtype.kind == "f" else np.ones(len(column), np.bool_)


# -- levels: what is trouble -------------------------------------------------------------------------------------------


LEVELS = ("non-finite", "overflow", "stuck", "underflow", "tight", "calm")
CAUSES = ("non-finite", "head-room", "growth", "limit", "unmoved", "subnormal", "zeros")

NEAR, TIGHT = 1.0, 4.0
"""Powers of two of head-room: numbers twice as large would overflow; one spike may bring sixteen times as large."""

MOST, HALF, SOME = 0.9, 0.5, 0.01
"""Shares: 90 % of the elements do not move; half of them do not, or are subnormal; one in a hundred is subnormal."""


class LevelColumns(NamedTuple):
    """For each place its level, the cause (null where it is calm), and a number that grows as it gets less severe."""

    level: DictionaryColumn[str]
    cause: DictionaryColumn[str]
    severity: npt.NDArray[np.float64]


class NearLimit(NamedTuple):
    """Which tensors are close to the largest number of their dtype."""

    near: npt.NDArray[np.bool_]  # less than `NEAR` bits of head-room
    few: npt.NDArray[np.bool_]  # less than `TIGHT` bits, or at the limit
    limit: npt.NDArray[np.bool_]  # exactly at the largest number, on purpose


def near_limit(bits: npt.NDArray[np.float64], limit: npt.NDArray[np.bool_], coarse: npt.NDArray[np.bool_]) -> NearLimit:
    """From head-room in powers of two (infinite where it is not known), and what is exactly its dtype's largest number.

    Arithmetic that overflows gives infinity. So the largest number itself is there on purpose: a mask, a clamp, or for
    8-bit floats a scale that fills the range, for which little head-room is normal.
    """
    near = (bits < np.where(coarse, 0.0, NEAR)) & ~limit
    return NearLimit(near, limit | (bits < np.where(coarse, NEAR, TIGHT)), limit)


def judge(columns: dict[str, Any]) -> LevelColumns:
    """The level of each place, from what was measured of it. The first rule that fits decides."""
    bits, kinds = np.nan_to_num(columns["headroom_bits"], nan=np.inf), columns["dtype"]
    ends = [limits(str(name)) for name in kinds]
    coarse = np.array([end is not None and end.coarse for end in ends])
    narrow = np.array([end is not None and end.narrow for end in ends])
    backward = columns["phase"].codes == columns["phase"].code("backward")
    room = near_limit(bits, columns["absmax"] == columns["largest"], coarse)
    # Elements without a gradient, such as the rows of an embedding that were not looked up, have no reason to move.
    stuck = np.nan_to_num(columns["unmoved_with_gradient"], nan=columns["unmoved"] == 1)
    # Where only whole weights can be told apart, one step may be a skipped or a warming-up one.
    stuck = np.where(np.isnan(columns["update_ratio"]) & (columns["watched_steps"] < 2), np.minimum(stuck, HALF), stuck)
    small = columns["subnormal_least"]
    soon = columns["gone_latest"] <= columns["steps"]
    rules = [
        ("non-finite", "non-finite", columns["nonfinite"] > 0),
        ("overflow", "head-room", room.near),
        ("overflow", "growth", soon & ~room.limit & ~coarse),
        ("stuck", "unmoved", stuck >= MOST),
        ("underflow", "subnormal", small >= HALF),
        ("tight", "limit", room.limit),
        ("tight", "head-room", room.few),
        ("tight", "growth", np.isfinite(columns["gone_soonest"]) & ~coarse),
        ("tight", "unmoved", stuck >= HALF),
        ("tight", "subnormal", small >= SOME),
        ("tight", "zeros", (columns["zeros"] == 1) & narrow & backward),
    ]
    masks = [mask for _, _, mask in rules]
    level = np.select(masks, [LEVELS.index(name) for name, _, _ in rules], len(LEVELS) - 1)
    cause = np.select(masks, [CAUSES.index(name) for _, name, _ in rules], -1)
    severity = np.select(
        [level == LEVELS.index(name) for name in ("non-finite", "stuck", "underflow")],
        [columns["step"].astype(np.float64), -stuck, -small],
        bits,
    )
    return LevelColumns(
        DictionaryColumn(level.astype(np.int32), list(LEVELS)),
        DictionaryColumn(cause.astype(np.int32), list(CAUSES)),
        severity,
    )


# -- the same places in another dtype ----------------------------------------------------------------------------------


class WhatIf(NamedTuple):
    """The places of a run in another dtype, from their statistics alone.

    Overflow is exact: the largest magnitude is known. What would be lost at the bottom is bounded. A scale that would
    help is a power of two: one for all gradients, the largest without overflow, which is where `GradScaler` settles; or
    for an 8-bit dtype one for each place, by its largest magnitude over all steps.
    """

    limits: DtypeLimits
    overflows: npt.NDArray[np.bool_]
    overflow_share: ShareBounds  # of non-zero values, in the row with the largest magnitude
    bits: Floats  # head-room in powers of two, negative where it overflows; NaN where all values are zero
    flushed: ShareBelow  # what would become zero
    subnormal: ShareBelow  # what would lose digits, or become zero
    scale: Floats  # a power of two that would help; NaN where none is applied
    flushed_scaled: ShareBelow
    unmoved_least: Floats  # share of a weight's elements that would not have moved in its last recorded update
    unmoved_estimate: Floats
    loss_scale: float  # the one for all gradients; NaN where there are none

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of a table, each with the dtype at the end of its name."""
        columns = {
            "overflows": self.overflows,
            "overflow_least": self.overflow_share.least,
            "overflow_most": self.overflow_share.most,
            "headroom_bits": self.bits,
            **self.flushed.columns("flushed"),
            **self.subnormal.columns("subnormal"),
            "scale": self.scale,
            **self.flushed_scaled.columns("scaled_flushed"),
            "unmoved_least": self.unmoved_least,
            "unmoved_estimate": self.unmoved_estimate,
        }
        return {f"{name}_{self.limits.name}": column for name, column in columns.items()}


def in_dtype(observations: Observations, measured: PlaceMeasures, target: DtypeLimits) -> WhatIf:
    """Every place of a run in the target dtype."""
    values, worst = measured.values, measured.largest_row
    largest = values.absmax[worst]
    with np.errstate(divide="ignore", over="ignore"):
        bits = np.where(largest > 0, np.log2(target.largest) - np.log2(largest), np.nan)
    vanishes = np.nextafter(target.vanishes, np.inf)
    gradients = _gradients(observations) & (largest > 0)
    loss_scale = float(power_of_two(target, largest[gradients].max(keepdims=True))[0]) if gradients.any() else np.nan
    # An 8-bit dtype is used with a scale for each tensor.
    scale = power_of_two(target, largest) if target.coarse else np.where(gradients, loss_scale, np.nan)
    applied = np.nan_to_num(scale, nan=1.0)[observations.place]
    return WhatIf(
        target,
        largest >= target.overflows,
        at_least(values.take(worst), target.overflows),
        bits,
        lost(observations, values, vanishes),
        lost(observations, values, target.tiny),
        scale,
        lost(observations, values, vanishes / applied),
        *_unmoved(values, measured.moving, 2 * measured.columns["half_ulp"], target),
        loss_scale,
    )


def power_of_two(target: DtypeLimits, largest: Floats) -> Floats:
    """The largest power of two by which these magnitudes can be multiplied without overflow; NaN for zero."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent = np.floor(np.log2(target.largest) - np.log2(largest))
        scale = np.exp2(exponent)
        # The logarithm is rounded: one up if that still fits, one down if it does not.
        scale = np.where(largest * scale * 2 < target.overflows, scale * 2, scale)
        scale = np.where(largest * scale >= target.overflows, scale / 2, scale)
    return np.where((largest > 0) & np.isfinite(scale), scale, np.nan)


def _unmoved(values: StatisticColumns, moving: WeightMotion, eps: Floats, target: DtypeLimits) -> tuple[Floats, Floats]:
    """Of each weight whose update was recorded, how many elements would not have moved: at least, and by estimate.

    An element stays when what is added is less than half the distance to its next number, which is between a quarter
    and half of ε of it. So those at least 4/ε times as large as the largest update certainly stay. The estimate takes
    weights and updates for normal and independent: |update/weight| is below c in (2/π)·arctan(c·σw/σu) of all cases.
    Half a distance is on average 0.36 ε of a number whose digits are spread evenly on a logarithmic scale.

    Only of weights whose recorded dtype is finer: the update of a coarser one lacks what did not move.
    """
    known = (moving.update_row >= 0) & (eps < target.eps)
    weight, update = values.take(np.maximum(moving.weight_row, 0)), values.take(np.maximum(moving.update_row, 0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        still = 1 - update.nonzero / update.finite  # these do not move in the recorded dtype either
        certain = at_least(weight, 4 / target.eps * (1 + target.eps) * update.absmax).least
        least = np.maximum(still, certain * weight.nonzero / weight.finite)
        sizes = (weight.l2 / np.sqrt(weight.nonzero)) / (update.l2 / np.sqrt(update.nonzero))
        estimate = still + (1 - still) * 2 / np.pi * np.arctan(0.36 * target.eps * sizes)
        estimate = np.where(update.nonzero > 0, np.maximum(estimate, least), 1.0)
    return np.where(known, least, np.nan), np.where(known, estimate, np.nan)


def _gradients(observations: Observations) -> npt.NDArray[np.bool_]:
    """Which places hold gradients. Not those of operators of the backward pass, which take weights too."""
    backward = observations.where(phase="backward") & ~observations.where(kind="op")
    return backward[observations.first]
