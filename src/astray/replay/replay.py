"""Executes the calls of a run again and judges each result: what `run.replay()` and `astray replay` do.

Every call is made in float64 and in its own dtype. Only where that does not explain the recorded result, it is made in
further ways (other layouts, rounded once from float32, inputs rounded otherwise), so that nothing is called wrong which
a right implementation gives too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

from astray.errors import RunError, UsageError
from astray.records import Frame
from astray.replay.calls import CannotReplayError, RebuiltCall, RecordedCalls
from astray.replay.exact import HALVES, Executed, Way, execute, plans
from astray.replay.functions import BREAKING_TIES, COMPOSED, CONTRACTING
from astray.replay.judging import Errors, Judgement, Scale, judge, judge_equal, worst
from astray.steps import StepSelection
from astray.store import RunData
from astray.wording import counted, did_you_mean, numeral

_DRAWS = 4
"""Of inputs rounded otherwise: one draw may leave a single sum unchanged by chance, four hardly do."""

_TF32 = 11
"""Bits of a significand in TF32, with the one that is not stored."""

Progress = Callable[[int, int], None]


class ReplayedTensor(NamedTuple):
    """A result, or a gradient that a call sent, beside the exact one."""

    phase: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    judgement: Judgement


class ReplayedCall:
    """A call that was executed again, with each tensor it gave.

    call: its row of the table of calls, with the `rank`. tensors: the worst first. lost: why some of its tensors are
    not there. stack: the lines of the program that made it.
    """

    def __init__(
        self, call: dict[str, Any], tensors: list[ReplayedTensor], lost: list[str], stack: list[Frame]
    ) -> None:
        self.call = call
        self.tensors = sorted(tensors, key=lambda each: -_rank_of(each.judgement))
        self.lost = lost
        self.stack = stack

    @property
    def site(self) -> str:
        return str(self.call["site"])

    @property
    def worst(self) -> ReplayedTensor:
        return self.tensors[0]

    @property
    def stands_out(self) -> bool:
        """Whether a result is further off than rounding explains."""
        return self.worst.judgement.surprise > 1

    def __repr__(self) -> str:
        judgement = self.worst.judgement
        return f"<ReplayedCall {self.site}#{self.call['call']}: {judgement.ulps:.2g} ulps, ratio {judgement.ratio:.2g}>"


def _rank_of(judgement: Judgement) -> float:
    """Numbers that a comparison can sort by: NaN is the worst."""
    return math.inf if math.isnan(judgement.surprise) else judgement.surprise


class Replay:
    """The calls of a run beside what they should have given, the worst first.

    >>> replay = astray.open("runs/a").replay()
    >>> replay
    <Replay of runs/a: 46 of 47 calls replayed, 1 stands out>
    >>> replay.calls[0].site, replay.calls[0].worst.judgement.ratio
    ('h.2.mlp.proj/linear', 10.2)
    >>> print(replay)                         # as `astray replay RUN` shows it

    calls: those that were executed again. left_out: reasons, each with the types of calls that it holds for and how
    many.
    """

    def __init__(self, path: str, calls: list[ReplayedCall], left_out: dict[str, dict[str, int]]) -> None:
        self.path = path
        self.calls = sorted(calls, key=lambda each: -_rank_of(each.worst.judgement))
        self.left_out = left_out

    @property
    def stands_out(self) -> list[ReplayedCall]:
        """The calls with a result that is further off than rounding explains."""
        return [call for call in self.calls if call.stands_out]

    @property
    def total(self) -> int:
        return len(self.calls) + sum(sum(types.values()) for types in self.left_out.values())

    def __getitem__(self, site: str) -> list[ReplayedCall]:
        """The calls of a site, in the order in which they were made."""
        found = [call for call in self.calls if call.site == site]
        return sorted(found, key=lambda each: (each.call["rank"], each.call["seq"]))

    def __repr__(self) -> str:
        return (
            f"<Replay of {self.path}: {len(self.calls):,} of {counted(self.total, 'call')} replayed, {self._verdict}>"
        )

    @property
    def _verdict(self) -> str:
        number = len(self.stands_out)
        return "nothing stands out" if not number else f"{number:,} stand{'s' * (number == 1)} out"

    def __str__(self) -> str:
        from astray.replay.report import render

        return render(self)


class _Selected(NamedTuple):
    """A site to replay, and which of its calls."""

    site: str
    call: int | None

    def wants(self, call: dict[str, Any]) -> bool:
        site = call["site"]
        inside = site == self.site or site.startswith((f"{self.site}/", f"{self.site}."))
        return inside and (self.call is None or call["call"] == self.call)


def replay(
    run: RunData,
    site: str | None = None,
    *,
    steps: str | int | Sequence[int] | None = None,
    rank: int | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Executes the calls of a run again. See `astray.Run.replay` for the arguments."""
    if run.info.framework != "torch":
        raise RunError(
            f"{run.path} was recorded from {run.info.framework or 'no framework'}, and only calls of PyTorch can be "
            "replayed. Compare it with another run instead."
        )
    if rank is not None and rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has {', '.join(map(str, run.ranks)) or 'none'}.")
    selection, wanted_steps = _parsed(site), StepSelection.parse(steps)
    found, sites = [], set[str]()
    for number, each in run.ranks.items():
        calls = RecordedCalls(each)
        if rank is not None and number != rank:
            continue
        for row in calls.rows():
            call = calls.call(row)
            sites.add(call["site"])
            if call["step"] in wanted_steps and (selection is None or selection.wants(call)):
                found.append((calls, each, row, call))
    if not found:
        raise _nothing(run, site, selection, wanted_steps, sites)
    replayed, left_out = list[ReplayedCall](), dict[str, dict[str, int]]()
    for done, (calls, each, row, call) in enumerate(found):
        if progress is not None:
            progress(done, len(found))
        try:
            rebuilt = calls.rebuild(row)
            with _unchanged_generator():
                tensors = list(judge_call(rebuilt, _flags(each.setup)))
            if not tensors:
                raise CannotReplayError(rebuilt.lost[0] if rebuilt.lost else "no result that can be judged")
            stack = each.stack(call["stack"]) if call["stack"] is not None else []
            replayed.append(ReplayedCall(call, tensors, rebuilt.lost, stack))
        except CannotReplayError as error:
            types = left_out.setdefault(str(error), {})
            types[call["type"]] = types.get(call["type"], 0) + 1
    return Replay(str(run.path), replayed, left_out)


