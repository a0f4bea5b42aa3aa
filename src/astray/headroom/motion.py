"""Which weights no longer move, since an update is smaller than half the distance to their next number.

Where updates were recorded (`optimizer=["weight", "update"]`), an element that did not move is a zero of the update,
and their number is exact. Otherwise a weight of which not one bit has changed from one recorded step to the next,
though its gradient was not zero, has not moved at all; how many elements of others did is not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.headroom.observations import Floats, Ints, Observations


class WeightMotion(NamedTuple):
    """What is known of the weights, for each place; NaN or 0 where a place is not a weight, or nothing is known.

    Norms are of the last recorded step that has both, of the rank where the ratio is smallest. The shares are
    over the later half of the steps (all ranks), so that neither one skipped update nor the warm-up decides.
    """

    update_ratio: Floats  # ‖update‖ / ‖weight‖
    gradient_ratio: Floats  # ‖gradient‖ / ‖weight‖
    unmoved: Floats  # share of elements that did not move, exact; 1 where no bit changed in any step
    unmoved_with_gradient: Floats  # share, at least, of those with a gradient
    still_steps: Ints  # steps in which the whole weight did not change, though it had a gradient
    watched_steps: Ints  # steps in which it is known whether it changed
    weight_row: Ints  # the rows of the last update and of the weight before it; −1 for none
    update_row: Ints

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of a table: all but the rows."""
        return {name: column for name, column in self._asdict().items() if not name.endswith("_row")}


class _Steps(NamedTuple):
    """For each weight, rank and step: the rows of weight, update and gradient (−1 for none), and whether it moved."""

    name: Ints
    rank: Ints
    step: Ints
    weight: Ints
    update: Ints
    gradient: Ints
    moved: Ints  # 0 no bit changed, 1 some did, −1 not known


def motion(observations: Observations) -> WeightMotion:
    """How the weights of a run move."""
    names, numbers = _parameters(observations)
    count = len(observations.first)
    result = WeightMotion(
        *(np.full(count, np.nan) for _ in range(4)),
        *(np.zeros(count, np.int64) for _ in range(2)),
        *(np.full(count, -1, np.int64) for _ in range(2)),
    )
    if not numbers:
        return result
    updates, forwards = _updates(observations, names, numbers), _forwards(observations, names, numbers)
    only_forward = ~np.isin(forwards.name, updates.name)  # an optimizer's rows are preferred
    both = _Steps(*(np.append(updates[at], forwards[at][only_forward]) for at in range(len(updates))))
    if not len(both.name):  # parameters of which no row is the weight itself
        return result
    both = _Steps(*(column[np.argsort(both.name, kind="stable")] for column in both))
    edges = np.flatnonzero(np.diff(both.name)) + 1
    dtypes = observations.words["dtype"].codes
    nonzero = observations.numbers["count"] - observations.numbers["zeros"]
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(both.name)], strict=True):
        steps = _Steps(*(column[begin:end] for column in both))
        # A copy in another precision moves otherwise.
        same_dtype = dtypes[observations.first] == dtypes[steps.weight[0]]
        places = np.flatnonzero((names == steps.name[0]) & same_dtype)
        for column, value in zip(result, _fields_of(observations.numbers, nonzero, steps), strict=True):
            column[places] = value
    return result


def _parameters(observations: Observations) -> tuple[Ints, dict[str, int]]:
    """For each place that is a weight, the number of its parameter (−1 for all others); and the numbers by name.

    A module's row has the weight at `h.2.proj` and `weight`, an optimizer's at `h.2.proj.weight` and `weight`.
    """
    known: dict[str, int] = {}
    numbers = np.full(len(observations.first), -1, np.int64)
    word = {name: observations.words[name].take(observations.first) for name in ("kind", "role", "site", "path")}
    for place in np.flatnonzero(word["role"].codes == word["role"].code("parameter")).tolist():
        kind, site, path = (str(word[name][place]) for name in ("kind", "site", "path"))
        if kind == "optimizer":
            numbers[place] = known.setdefault(site, len(known))
        elif kind == "module":
            numbers[place] = known.setdefault(path if site == "<root>" else f"{site}.{path}", len(known))
    return numbers, known


def _updates(observations: Observations, names: Ints, numbers: dict[str, int]) -> _Steps:
    """The steps of weights whose optimizer was recorded: all rows of one call belong together."""
    at, optimizer = observations.numbers, observations.where(kind="optimizer")
    weight = np.flatnonzero(optimizer & observations.where(role="parameter", path="weight"))
    key = _numbered([at["rank"], at["seq"]])
    after = _latest(key[weight], key, optimizer & observations.where(role="output", path="weight"))
    update = _latest(key[weight], key, optimizer & observations.where(role="output", path="update"))
    gradient = _latest(key[weight], key, optimizer & observations.where(role="input", path="grad"))
    name, rank, step = names[observations.place[weight]], at["rank"][weight], at["step"][weight]
    gradient = np.where(gradient >= 0, gradient, _gradients(observations, numbers, name, rank, step))
    moved = np.where(update >= 0, at["zeros"][update] < at["count"][update], _changed(observations, weight, after))
    return _Steps(name, rank, step, weight, update, gradient, moved)


