"""Computes what verdicts are made of (sources, errors, bases), for a few steps of a rank at a time.

Reads `evidence`, feeds `verdicts`. A row is judged by its own step, and by the steps in which the weights that it
starts from were seen last. So steps in which no bit differs are left out, and the others are judged in windows that fit
into the cache. Where the windows are cut changes no verdict.

Beside the errors of single rows, a window has what many rows share: the precision of float32 products, and a factor by
which all gradients of a step differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from astray.comparison.judge import thresholds as t
from astray.comparison.judge.bases import Bases, find_bases, find_negligible
from astray.comparison.judge.calls import CallColumns, read_calls
from astray.comparison.judge.errors import Errors, find_errors
from astray.comparison.judge.flips import find_optimizer_moves
from astray.comparison.judge.sources import Sources
from astray.comparison.measure.evidence import Evidence
from astray.comparison.rows import Bools, Floats, Ints
from astray.comparison.setup.setup_difference import unit_of
from astray.comparison.verdict import Judgement, Verdict
from astray.store import RankRun

T = TypeVar("T")

beyond_floats = np.errstate(over="ignore", invalid="ignore")
"""What is too far off for a float is infinitely far off. It holds for one thread."""


class Window(NamedTuple):
    """Some pairs in their order: those of the `current` steps, and of the earlier steps that these look back at."""

    rows: Ints
    current: Bools


@dataclass(frozen=True)
class WindowColumns:
    """What is known of the pairs of a window before any is judged. Errors do not have the `negligible` ones."""

    window: Window
    evidence: Evidence
    sources: Sources
    scaling: Scaling
    errors: Errors
    negligible: Bools
    bases: Bases


def comparable(judged: Judgement) -> Bools:
    """Pairs whose shapes and dtypes agree."""
    return np.asarray(~np.isin(judged.verdict, (Verdict.SHAPE, Verdict.DTYPE)))


def undecided_windows(evidence: Evidence, judged: Judgement, optimizer_moves: Floats) -> Iterator[WindowColumns]:
    """The windows with all steps in which anything is undecided, in the order of steps.

    optimizer_moves: those of all pairs, which are filled in window by window, since each builds on the step before.
    """
    undecided = (judged.verdict != Verdict.IDENTICAL) & evidence.pairs.matched
    run = evidence.reference.run
    if run is None or not undecided.any():
        return
    calls, known, roundoffs = read_calls(run), comparable(judged), find_product_roundoffs(evidence)
    for window in cut_windows(evidence, calls, undecided):
        rows = window.rows
        some = evidence.take(rows)
        sources = Sources(some, known[rows], calls.take(evidence.reference.call_row[some.pairs.reference]))
        scaling = find_scaling(some, sources)
        errors = find_errors(some, judged.take(rows), scaling.factor, product_roundoffs(sources, roundoffs))
        negligible = find_negligible(errors, sources)
        errors = errors.without(negligible)
        moves = find_optimizer_moves(errors, sources, window.current, optimizer_moves[rows])
        optimizer_moves[rows[window.current]] = moves[window.current]
        yield WindowColumns(window, some, sources, scaling, errors, negligible, find_bases(errors, sources, moves))


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in a thread while the one before is used: two cores share the work."""
    with ThreadPoolExecutor(1) as pool:
        try:
            coming = pool.submit(_next, items)
        except RuntimeError:  # the system gives no thread
            while (item := _next(items)) is not None:
                yield item
            return
        while (item := coming.result()) is not None:
            coming = pool.submit(_next, items)
            yield item


@beyond_floats
def _next(items: Iterator[T]) -> T | None:
    return next(items, None)


# -- which steps make a window -----------------------------------------------------------------------------------------