def _parsed(site: str | None) -> _Selected | None:
    """`h.2.mlp/gelu#1`: a site, and which of its calls."""
    if site is None:
        return None
    found = re.fullmatch(r"(.+)#(\d+)", site)
    number = numeral(found[2]) if found else None
    return _Selected(site, None) if found is None or number is None else _Selected(found[1], number)


def _nothing(
    run: RunData, site: str | None, selection: _Selected | None, steps: StepSelection, sites: set[str]
) -> UsageError | RunError:
    if not sites:
        return RunError(
            f"{run.path} has no calls of functions, modules or operators. Record with --level function --keep tensors."
        )
    where = f" in step {steps}" if steps else ""
    if selection is None:
        return UsageError(f"{run.path} has no calls{where}; it has steps {', '.join(map(str, run.steps[:10]))}.")
    near = did_you_mean(selection.site, sites)
    return UsageError(f"{run.path} has no call {site!r}{where}.{near} `astray show {run.path}` lists the sites.")


def _flags(setups: Sequence[Any]) -> dict[str, Any]:
    """What torch was set to, all steps together: a flag that was on for one step may have been on in each."""
    flags: dict[str, Any] = {}
    for setup in setups:
        if setup.subject == "torch":
            flags |= setup.values
    return flags


# -- one call ----------------------------------------------------------------------------------------------------------


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
                judgement = min(judgement, _judgement(ways, target, computed, computed), key=_rank_of)
        elif BREAKING_TIES.fullmatch(call.name):
            continue
        else:
            judgement = judge_equal(target.recorded, computed)
        yield _named(call, target, judgement)


def _targets(call: RebuiltCall) -> list[_Target]:
    """What is judged of a call."""
    targets = [_Target(kept, path, None) for path, kept in call.kept.items()]
    for number, backward in enumerate(call.backwards):
        targets += [_Target(sent, path, number) for path, sent in backward.sent.items()]
    return targets


def _judgement(ways: _Ways, target: _Target, computed: torch.Tensor, true: torch.Tensor) -> Judgement:
    """A tensor beside the plain ones; more of these are computed only where they are needed."""
    scale = Scale(true, rounding_dtype(target.recorded, ways.first))
    errors, plain = scale.errors(target.recorded, computed), [scale.errors(computed, computed)]
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


@contextmanager
def _unchanged_generator() -> Iterator[None]:
    """Puts torch's generator back: replaying draws nothing from a program that calls it."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


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


def _order_of_sums(call: RebuiltCall, way: Way, target: _Target, scale: Scale) -> Errors:
    """How far a result may be off because of the order in which it was summed, at most.

    Inputs that are changed by half an ulp of the working precision change a backward-stable result by as much as one
    rounding of each term. A sum of n terms in a row rounds n times, and gathers √n/2 of that; blocks and trees gather
    less. Of 16 bits the working precision is float32, but for kernels that round in between: there inputs are changed
    by half of their own ulp.
    """
    precision = torch.float64 if scale.dtype == torch.float64 else torch.float32
    if COMPOSED.search(call.name) and scale.dtype in HALVES:
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
    factor = 1.0 if precision in HALVES else max(1.0, math.sqrt(_terms(call, target)) / 2)
    return Errors(gathered.elements * factor, gathered.max * factor, gathered.rms * factor, gathered.tiles * factor)


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


def _named(call: RebuiltCall, target: _Target, judgement: Judgement) -> ReplayedTensor:
    phase = call.call["phase"] if target.backward is None else "backward"
    dtype = str(target.recorded.dtype).removeprefix("torch.")
    return ReplayedTensor(phase, target.path, dtype, tuple(target.recorded.shape), judgement)
