"""One call, executed again and judged: each of its results and of the gradients that it sent.

It is made in float64 and in its own dtype. Only where that does not explain a recorded tensor, it is made in further
ways (other layouts, rounded once from float32, inputs rounded otherwise), so that nothing is called wrong which a right
implementation gives too. Reads what `calls` has rebuilt, feeds `replay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch

from astray.replay.calls import CannotReplayError, RebuiltCall
from astray.replay.exact import HALVES, Executed, Way, execute, plans
from astray.replay.functions import BREAKING_TIES, COMPOSED, CONTRACTING, CUMULATIVE
from astray.replay.judging import ResultJudgement, Scale, UlpErrors, judge, judge_equal, worst

_DRAWS = 4
"""Of inputs rounded otherwise: one draw may leave a single sum unchanged by chance, four hardly do."""

_TF32 = 11
"""Bits of a significand in TF32, with the one that is not stored."""


class ReplayedTensor(NamedTuple):
    """A result, or a gradient that a call sent, beside the exact one. backward: of which of the call's backwards."""

    phase: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    judgement: ResultJudgement
    backward: int | None = None


def rank_of(judgement: ResultJudgement) -> float:
    """Numbers that a comparison can sort by: NaN is the worst."""
    return math.inf if math.isnan(judgement.surprise) else judgement.surprise


class _Target(NamedTuple):
    """A recorded tensor that is judged: a result, or the gradient number `backward` sent under this path."""

    recorded: torch.Tensor
    path: str
    backward: int | None

    def of(self, executed: Executed) -> torch.Tensor | None:
        found = executed.outputs if self.backward is None else executed.gradients[self.backward]
        return found.get(self.path)


def judge_call(call: RebuiltCall, flags: dict[str, Any]) -> Iterator[ReplayedTensor]:
    """Each result of a call, and each gradient it sent, judged."""
    way, own = execute_as_recorded(call)
    exact = execute(call, way._replace(dtype=torch.float64))
    if not exact.drew_alike:  # other dtypes may draw other numbers
        exact = own
    ways = _Ways(call, way, flags)
    for target in _targets(call):
        computed, true = target.of(own), target.of(exact)
        if computed is None or true is None:
            continue
        if target.path in call.shared and target.backward is not None and way.cast not in (None, target.recorded.dtype):
            call.lost.append(
                "a gradient that several calls send at once, since autocast casts a weight once for all of them"
            )
            continue
        if computed.shape != target.recorded.shape or computed.layout != torch.strided:
            raise CannotReplayError("arguments that give a result of another shape or dtype than was recorded")
        if target.recorded.is_floating_point() or target.recorded.is_complex():
            judgement = _judgement(ways, target, computed, true)
            if judgement.surprise > 1 and call.drawn is not None and exact is not own:
                # In float64 other numbers may have been drawn, even if as many.
                judgement = min(judgement, _judgement(ways, target, computed, computed), key=rank_of)
        elif _breaks_ties(call, target):
            call.lost.append("indices of equal values, of which every implementation may choose another")
            continue
        else:
            judgement = judge_equal(target.recorded, computed)
        yield _named(call, target, judgement)


def _breaks_ties(call: RebuiltCall, target: _Target) -> bool:
    """Whether integers of a result name one of several equal values."""
    is_index = target.path == "out.1" or call.name.startswith(("arg", "unique"))
    return is_index and BREAKING_TIES.fullmatch(call.name) is not None


def _targets(call: RebuiltCall) -> list[_Target]:
    """What is judged of a call."""
    targets = [_Target(kept, path, None) for path, kept in call.kept.items()]
    for number, backward in enumerate(call.backwards):
        targets += [_Target(sent, path, number) for path, sent in backward.sent.items()]
    return targets


def _judgement(ways: _Ways, target: _Target, computed: torch.Tensor, true: torch.Tensor) -> ResultJudgement:
    """A tensor beside the plain ones; more of these are computed only where they are needed."""
    scale = Scale(true, rounding_dtype(target.recorded, ways.first))
    plain = [scale.errors(computed, computed)]
    same = target.recorded.dtype == computed.dtype and torch.equal(target.recorded, computed)
    errors = plain[0] if same else scale.errors(target.recorded, computed)
    judgement = judge(target.recorded, scale, errors, plain[0])
    if judgement.surprise > 1:
        results = [result for each in ways.further if (result := target.of(each)) is not None]
        plain += [scale.errors(result.to(computed.dtype), computed) for result in results]
        judgement = judge(target.recorded, scale, errors, worst(plain))
    if judgement.surprise > 1:
        order = _order_of_sums(ways.call, ways.first, target, scale)
        judgement = judge(target.recorded, scale, errors, worst(plain), order)
    return judgement


class _Ways:
    """The first plain way of a call, and `further` ones, which are computed when they are first asked for."""

    def __init__(self, call: RebuiltCall, first: Way, flags: dict[str, Any]) -> None:
        self.call = call
        self.first = first
        self._flags = flags

    @cached_property
    def further(self) -> list[Executed]:
        return [each for each in _further_ways(self.call, self.first, self._flags) if each.drew_alike]


