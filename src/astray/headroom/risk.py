"""How close the numbers of a run come to trouble: for each place in the program, the worst over all steps and ranks.

Reads the statistics of a run (no values) and gives a `Risk`, a table with the places in trouble first. `levels`
decides what is trouble; docs/guides/risk.md has every column: what is exact, a bound, an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.errors import UsageError
from astray.headroom.dtype_limits import DtypeLimits, limits, targets
from astray.headroom.measures import measure
from astray.headroom.observations import LeftOut, Observations
from astray.headroom.what_if import imagine
from astray.steps import StepSelection
from astray.store import DictionaryColumn, RunData, Table
from astray.store.arrow import PIECE_ROWS, batch_of, schema_of, stream_of
from astray.store.columns import BoolArray, Column

Ints = npt.NDArray[np.int64]


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
        self, run: RunData, table: Table, left_out: LeftOut, targets: list[DtypeLimits], loss_scales: dict[str, float]
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
        from astray.headroom.report import render  # reports stand on what they render, so they are fetched only here

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
    """How close the numbers of a run come to trouble, over the steps and ranks asked for (all by default).

    steps: such as "0:10:2" or [3, 7], as `astray compare` takes them.
    what_if: dtypes to imagine the tensors in, such as "float16" or ["bfloat16", "float8_e4m3fn"].
    """
    missing = sorted(set(ranks or ()) - set(run.ranks))
    if missing:
        raise UsageError(f"{run.path} has no rank {missing[0]}. It has {', '.join(map(str, run.ranks))}.")
    wanted = targets(what_if)
    seen = Observations(run, StepSelection.parse(steps), ranks)
    if not len(seen):
        return Risk(
            run, Table({"risk": DictionaryColumn(np.zeros(0, np.int32), list(LEVELS))}), seen.left_out, wanted, {}
        )
    measured = measure(seen)
    judged = judge(measured.columns)
    columns = {"risk": judged.level, "cause": judged.cause} | measured.columns
    columns["tensor"] = _tensors(seen, measured.row, judged.level.codes)
    imagined = [imagine(seen, measured, target) for target in wanted]
    for other in imagined:
        columns |= other.columns()
    order = np.lexsort((judged.severity, judged.level.codes))
    scales = {other.limits.name: other.loss_scale for other in imagined}
    return Risk(run, Table(columns).take(order), seen.left_out, wanted, scales)


def _tensors(seen: Observations, row: Ints, levels: npt.NDArray[np.int32]) -> Ints:
    """One number for all places whose worst tensor is the same: what is one call's output is another's input.

    The same tensor shows the same value, in the same step of the same rank, with as many elements: a slice is another.
    One that is in more trouble at one place stands for itself alone.
    """
    at = seen.numbers
    same = [*(at[name][row] for name in ("value", "rank", "step", "count")), levels]
    keys = np.stack([column.astype(np.int64) for column in same])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _known(column: Column) -> BoolArray:
    """Where a column has a value: null is NaN in a column of floats."""
    if isinstance(column, DictionaryColumn):
        return column.codes >= 0
    return ~np.isnan(column) if column.dtype.kind == "f" else np.ones(len(column), np.bool_)


# -- levels: what is trouble -------------------------------------------------------------------------------------------


LEVELS = ("non-finite", "overflow", "stuck", "underflow", "tight", "calm")
CAUSES = ("non-finite", "head-room", "growth", "limit", "unmoved", "subnormal", "zeros")

NEAR, TIGHT = 1.0, 4.0
"""Powers of two of head-room: a batch twice as unlucky would overflow; sixteen times is what one spike may bring."""

MOST, HALF, SOME = 0.9, 0.5, 0.01
"""Shares: nearly all elements do not move; half of them do not, or are subnormal; one in a hundred is."""


class LevelColumns(NamedTuple):
    """For each place its level, the cause (null where it is calm), and a number that grows as it gets less severe."""

    level: DictionaryColumn[str]
    cause: DictionaryColumn[str]
    severity: npt.NDArray[np.float64]


class NearLimit(NamedTuple):
    """Which tensors are close to the end of their dtype, and which are there on purpose."""

    near: npt.NDArray[np.bool_]
    few: npt.NDArray[np.bool_]
    limit: npt.NDArray[np.bool_]


def room_of(bits: npt.NDArray[np.float64], limit: npt.NDArray[np.bool_], coarse: npt.NDArray[np.bool_]) -> NearLimit:
    """From head-room in powers of two (infinite where it is not known), and what is exactly at its dtype's largest.

    Arithmetic that goes too far gives infinity. What is exactly the largest number was put there: a mask, a clamp, or
    for 8-bit floats a scale that fills the range, which makes little head-room no news at all.
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
    room = room_of(bits, columns["absmax"] == columns["largest"], coarse)
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
