"""Which rows of a run's micro steps make up one row of a whole step, and how: laid end to end, added up, or only one.

Reads the rows of both runs, feeds `joined_runs`. A row alone does not show which dimension is the batch, so both runs
are read: sizes that differ between them, in one dimension, are parts of the batch. What has the same shape on both
sides, whatever the size of their batches, belongs to no sample: a weight, a mask, a loss.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.rows import Bools, Ints, Rows, Vocabularies
from astray.graph.keys import find, number_repeats, one_key

KEY = ("step", "site", "call", "phase", "again", "role", "path")
"""What the rows of one tensor have in common in all micro steps of a step."""

GIVEN = ("parameter", "state")
STATISTICS = ("min", "max", "mean", "std", "l2", "absmax", "zeros", "nan", "inf", "count")


NO_BATCH, APART = -1, -2
"""In place of the dimension to join along: all shapes are the same; they differ in more than one dimension."""


class JoinRule(IntEnum):
    """How the rows of a group become one."""

    FIRST = 0  # they are the same, or there is only one
    LAST = 1  # each has the one before in it: an accumulated gradient
    JOINED = 2  # each has a part of the batch
    SUMMED = 3  # each has a share of a gradient
    REDUCED = 4  # each has one number, of which the whole batch has the mean or the sum
    OPEN = 5  # not known


class GroupMembers(NamedTuple):
    """The rows of one run in their groups: group g has `length[g]` of them, from `order[begin[g]]` on.

    They are in the order of micro steps.
    """

    rows: Rows
    order: Ints
    begin: Ints
    length: Ints

    @classmethod
    def of(cls, rows: Rows, group: Ints, groups: int) -> GroupMembers:
        length = np.bincount(group, minlength=groups)
        order = np.lexsort((rows.columns["micro"], group))
        return cls(rows, order, np.cumsum(length) - length, length)

    def at(self, group: int) -> Ints:
        """The rows of one group."""
        begin = int(self.begin[group])
        return self.order[begin : begin + int(self.length[group])]

    def flat(self, groups: Ints) -> tuple[Ints, Ints]:
        """The rows of some groups, which all have some, one group after the other; and where each group begins."""
        length = self.length[groups]
        begin = np.cumsum(length) - length
        offset = np.arange(int(length.sum())) - np.repeat(begin, length)
        return self.order[np.repeat(self.begin[groups], length) + offset], begin

    def padded(self, column: Ints, groups: Ints) -> Ints:
        """A column of the rows as a matrix with a line for each of some groups, filled up with −1."""
        length = self.length[groups]
        place = np.arange(int(length.max(initial=0)))
        at = np.minimum(self.begin[groups][:, None] + place, max(len(self.order) - 1, 0))
        inside = place < length[:, None]
        if not len(self.order):
            return np.full(inside.shape, -1)
        return np.where(inside, column[self.order[at]], -1)


class MicroStepGroups(NamedTuple):
    """Both runs' rows in groups of one number, and for each group its rule and the dimension it is joined along."""

    reference: GroupMembers
    candidate: GroupMembers
    rule: npt.NDArray[np.int8]
    dim: npt.NDArray[np.int8]
    constant: Bools  # the same in all micro steps of each run
    given: Bools  # parameters and buffers, which should be
    shares: Bools  # surely shares of a gradient: of what all micro steps have in common
    parts: Bools  # surely parts of the batch: their sizes differ between the runs, and add up to the same
    same_cut: Bools  # both runs cut the batch in the same way


def group(reference: Rows, candidate: Rows, words: Vocabularies) -> MicroStepGroups:
    """Group the rows of one rank of both runs, and find the `JoinRule` of each group."""
    number, groups = _numbers(reference, candidate)
    sides = (
        GroupMembers.of(reference, number[: len(reference)], groups),
        GroupMembers.of(candidate, number[len(reference) :], groups),
    )
    return _RuleFinder(sides, groups, words).found()