def execute_as_recorded(call: RebuiltCall) -> tuple[Way, Executed]:
    """How a call was made, and what that gives; where this processor lacks its dtype, in float32."""
    before = torch.get_rng_state()
    way, own = _executed(call)
    if call.drawn is None and not torch.equal(torch.get_rng_state(), before):
        raise CannotReplayError("random numbers whose generator was not recorded: record with --level function")
    if not own.drew_alike:
        raise CannotReplayError("random numbers that this torch draws otherwise, or another thread drew from as well")
    return way, own


def _executed(call: RebuiltCall) -> tuple[Way, Executed]:
    failure: CannotReplayError | None = None
    ways = plans(call)
    for way in ways:
        try:
            return way, execute(call, way)
        except CannotReplayError as error:  # noqa: PERF203 - the next may be how it was made
            failure = failure or error
    assert failure is not None
    if not any(each.dtype in HALVES for each in (*call.inputs.values(), *call.kept.values())):
        raise failure
    return ways[0], execute(call, ways[0]._replace(dtype=torch.float32))


def rounding_dtype(recorded: torch.Tensor, way: Way) -> torch.dtype:
    """The dtype whose roundings a result has: what inputs were cast to is coarser than the gradient they get."""
    kept = recorded.dtype
    own = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(kept, kept)
    return way.cast if way.cast is not None and torch.finfo(way.cast).eps > torch.finfo(own).eps else own


def _further_ways(call: RebuiltCall, way: Way, flags: dict[str, Any]) -> list[Executed]:
    """The call in further plain ways, as far as this processor has them."""
    ways = [way._replace(contiguous=True)]
    if any(each.dtype in HALVES for each in call.kept.values()) or way.cast is not None:
        ways.append(way._replace(dtype=torch.float32))  # rounded to the dtype of the result by the caller
    elif "cuda" in call.devices and CONTRACTING.search(call.name) and _allows_tf32(flags):
        ways.append(way._replace(bits=_TF32))
    found = []
    for each in ways:
        try:
            found.append(execute(call, each))
        except CannotReplayError:  # noqa: PERF203 - one way less
            continue
    return found


def _allows_tf32(flags: dict[str, Any]) -> bool:
    return any(str(value) == "tf32" for name, value in flags.items() if name.endswith("fp32_precision")) or (
        flags.get("float32_matmul_precision") in ("high", "medium")
    )


def _order_of_sums(call: RebuiltCall, way: Way, target: _Target, scale: Scale) -> UlpErrors:
    """How far a result may be off because of the order in which it was summed, at most.

    Inputs that are changed by half an ulp of the working precision change a backward-stable result by as much as one
    rounding of each term. A sum of n terms in a row rounds n times, and gathers √n/2 of that; blocks and trees gather
    less. Of 16 bits the working precision is float32, but for kernels that round in between: there inputs are changed
    by half of their own ulp. Cumulative ones may go on from each rounded result.
    """
    precision = torch.float64 if scale.dtype == torch.float64 else torch.float32
    composed, cumulative = COMPOSED.search(call.name) is not None, CUMULATIVE.search(call.name) is not None
    if (composed or cumulative) and scale.dtype in HALVES:
        precision = scale.dtype
    half = torch.finfo(precision).eps / 2
    exact = way._replace(dtype=torch.float64, noise=half)
    found = []
    for seed in (None, *range(1, _DRAWS + 1)):
        try:
            changed = target.of(execute(call, exact._replace(seed=seed)))
        except CannotReplayError:
            continue
        if changed is not None:
            found.append(scale.errors(changed, changed))
    if not found:
        return scale.errors(scale.exact, scale.exact)
    gathered = worst(found)
    terms = max(target.recorded.shape, default=1) if cumulative else _terms(call, target)
    factor = 1.0 if composed and precision in HALVES else max(1.0, math.sqrt(terms) / 2)
    return UlpErrors(gathered.elements * factor, gathered.max * factor, gathered.rms * factor, gathered.tiles * factor)


def _terms(call: RebuiltCall, target: _Target) -> float:
    """How many terms an element of a result is the sum of, by the sizes of what goes in and comes out.

    A reduction of a tensor has as many as elements go into one; a product of matrices of m·k and k·n has √(mk · kn /
    mn) = k.
    """
    given = [each.numel() for each in (*call.inputs.values(), *call.own.values())]
    if target.backward is not None:
        given += [each.numel() for each in call.backwards[target.backward].arrived.values()]
    given = sorted(given, reverse=True)
    size = max(target.recorded.numel(), 1)
    terms = max(given, default=1) / size
    if CONTRACTING.search(call.name) and len(given) > 1:
        terms = max(terms, math.sqrt(given[0] * given[1] / size))
    return max(terms, 1.0)


def _named(call: RebuiltCall, target: _Target, judgement: ResultJudgement) -> ReplayedTensor:
    phase = call.call["phase"] if target.backward is None else "backward"
    dtype = str(target.recorded.dtype).removeprefix("torch.")
    return ReplayedTensor(phase, target.path, dtype, tuple(target.recorded.shape), judgement, target.backward)
