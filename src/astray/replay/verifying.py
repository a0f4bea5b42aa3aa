"""Single calls of a rank, executed again for a comparison: what `compare` is given as its `CallReplayer`.

Reads one rank by way of `calls`, gives each result beside the exact one by its row of the table of tensors. Calls whose
tensors are large are left out, so that comparing two runs takes no more than seconds longer.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

import numpy as np
import torch

from astray.comparison.judge.replays import CallReplay, NotReplayedError, ReplayedResult, Values
from astray.replay.call_judgement import ReplayedTensor, execute_as_recorded, judge_call
from astray.replay.calls import CannotReplayError, RebuiltCall, RecordedCalls
from astray.replay.exact import Executed, execute
from astray.store import RankRun

MOST_ELEMENTS = 1 << 26
"""Elements of all tensors of a call together: a product of matrices of this size takes some seconds in float64."""

_Key = tuple[str, str]
"""The phase and the path of a result, or of a gradient that was sent."""


class ReplayedRank:
    """Executes the calls of one rank.

    >>> replayed = ReplayedRank(astray.open("runs/a").ranks[0])(12)
    >>> [result.ulps for result in replayed.results.values()]
    [0.5]
    """

    def __init__(self, rank: RankRun) -> None:
        self._rank = rank
        self._calls = RecordedCalls(rank)

    def __call__(self, call: int) -> CallReplay:
        """The forward call of a row, with its backward. Raises NotReplayedError with the reason."""
        try:
            with torch.random.fork_rng(devices=[]):
                return self._replayed(call)
        except CannotReplayError as error:
            raise NotReplayedError(str(error)) from None

    def _replayed(self, row: int) -> CallReplay:
        size = sum(prod(tensor["shape"]) for _, tensor in self._calls.tensors(row))
        if size > MOST_ELEMENTS:
            raise CannotReplayError(f"more than {MOST_ELEMENTS:,} elements: `astray replay` takes the time for them")
        call = self._calls.rebuild(row)
        rows = self._rows(row, call)
        judged = [(rows.get((each.phase, each.path)), each) for each in judge_call(call, self._calls.flags)]
        results = {index: _result(each) for index, each in judged if index is not None}
        if not results:
            raise CannotReplayError(call.lost[0] if call.lost else "no result that can be judged")
        values = _Values(call, {index: key for key, index in rows.items()})
        return CallReplay(results, call.drawn is not None, _dtypes(call), values.of)

    def _rows(self, row: int, call: RebuiltCall) -> dict[_Key, int]:
        """The rows of a call's results, and of the gradients that it sent.

        Of a backward pass that ran more than once gradients are left out: their paths do not tell which they are of.
        """
        calls = [row]
        if len(call.backwards) == 1:
            calls += np.flatnonzero(self._rank.calls.numbers("seq") == call.backwards[0].call["seq"]).tolist()
        return {
            (self._calls.call(each)["phase"], tensor["path"]): index
            for each in calls
            for index, tensor in self._calls.tensors(each)
            if tensor["role"] == "output"
        }


def _dtypes(call: RebuiltCall) -> frozenset[str]:
    """The dtypes of a call's floats."""
    tensors = (*call.inputs.values(), *call.own.values(), *call.kept.values())
    return frozenset(str(each.dtype) for each in tensors if each.is_floating_point())


def _result(tensor: ReplayedTensor) -> ReplayedResult:
    found = tensor.judgement
    return ReplayedResult(
        tensor.dtype, found.ulps, found.plain, found.ratio, found.tile_ratio, found.surprise, found.unequal
    )


class _Values:
    """The recorded and the exact values of a call's results; it is executed in float64 when they are asked for."""

    def __init__(self, call: RebuiltCall, keys: dict[int, _Key]) -> None:
        self._call = call
        self._keys = keys

    @cached_property
    def _exact(self) -> Executed:
        try:
            with torch.random.fork_rng(devices=[]):
                way, _ = execute_as_recorded(self._call)
                return execute(self._call, way._replace(dtype=torch.float64))
        except CannotReplayError as error:
            raise NotReplayedError(str(error)) from None

    def of(self, row: int) -> tuple[Values, Values]:
        """Of one row. Raises NotReplayedError where it has none."""
        phase, path = self._keys[row]
        is_gradient = phase == "backward" and bool(self._call.backwards)
        recorded = self._call.backwards[0].sent.get(path) if is_gradient else self._call.kept.get(path)
        exact = self._exact.gradients[0].get(path) if is_gradient else self._exact.outputs.get(path)
        if recorded is None or exact is None or recorded.is_complex():
            raise NotReplayedError("no values")
        return recorded.to(torch.float64).numpy(), exact.to(torch.float64).numpy()
