"""Executes the calls of a run again and judges each: what `run.replay()` and `astray replay` do.

Reads a run, feeds `report`. One call is in memory at a time; of those that are done only what was judged is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from astray.errors import RunError, UsageError
from astray.records import Frame
from astray.replay.call_judgement import ReplayedTensor, judge_call, rank_of
from astray.replay.calls import CannotReplayError, RecordedCalls
from astray.steps import StepSelection
from astray.store import RunData
from astray.wording import counted, did_you_mean, numeral

Progress = Callable[[int, int], None]


class ReplayedCall:
    """A call that was executed again, with each tensor it gave.

    call: its row of the table of calls, with the `rank`. tensors: the worst first. lost: why some of its tensors are
    not there. stack: the lines of the program that made it.
    """

    def __init__(
        self, call: dict[str, Any], tensors: list[ReplayedTensor], lost: list[str], stack: list[Frame]
    ) -> None:
        self.call = call
        self.tensors = sorted(tensors, key=lambda each: -rank_of(each.judgement))
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
        self.calls = sorted(calls, key=lambda each: -rank_of(each.worst.judgement))
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


class SelectedCalls(NamedTuple):
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
    found = _wanted(run, site, StepSelection.parse(steps), run.ranks if rank is None else [rank])
    replayed, left_out = list[ReplayedCall](), dict[str, dict[str, int]]()
    for done, (calls, row) in enumerate(found):
        if progress is not None:
            progress(done, len(found))
        try:
            replayed.append(_replayed(calls, row))
        except CannotReplayError as error:
            types, kind = left_out.setdefault(str(error), {}), calls.call(row)["type"]
            types[kind] = types.get(kind, 0) + 1
    return Replay(str(run.path), replayed, left_out)


def _wanted(
    run: RunData, site: str | None, steps: StepSelection, ranks: Iterable[int]
) -> list[tuple[RecordedCalls, int]]:
    """The rows of the calls that are asked for. Raises when there are none."""
    selection = parse_selection(site)
    found, sites = list[tuple[RecordedCalls, int]](), set[str]()
    for rank in ranks:
        calls = RecordedCalls(run.ranks[rank])
        for row in calls.rows():
            call = calls.call(row)
            sites.add(call["site"])
            if call["step"] in steps and (selection is None or selection.wants(call)):
                found.append((calls, row))
    if not found:
        raise no_such_call(run, site, selection, steps, sites)
    return found


def _replayed(calls: RecordedCalls, row: int) -> ReplayedCall:
    """The call of a row, judged. Raises CannotReplayError with the reason."""
    with _unchanged_generator():
        rebuilt = calls.rebuild(row)
        tensors = list(judge_call(rebuilt, calls.flags))
    if not tensors:
        raise CannotReplayError(rebuilt.lost[0] if rebuilt.lost else "no result that can be judged")
    return ReplayedCall(rebuilt.call, tensors, rebuilt.lost, calls.stack(rebuilt.call))


def parse_selection(site: str | None) -> SelectedCalls | None:
    """`h.2.mlp/gelu#1`: a site, and which of its calls."""
    if site is None:
        return None
    found = re.fullmatch(r"(.+)#(\d+)", site)
    number = numeral(found[2]) if found else None
    return SelectedCalls(site, None) if found is None or number is None else SelectedCalls(found[1], number)


def no_such_call(
    run: RunData, site: str | None, selection: SelectedCalls | None, steps: StepSelection, sites: set[str]
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


@contextmanager
def _unchanged_generator() -> Iterator[None]:
    """Puts torch's generator back: replaying draws nothing from a program that calls it."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