def _numbers(reference: Rows, candidate: Rows) -> tuple[Ints, int]:
    """The number of each row's group, and how many there are."""
    columns = {name: _both(reference, candidate, name) for name in (*KEY, "micro")}
    key = one_key([columns[name] for name in KEY])
    in_micro_step = one_key([key, columns["micro"]])
    again = np.concatenate(
        [number_repeats(in_micro_step[: len(reference)]), number_repeats(in_micro_step[len(reference) :])]
    )
    distinct, number = np.unique(one_key([key, again]), return_inverse=True)
    return number, len(distinct)


def _both(reference: Rows, candidate: Rows, name: str) -> Ints:
    return np.concatenate([reference.columns[name], candidate.columns[name]])


class _RuleFinder:
    """Finds the `JoinRule` of each group."""

    def __init__(self, sides: tuple[GroupMembers, GroupMembers], groups: int, words: Vocabularies) -> None:
        self.sides = sides
        self.words = words
        self.number = np.arange(groups)
        self.several: Bools = (sides[0].length > 1) | (sides[1].length > 1)
        self.rule = np.full(groups, JoinRule.FIRST, np.int8)
        self.dim = np.full(groups, NO_BATCH, np.int8)
        self.adds_up = np.ones(groups, np.bool_)
        self.differ = np.zeros(groups, np.bool_)
        self.same_cut = np.zeros(groups, np.bool_)
        self.stacks = np.ones(groups, np.bool_)

    def found(self) -> MicroStepGroups:
        given, gradient = self._has("role", *GIVEN), self._has("role", "gradient")
        constant = self._constant(0) & self._constant(1)
        self.rule[self.several & gradient] = JoinRule.LAST
        self._compare_shapes(np.flatnonzero(self._in_both_or_several() & ~given & ~gradient))
        by_shape = self.several & ~given & ~gradient  # of these the shapes decide
        guessed = by_shape & self._has_no_counterpart()
        self.dim[guessed] = np.where(constant, NO_BATCH, np.where(self.stacks, 0, APART))[guessed]
        joined = by_shape & (self.dim >= 0)
        self.rule[joined] = JoinRule.JOINED
        shares = self._without_batch(by_shape & (self.dim == NO_BATCH), constant, guessed)
        # What is cut up outside of the model need not be cut in the same way by both programs.
        cut_outside = self._outside() & self._micro_steps_differ() & ~self.adds_up
        self.rule[(by_shape & (self.dim == APART)) | cut_outside] = JoinRule.OPEN
        parts = joined & self.differ & self.adds_up
        return MicroStepGroups(*self.sides, self.rule, self.dim, constant, given, shares, parts, self.same_cut)

    def _without_batch(self, alike: Bools, constant: Bools, guessed: Bools) -> Bools:
        """Find the rule of what has the same shape in all micro steps of both runs. Gives the shares of gradients."""
        backward, single = self._has("phase", "backward"), self._single()
        one_by_one = alike & ~constant & (self.sides[0].length == self.sides[1].length)
        self.dim[one_by_one] = 0
        self.rule[one_by_one] = JoinRule.JOINED
        rest = alike & (self.sides[0].length != self.sides[1].length)
        # Equal shares of a gradient still add up. But an op of the backward pass is given other things than gradients.
        changing = rest & ~(constant & (~backward | guessed | self._has("kind", "op")))
        self.rule[changing] = np.where(backward[changing], JoinRule.SUMMED, JoinRule.OPEN)
        self.rule[rest & single] = JoinRule.REDUCED
        shares = rest & (changing | single) & self._shares(constant)
        self.rule[shares] = JoinRule.SUMMED
        return np.asarray(shares)

    def _has_no_counterpart(self) -> Bools:
        """Groups that only one run has; or that of another call has the same number, where one run makes more calls.

        `partners` will find the right one. Until then the first dimension of what changes is a guess.
        """
        modules = [str(site).partition("/")[0] for site in self.words["site"].words]
        module = np.append(np.unique(modules, return_inverse=True)[1] if modules else np.empty(0, np.int64), -1)
        place = one_key([self._key("step"), self._key("phase"), module[self._key("site")]])
        _, number = np.unique(place, return_inverse=True)
        counts = [np.bincount(number[side.length > 0], minlength=len(place)) for side in self.sides]
        uneven = (counts[0] != counts[1])[number] & ~self._has("kind", "module") & ~self.adds_up
        return np.asarray(uneven | (self.sides[0].length == 0) | (self.sides[1].length == 0))

    def _in_both_or_several(self) -> Bools:
        """Groups whose shapes can be compared: of one row on each side, or of several."""
        return np.asarray(self.several | ((self.sides[0].length == 1) & (self.sides[1].length == 1)))

    def _compare_shapes(self, at: Ints) -> None:
        """Find the dimension in which shapes differ. There are few combinations of shapes, and many groups."""
        if not len(at):
            return
        patterns = [side.padded(side.rows.laid_out_shape, at) for side in self.sides]
        both = np.concatenate(patterns, axis=1)
        first, which = distinct_lines(both)
        shapes, split = self.words["shape"].words, patterns[0].shape[1]
        found = [
            along(*([shapes[code] for code in side if code >= 0] for side in (line[:split], line[split:])))
            for line in both[first].tolist()
        ]
        self.dim[at] = np.array([one.dim for one in found], np.int8)[which]
        self.adds_up[at] = np.array([one.adds_up for one in found])[which]
        self.differ[at] = np.array([one.differ for one in found])[which]
        self.same_cut[at] = np.array([one.same_cut for one in found])[which]
        self.stacks[at] = np.array([one.stacks for one in found])[which]
        for side in self.sides:
            dtype = side.padded(side.rows.columns["dtype"], at)
            mixed = np.any((dtype != dtype[:, :1]) & (dtype >= 0), axis=1)
            self.dim[at[mixed]] = APART  # micro steps of one run in several precisions
            # Parts are laid end to end as they were recorded, so that one dimension must be the same on both sides.
            laid_out = np.any(side.padded(side.rows.columns["layout"], at) >= 0, axis=1)
            self.dim[at[laid_out & self.differ[at]]] = APART

    def _constant(self, side: int) -> Bools:
        """Groups whose rows on one side have the same bits; by their statistics where there are no fingerprints."""
        members = self.sides[side]
        found = np.ones(len(self.number), np.bool_)
        at = np.flatnonzero(members.length > 1)
        if not len(at):
            return found
        rows, begin = members.flat(at)
        first = np.repeat(rows[begin], members.length[at])
        known = members.rows.known("fingerprint", rows)
        same = members.rows.statistic("fingerprint", rows) == members.rows.statistic("fingerprint", first)
        alike = members.rows.statistic("count", rows) >= 0
        for name in STATISTICS:
            one, other = members.rows.statistic(name, rows), members.rows.statistic(name, first)
            alike &= (one == other) | ((one != one) & (other != other))
        shape = members.rows.columns["shape"]
        equal = np.where(known, same, alike) & (shape[rows] == shape[first])
        found[at] = np.logical_and.reduceat(equal, begin)
        return found

    def _shares(self, constant: Bools) -> Bools:
        """Gradients of what is the same in all micro steps: each of these has its share of them."""
        backward = np.flatnonzero(self._has("phase", "backward") & self._has("role", "input", "output"))
        found = np.zeros(len(self.number), np.bool_)
        if not len(backward):
            return found
        taken, given_back = self._code("role", "input"), self._code("role", "output")
        forward = np.flatnonzero(self._has("phase", "forward") & ~self._key("again").astype(np.bool_))
        wanted = {name: self._key(name)[backward] for name in KEY}
        known = {name: self._key(name)[forward] for name in KEY}
        wanted["role"] = np.where(wanted["role"] == taken, given_back, taken)
        wanted["phase"] = np.full(len(backward), self._code("phase", "forward"))
        keys = one_key([np.concatenate([wanted[name], known[name]]) for name in KEY])
        # Where a key repeats, any of them will do.
        among, first = np.unique(keys[len(backward) :], return_index=True)
        place = find(keys[: len(backward)], among)
        source = np.append(forward[first], -1)[place]
        shared = constant & self.several & (self.dim == NO_BATCH)
        found[backward] = np.append(shared, False)[source]
        return found

    def _single(self) -> Bools:
        """Groups of single numbers."""
        sizes = np.array([int(np.prod(shape)) for shape in self.words["shape"].words] + [0])
        return np.asarray(sizes[self._key("shape")] == 1)

    def _outside(self) -> Bools:
        """Groups of functions that were called outside of every module."""
        outside = [str(site).startswith("/") for site in self.words["site"].words]
        return np.array([*outside, False])[self._key("site")]

    def _micro_steps_differ(self) -> Bools:
        """Groups of a step that has more micro steps in one run than in the other."""
        step = self._key("step")
        counts = [micro_steps(side.rows.columns["step"], side.rows.columns["micro"]) for side in self.sides]
        differ = [one for one in np.unique(step).tolist() if counts[0].get(one, 0) != counts[1].get(one, 0)]
        return np.isin(step, differ)

    def _key(self, name: str) -> Ints:
        """A column of the groups: that of their first row, in either run."""
        reference, candidate = self.sides
        column = np.full(len(self.number), -1, np.int64)
        for side in (candidate, reference):
            at = np.flatnonzero(side.length > 0)
            column[at] = side.rows.columns[name][side.order[side.begin[at]]]
        return column

    def _has(self, column: str, *words: str) -> Bools:
        return np.isin(self._key(column), [self._code(column, word) for word in words])

    def _code(self, column: str, word: str) -> int:
        """The number of a word, or −2, which no row has."""
        known = self.words[column].words
        return known.index(word) if word in known else -2