def cut_windows(evidence: Evidence, calls: CallColumns, undecided: Bools) -> Iterator[Window]:
    """The steps in which anything is undecided, a few at a time, each time with the steps they look back at."""
    pairs = _pairs_by_step(evidence)
    called = np.zeros(calls.count, np.bool_)
    called[evidence.reference.call_row[evidence.pairs.reference[evidence.pairs.matched]]] = True
    before = _steps_before(calls, np.flatnonzero(called), np.array(sorted(pairs)))
    open_steps = [step for step, rows in pairs.items() if undecided[rows].any()]
    current: list[int] = []
    size = 0
    for number, step in enumerate(open_steps, 1):
        current.append(step)
        size += len(pairs[step])
        if number == len(open_steps) or (size >= t.ROWS_PER_WINDOW and len(current) >= t.STEPS_PER_WINDOW):
            earlier = set().union(*(before.get(one, ()) for one in current)) - set(current)
            yield _window(pairs, current, sorted(earlier & pairs.keys()))
            current, size = [], 0


def _pairs_by_step(evidence: Evidence) -> dict[int, Ints]:
    """The pairs of each step, in their order; the steps in theirs."""
    matched = np.flatnonzero(evidence.pairs.matched)
    steps = evidence.steps[matched]
    if np.any(steps[1:] < steps[:-1]):
        order = np.argsort(steps, kind="stable")
        matched, steps = matched[order], steps[order]
    begins = np.flatnonzero(np.diff(steps, prepend=-1))
    return dict(zip(steps[begins].tolist(), np.split(matched, begins[1:]), strict=True))


def _window(pairs: dict[int, Ints], current: list[int], earlier: list[int]) -> Window:
    rows = np.concatenate([pairs[step] for step in (*current, *earlier)])
    order = np.argsort(rows, kind="stable")
    return Window(rows[order], order < sum(len(pairs[step]) for step in current))


def _steps_before(calls: CallColumns, called: Ints, steps: Ints) -> dict[int, set[int]]:
    """For each step those in which its sites were called last; the step before it is one, whatever was called there."""
    before = {step: {previous} for previous, step in zip(steps[:-1].tolist(), steps[1:].tolist(), strict=True)}
    steps_in_all = int(steps.max(initial=0)) + 1
    key = calls.site[called].astype(np.int64) * steps_in_all + calls.step[called]
    site, step = np.divmod(np.unique(key), steps_in_all)
    again = site[1:] == site[:-1]
    for previous, later in np.unique(np.stack([step[:-1], step[1:]])[:, again], axis=1).T.tolist():
        before[later].add(previous)
    return before


# -- the precision of float32 products ---------------------------------------------------------------------------------

WITHOUT_PRODUCTS = re.compile(
    r"norm|relu|gelu|silu|tanh|sigmoid|softmax|act|drop|embed|pool|identity|flatten|rotary", re.IGNORECASE
)
"""Classes that multiply no matrices; all others may. Of functions only those that `MULTIPLIES` names do."""

MULTIPLIES = re.compile(r"linear|matmul|mm$|bmm|conv|einsum|attention|lstm|gru|rnn|dot", re.IGNORECASE)
CONVOLVES = re.compile(r"conv", re.IGNORECASE)

PRECISION_FLAGS = {
    "cuda": {"matmul": ("cuda.matmul.fp32_precision",), "conv": ("cudnn.conv.fp32_precision",)},
    "cpu": {"matmul": ("mkldnn.matmul.fp32_precision",), "conv": ("mkldnn.conv.fp32_precision",)},
}


class MultiplyPrecision(NamedTuple):
    """The unit roundoffs of products in float32, in whichever run is coarser; 0 where neither sets one.

    TF32 and its kind round inputs to fewer digits than their dtype has. That holds for whatever may multiply matrices:
    the results of linear layers, convolutions and of code that was not recorded, and not of norms, activations and
    pooling.
    """

    matmul: float
    conv: float


def find_product_roundoffs(evidence: Evidence) -> MultiplyPrecision:
    """Those that both runs were set to."""
    units = [_unit_roundoffs(rows.run) for rows in (evidence.reference, evidence.candidate) if rows.run is not None]
    return MultiplyPrecision(*(max((unit[name] for unit in units), default=0.0) for name in MultiplyPrecision._fields))