def _forwards(observations: Observations, names: Ints, numbers: dict[str, int]) -> _Steps:
    """The steps of weights as modules saw them first in each, and whether they had other bits in the next."""
    at = observations.numbers
    row = np.flatnonzero((names[observations.place] >= 0) & observations.where(kind="module"))
    name, rank, step = names[observations.place[row]], at["rank"][row], at["step"][row]
    order = np.lexsort((row, step, rank, name))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = np.any([np.diff(column[order]) != 0 for column in (name, rank, step)], axis=0)
    order = order[fresh]
    row, name, rank, step = row[order], name[order], rank[order], step[order]
    same = np.zeros(len(row), np.bool_)
    same[:-1] = (name[1:] == name[:-1]) & (rank[1:] == rank[:-1])
    moved = _changed(observations, row, np.where(same, np.roll(row, -1), -1))
    gradient = _gradients(observations, numbers, name, rank, step)
    return _Steps(name, rank, step, row, np.full(len(row), -1, np.int64), gradient, moved)


def _gradients(observations: Observations, numbers: dict[str, int], name: Ints, rank: Ints, step: Ints) -> Ints:
    """The row of a weight's accumulated gradient at the end of a step; −1 for none."""
    at, sites = observations.numbers, observations.words["site"]
    owner = np.array([*(numbers.get(site, -1) for site in sites.values), -1])[sites.codes]
    mask = observations.where(kind="parameter", role="gradient", path="grad") & (owner >= 0)
    key = _numbered([np.append(owner, name), np.append(at["rank"], rank), np.append(at["step"], step)])
    return _latest(key[len(observations) :], key[: len(observations)], mask)


def _fields_of(at: dict[str, npt.NDArray[Any]], nonzero: Ints, steps: _Steps) -> tuple[float | int, ...]:
    """The fields of `WeightMotion` for one weight."""
    numbers = np.unique(steps.step)
    late = steps.step >= numbers[len(numbers) // 2]
    has_gradient = (steps.gradient >= 0) & (nonzero[steps.gradient] > 0)
    by_update, by_gradient = (_last(at, steps, rows) for rows in (steps.update, steps.gradient))
    moved_by = late & (steps.update >= 0)
    still = (steps.moved == 0) & has_gradient
    watched = (steps.moved >= 0) & has_gradient
    unmoved = with_gradient = np.nan
    if moved_by.any():
        zeros, count = at["zeros"][steps.update[moved_by]].sum(), at["count"][steps.update[moved_by]].sum()
        unmoved = float(zeros / count) if count else np.nan  # of updates without any element
        both = moved_by & has_gradient
        with_grad, moved = (nonzero[rows[both]] for rows in (steps.gradient, steps.update))
        with_gradient = float(np.maximum(with_grad - moved, 0).sum() / with_grad.sum()) if both.any() else np.nan
    elif watched.any() and still[watched].all():
        unmoved = with_gradient = 1.0
    still_steps, watched_steps = (len(np.unique(steps.step[mask])) for mask in (still, watched))
    return (by_update.ratio, by_gradient.ratio, unmoved, with_gradient, still_steps, watched_steps, *by_update[1:])


class _LastMotion(NamedTuple):
    ratio: float
    weight: int
    other: int


def _last(at: dict[str, npt.NDArray[Any]], steps: _Steps, rows: Ints) -> _LastMotion:
    """The smallest ratio of the norms of some rows to those of their weights, in the last step that has one."""
    known = (rows >= 0) & (at["l2"][steps.weight] > 0) & np.isfinite(at["l2"][rows])
    if not known.any():
        return _LastMotion(float("nan"), -1, -1)
    known &= steps.step == steps.step[known].max()
    weights, others = steps.weight[known], rows[known]
    with np.errstate(over="ignore"):  # a damaged norm may be nearly 0
        ratios = at["l2"][others] / at["l2"][weights]
    least = int(np.argmin(ratios))
    return _LastMotion(float(ratios[least]), int(weights[least]), int(others[least]))


def _changed(observations: Observations, before: Ints, after: Ints) -> Ints:
    """Whether two rows have other bits: 1 or 0, −1 where that is not known."""
    prints, known = observations.numbers["fingerprint"], observations.numbers["known_print"]
    both = (before >= 0) & (after >= 0) & known[before] & known[after]
    return np.where(both, prints[before] != prints[after], -1).astype(np.int64)


def _numbered(columns: list[Ints]) -> Ints:
    """One number for each distinct combination."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        codes = np.unique(column, return_inverse=True)[1].astype(np.int64)
        key = np.unique(key * (int(codes.max(initial=0)) + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return key


def _latest(wanted: Ints, keys: Ints, mask: npt.NDArray[np.bool_]) -> Ints:
    """For each key wanted, the last of the masked rows that has it; −1 for none."""
    rows = np.flatnonzero(mask)
    last = np.full(int(max(keys.max(initial=-1), wanted.max(initial=-1))) + 1, -1, np.int64)
    last[keys[rows]] = rows  # of several rows with one key the last assignment remains
    return last[wanted]
