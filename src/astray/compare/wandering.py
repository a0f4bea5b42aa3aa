"""Which weights an optimizer may have moved at random, and how far: those whose gradient is nothing but rounding.

Adam divides a gradient by its own size, so that it moves an element by about its learning rate, however small the
gradient is. Where that is zero in exact arithmetic, as for a bias before a batch norm, or for the bias of the keys of
an attention, the rounding of each run decides where the weight goes. Feeds `following`. How far it may go is asked of
the reference alone, so that a fault in the candidate cannot excuse itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from astray.compare.calibration import SAME_TENSOR
from astray.compare.evidence import Evidence
from astray.compare.keys import one_key
from astray.compare.reasons import Reason
from astray.compare.rows import Bools, Floats, Ints
from astray.compare.verdict import AGREEING, Judgement, Verdict
from astray.record import ROOT

OWN_MOVES = 16
"""A weight may be off by so many times what its own statistics moved. They show the moves of a few elements only."""
LARGEST_MOVES = 2
"""And by so many times the largest move of any weight: with Adam the learning rate, up in one run, down in one."""

MOVES = ("min", "max", "mean", "std")
"""Statistics that no move changes by more than its largest element."""


class _Gradient(NamedTuple):
    """What was said of a gradient in one step."""

    step: int
    agrees: bool
    identical: bool
    negligible: bool


class Wandering:
    """The weights among the pairs of one rank. Pairs are given by their number."""

    def __init__(self, evidence: Evidence, judged: Judgement) -> None:
        assert evidence.reference.run is not None, "pairs have both sides"
        self._evidence, self._judged = evidence, judged
        self._rows, self._run = evidence.reference, evidence.reference.run
        self._site = self._run.calls.coded("site")

    def is_weight(self, pair: int) -> bool:
        """Whether it is a parameter on entry to a call, be it a module, a function or the optimizer."""
        return bool(self._names[self._evidence.pairs.reference[pair]] >= 0)

    def site(self, pair: int) -> int:
        """The site of the parameter that a pair is, as a code of the reference's calls."""
        return int(self._names[self._evidence.pairs.reference[pair]])

    def allowance(self, pair: int, sure: bool) -> float:
        """By how much a weight may be off in absolute terms, 0 where it has no excuse.

        Its gradients of all steps before must agree, but not to the bit: equal gradients move weights equally. With
        `sure` all of each gradient was nothing but rounding. Else some of it may have been, as of a bias that queries,
        keys and values have in common. That is said of biases alone, all of which take part in every step: a small
        fault in other weights may not show in a step either.
        """
        row = int(self._evidence.pairs.reference[pair])
        step = int(self._rows.columns["step"][row])
        seen = [one for one in self._gradients.get(self.site(pair), []) if one.step < step]
        if not seen or not all(one.agrees for one in seen) or all(one.identical for one in seen):
            return 0.0
        noise = all(one.negligible or one.identical for one in seen)
        return float(self._allowed[row]) if noise or (not sure and self._is_bias(pair)) else 0.0

    def _is_bias(self, pair: int) -> bool:
        return self.is_vector(pair) and "bias" in str(self._site.values[self.site(pair)]).rpartition(".")[2]

    def is_vector(self, pair: int) -> bool:
        """Whether the tensor of a pair has one dimension."""
        shape = self._run.tensors["shape"][self._rows.tensor[self._evidence.pairs.reference[pair]]]
        return shape is not None and len(shape) == 1

    @cached_property
    def _gradients(self) -> dict[int, list[_Gradient]]:
        """What was said of the gradients of each parameter, by its site."""
        found: dict[int, list[_Gradient]] = {}
        pairs = self._evidence.pairs
        at = np.flatnonzero(pairs.matched)
        at = at[self._is_gradient[pairs.reference[at]]]
        rows = pairs.reference[at]
        columns = (
            self._site.codes[self._rows.call_row[rows]],
            self._rows.columns["step"][rows],
            np.isin(self._judged.verdict[at], AGREEING),
            self._judged.verdict[at] == Verdict.IDENTICAL,
            (self._judged.reason[at] & Reason.NEGLIGIBLE) > 0,
        )
        for site, *said in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(site, []).append(_Gradient(*said))
        return found

    @cached_property
    def _is_gradient(self) -> Bools:
        kind = self._run.calls.coded("kind")
        return np.asarray(kind.codes[self._rows.call_row] == kind.code("parameter"))

    @cached_property
    def _names(self) -> Ints:
        """For each row of the reference the site of the gradient of the parameter that it is; −1 where it is none."""
        rows, run = self._rows, self._run
        sites = {site: code for code, site in enumerate(self._site.values)}
        site, path = self._site.codes[rows.call_row], run.tensors.coded("path")
        found = np.full(len(rows), -1)
        kind = run.calls.coded("kind")
        role = run.tensors.coded("role")
        given = np.flatnonzero(role.codes[rows.tensor] == role.code("parameter"))
        paths = path.codes[rows.tensor[given]]
        of_optimizer = kind.codes[rows.call_row[given]] == kind.code("optimizer")
        paths[of_optimizer] = -1  # its site is the parameter's already
        wide = len(path.values) + 1  # one number for both, which is quicker to sort than pairs
        both, which = np.unique(site[given].astype(np.int64) * wide + paths + 1, return_inverse=True)
        names = [self._name(one // wide, one % wide, path.values) for one in both.tolist()]
        found[given] = np.array([sites.get(name, -1) for name in names], np.int64)[which]
        return self._with_arguments(found)

    def _name(self, site: int, path: int, paths: list[str]) -> str:
        """Paths are counted from 1 on here; 0 is none."""
        module = str(self._site.values[site])
        if path == 0:
            return module
        return paths[path - 1] if module == ROOT else f"{module}.{paths[path - 1]}"

    def _with_arguments(self, names: Ints) -> Ints:
        """With those that are arguments of functions: what one gives back for them is the gradient of a parameter."""
        rows = self._rows
        columns = {name: rows.columns[name] for name in ("micro", "site", "call", "path")}
        first = rows.columns["step"] == rows.columns["step"].min(initial=0)
        back = np.flatnonzero(first & self._is("role", "output") & self._is("phase", "backward"))
        gradients = np.flatnonzero(first & self._is_gradient)
        numbers = [rows.statistic(name, at) for at in (gradients, back) for name in ("absmax", "l2", "mean")]
        known = dict(zip(zip(*(column.tolist() for column in numbers[:3]), strict=True), gradients, strict=True))
        same = [known.get(one, -1) for one in zip(*(column.tolist() for column in numbers[3:]), strict=True)]
        owner = np.array(same, np.int64)
        back, owner = back[owner >= 0], owner[owner >= 0]
        key = one_key(list(columns.values()))
        site_of = dict(zip(key[back].tolist(), self._site.codes[rows.call_row[owner]].tolist(), strict=True))
        inputs = np.flatnonzero(self._is("role", "input") & self._is("phase", "forward") & np.isin(key, key[back]))
        names[inputs] = [site_of[one] for one in key[inputs].tolist()]
        return names

    def _is(self, column: str, word: str) -> Bools:
        words = self._evidence.roles if column == "role" else self._evidence.phases
        return np.asarray(self._rows.columns[column] == (words.index(word) if word in words else -2))

    @cached_property
    def _allowed(self) -> Floats:
        """For each row of the reference that is a weight, how far off it may be: a few times what it has moved."""
        rows = self._rows
        found = np.zeros(len(rows))
        weights = np.flatnonzero(self._names >= 0)
        if not len(weights):
            return found
        key = one_key([rows.columns[name][weights] for name in SAME_TENSOR])
        order = np.argsort(key, kind="stable")
        weights, key = weights[order], key[order]
        numbers = np.stack([rows.statistic(name, weights) for name in MOVES])
        moved = np.nan_to_num(np.max(np.abs(np.diff(numbers, axis=1, prepend=numbers[:, :1])), axis=0))
        begins = np.concatenate([[True], key[1:] != key[:-1]])
        moved[begins] = 0.0
        way = np.cumsum(moved)
        way -= way[np.maximum.accumulate(np.where(begins, np.arange(len(way)), 0))]
        steps, number = np.unique(rows.columns["step"][weights], return_inverse=True)
        largest = np.zeros(len(steps))
        np.maximum.at(largest, number, moved)
        found[weights] = np.minimum(OWN_MOVES * way, LARGEST_MOVES * np.cumsum(largest)[number])
        return found