def _unit_roundoffs(run: RankRun) -> dict[str, float]:
    """In which precision a run multiplies float32, on the device where most of its tensors are."""
    device = run.tensors.coded("device")
    counts = np.bincount(device.codes[device.codes >= 0], minlength=1)
    kind = str(device.values[int(counts.argmax())]).partition(":")[0] if len(device.values) else "cpu"
    settings = [row.values for row in run.setup if row.subject == "torch"]
    return {
        name: max((unit_of(values.get(flag)) or 0.0 for values in settings for flag in flags), default=0.0)
        for name, flags in PRECISION_FLAGS.get(kind, PRECISION_FLAGS["cpu"]).items()
    }


def product_roundoffs(sources: Sources, units: MultiplyPrecision) -> Floats:
    """For each row the unit roundoff of the products it is made of, 0 where that is its dtype's."""
    roundoffs = np.zeros(len(sources.call))
    matmul, conv = units
    if max(units) <= t.FLOAT32:
        return roundoffs
    calls = sources.calls
    by_type = []
    for word in sources.run.calls.coded("type").values:
        of_module = 0.0 if WITHOUT_PRODUCTS.search(word) else conv if CONVOLVES.search(word) else matmul
        of_function = 0.0 if not MULTIPLIES.search(word) else conv if CONVOLVES.search(word) else matmul
        by_type.append((of_module, of_function))
    table = np.array([*by_type, (matmul, 0.0)])
    types = np.where(calls.is_parameter | calls.is_optimizer, calls.owner_type, calls.type)
    of_call = np.where(calls.plane == 1, table[types, 1], table[types, 0])
    made = sources.is_result | (sources.has_role("input") & (sources.plane == 0))
    return np.where(made & sources.comparable, np.append(of_call, 0.0)[sources.call], roundoffs)


# -- a common factor of gradients --------------------------------------------------------------------------------------


class Scaling(NamedTuple):
    """For each row the factor by which its candidate is divided, 1 for most; and the rows where it comes in.

    A factor comes from a loss scale, a mean for a sum, or ranks that add up. It is one finding, reported where
    gradients come in from outside; what agrees after dividing by it agrees.
    """

    factor: Floats
    entries: Bools

    @property
    def found(self) -> bool:
        return bool(self.entries.any())


def find_scaling(evidence: Evidence, sources: Sources) -> Scaling:
    """Compare the norms of all gradients, step by step."""
    factor = np.ones(len(sources.call))
    entries = np.zeros(len(sources.call), np.bool_)
    gradients = sources.backward & sources.comparable
    outermost = gradients & sources.has_role("input") & (sources.enclosing < 0)
    ratio = _norm_ratios(evidence, gradients)
    for step in np.unique(sources.step[outermost]).tolist():
        in_step = gradients & (sources.step == step) & ~np.isnan(ratio)
        common = _common_factor(ratio[in_step])
        begins = in_step & outermost
        if common is None or not begins.any() or np.any(np.abs(ratio[begins] - common) > abs(common - 1) / 4):
            continue
        factor[in_step] = common
        entries |= begins
    return Scaling(factor, entries)


def _norm_ratios(evidence: Evidence, rows: Bools) -> Floats:
    """By how much the norms of some rows differ; NaN where they are not known or 0, or no float is that factor."""
    ratios = np.full(len(rows), np.nan)
    at = np.flatnonzero(rows)
    if len(at):
        reference, candidate = evidence.numbers("l2", at)
        known = (reference > 0) & (candidate > 0)
        ratio = candidate[known] / reference[known]
        ratios[at[known]] = np.where((ratio > 0) & np.isfinite(ratio), ratio, np.nan)
    return ratios


def _common_factor(ratios: Floats) -> float | None:
    """The factor that nearly all ratios are; None where they have none in common but one."""
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    alike = np.abs(ratios / middle - 1) <= t.FACTOR_SPREAD
    return middle if abs(middle - 1) > t.MIN_FACTOR and alike.mean() >= t.FACTOR_SHARE else None