def distinct_lines(matrix: Ints) -> tuple[Ints, Ints]:
    """Where each distinct line of a matrix is first, and for each line the number of the one it is like."""
    _, first, which = np.unique(one_key(list(matrix.T)), return_index=True, return_inverse=True)
    return first, which


def micro_steps(step: Ints, micro: Ints) -> dict[int, int]:
    """How many micro steps each step has, by the columns of rows or calls."""
    steps, number = np.unique(step, return_inverse=True)
    most = np.zeros(len(steps), np.int64)
    np.maximum.at(most, number, micro + 1)
    return dict(zip(steps.tolist(), most.tolist(), strict=True))


# -- the dimension to join along ---------------------------------------------------------------------------------------


Shape = tuple[int, ...]


class JoinDimension(NamedTuple):
    """The dimension to join along, or why there is none; whether sizes differ, and add up to the same on both sides."""

    dim: int
    differ: bool
    adds_up: bool
    same_cut: bool = False  # each part has its counterpart
    stacks: bool = True  # the parts of each run by itself could be laid end to end along the first dimension


def along(reference: list[Shape], candidate: list[Shape]) -> JoinDimension:
    """What the shapes of a tensor in the micro steps of both runs say.

    >>> along([(8, 3)], [(2, 3), (6, 3)])
    JoinDimension(dim=0, differ=True, adds_up=True, same_cut=False, stacks=True)
    >>> along([(3, 3)], [(3, 3), (3, 3)]).dim, along([(4, 4)], [(2, 2), (2, 2)]).dim
    (-1, -2)
    """
    shapes, stacks = [*reference, *candidate], _stack(reference) and _stack(candidate)
    if not reference or not candidate:  # nothing to compare with
        return JoinDimension(NO_BATCH if len(set(shapes)) == 1 else 0 if stacks else APART, False, True, stacks=stacks)
    if len({len(shape) for shape in shapes}) > 1:
        return JoinDimension(APART, True, False, stacks=stacks)
    dims = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    same = reference == candidate
    if not dims:
        return JoinDimension(NO_BATCH, False, True, same, stacks)
    if len(dims) > 1:
        return JoinDimension(APART, True, False, stacks=stacks)
    totals = [sum(shape[dims[0]] for shape in side) for side in (reference, candidate)]
    return JoinDimension(dims[0], True, totals[0] == totals[1], same, stacks)


def _stack(shapes: list[Shape]) -> bool:
    """Whether tensors of these shapes can be laid end to end along the first dimension."""
    return all(shapes) and len({shape[1:] for shape in shapes}) <= 1
