"""Which calls of a comparison are replayed, and what follows. What replays say is made up here: see `SAYS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.comparison.comparison import ComparisonData, compare
from astray.comparison.judge.replays import CallReplay, NotReplayedError, ReplayedResult
from astray.comparison.ranks import replaying
from astray.report import text
from astray.store import RankRun, RunInfo
from record_builders import Builder

REPLAYER = f"{__name__}:MadeUp"

SAYS: dict[str, float | str] = {}
"""By how much a result of a site stands out in the candidate; −1 in the reference; a text: why it is not replayed."""

REPLAYED: list[str] = []


class MadeUp:
    def __init__(self, rank: RankRun) -> None:
        self.rank = rank

    def __call__(self, call: int) -> CallReplay:
        site, is_candidate = self.rank.calls["site"][call], self.rank.tensors["note"][0] == "candidate"
        REPLAYED.append(site)
        said = SAYS.get(site, 0.25)
        if isinstance(said, str):
            raise NotReplayedError(said)
        if said < 0:
            said, is_candidate = -said, not is_candidate
        surprise = said if is_candidate or said < 1 else 0.25
        rows = np.flatnonzero(self.rank.call_rows == call).tolist()
        results = [row for row in rows if self.rank.tensors["role"][row] == "output"]
        found = ReplayedResult("float32", 4 * surprise, 0.5, 8 * surprise, 1.0, surprise)
        return CallReplay(dict.fromkeys(results, found), False, frozenset({"float32"}), self.values)

    def values(self, row: int) -> tuple[Any, Any]:
        """Both runs compute exactly: whatever differs came in, as through a function that is ill-conditioned."""
        recorded = np.asarray(self.rank.values(row), np.float64)
        return recorded, recorded


@pytest.fixture(autouse=True)
def nothing_said():
    yield
    SAYS.clear()
    REPLAYED.clear()


def program(off: dict[str, float] | None = None, *, args: str = '{"args":["<tensor>"]}', ranks: int = 1) -> astray.Run:
    """Four functions in a row. Of a candidate `off` has factors of their results."""
    note = "reference" if off is None else "candidate"
    made = Builder(keep="stats,fingerprint,tensors", world_size=ranks)
    for number in range(ranks):
        rank, random = made.rank(number), np.random.default_rng(number)
        flowing = random.normal(size=(8, 16)).astype(np.float32)
        for place in range(4):
            site = f"/f{place}"
            call = rank.call(site, f"torch.f{place}", kind="function", args=args)
            rank.tensor(call, "input", "0", flowing, value=place, note=note)
            weight = random.normal(size=(16, 16)) / 4 * (off or {}).get(site, 1.0)
            flowing = (flowing.astype(np.float64) @ weight).astype(np.float32)
            rank.tensor(call, "output", "out", flowing, value=place + 1, note=note)
    info = RunInfo(astray="0", created="", world_size=ranks, framework="torch")
    return astray.Run(Path("runs/a"), info, made.run.ranks)


SLIGHTLY = {"/f1": 1 + 2e-6}
"""Half of what a call of float32 may be off by."""

OFF = {"/f0": 1 + 3e-7, "/f1": 1.01}
"""The result of f1 is off by far more than its input, which agrees."""


def compared(off: dict[str, float], **options: Any) -> ComparisonData:
    return compare(program(), program(off), **{"replayer": REPLAYER} | options)


def test_runs_that_are_identical_have_nothing_replayed():
    assert compare(program(), program({}), replayer="there.is.no:such").same
    assert not REPLAYED


def test_a_call_that_stands_out_is_wrong_by_itself_and_certainly_so():
    SAYS["/f1"] = 3.0
    diff = compared(SLIGHTLY)
    assert compare(program(), program(SLIGHTLY)).same  # without replays it is rounding
    first = diff.first
    assert (first.site, first.rule, first.surprise, first.sureness) == ("/f1", "replay", 3.0, "certain")
    assert first.replay.finding == "candidate"
    assert diff.suspects[0].replay == first.replay
    report = str(text.render(diff, width=200))
    assert "replay       the candidate's result is 12 ulps from the exact one, 24 times as far as float32 can" in report


def test_the_reference_may_be_the_one_that_is_wrong():
    SAYS["/f1"] = -3.0
    first = compared({"/f1": 1.01}).first
    assert (first.site, first.replay.finding) == ("/f1", "reference")
    assert str(first.replay).startswith("it is the reference that is wrong here: ")


def test_what_only_passed_a_difference_on_is_cleared_where_another_call_is_proven_wrong():
    SAYS["/f3"] = 5.0
    diff = compared(OFF | {"/f3": 1.02})
    first = diff.first
    assert (first.site, first.rule) == ("/f3", "replay")
    assert "1 tensor before it, first step 0, forward, /f1 (torch.f1), output" in first.evidence[-1]
    row = next(row for row in diff.replays if diff.pairs["site"][row] == "/f1")
    assert (diff.pairs["rule"][row], diff.pairs["verdict"][row]) == ("replay", "drifting")


def test_without_a_proof_nothing_is_cleared():
    """It may have begun where nothing was recorded: the call that shows it is the best that is known."""
    first = compared(OFF).first
    assert (first.site, first.rule) == ("/f1", "model")
    assert first.replay.finding == "inputs"


def test_calls_of_other_arguments_are_not_cleared():
    SAYS["/f3"] = 5.0
    diff = compare(program(), program(OFF | {"/f3": 1.02}, args='{"args":["<tensor>",2]}'), replayer=REPLAYER)
    assert diff.first.site == "/f1"
    assert diff.first.replay.finding == "arguments"


def test_a_tolerance_is_final():
    SAYS["/f1"] = 3.0
    assert compared(SLIGHTLY, tolerances={"f": 1e-3}).same
    assert compared({"/f1": 1.01}, tolerances={"f": 1e-3}).first.rule == "tolerance"


def test_where_every_bit_counts_replays_say_whose_are_worse_and_no_more():
    SAYS["/f2"] = 3.0
    first = compared(SLIGHTLY, exact=True).first
    assert (first.site, first.rule) == ("/f1", "bits")
    assert first.replay is not None


def test_what_cannot_be_replayed_is_judged_as_without_and_says_why():
    SAYS["/f1"] = "random numbers"
    first = compared({"/f1": 1.01}).first
    assert (first.site, first.rule) == ("/f1", "model")
    assert str(first.replay) == "not replayed: random numbers"


def test_without_the_framework_nothing_is_replayed():
    first = compared({"/f1": 1.01}, replayer="no_such_framework.replay:Rank").first
    assert (first.site, first.rule) == ("/f1", "model")
    assert str(first.replay) == "not replayed: it takes no_such_framework, which is not installed here"


def test_every_rank_has_its_own_replays():
    SAYS["/f1"] = 3.0
    diff = compare(program(ranks=2), program(SLIGHTLY, ranks=2), replayer=REPLAYER)
    assert [(first.rank, first.site, first.replay.finding) for first in diff.firsts] == [
        (0, "/f1", "candidate"),
        (1, "/f1", "candidate"),
    ]
    wrong = [row for row, replay in diff.replays.items() if replay.finding == "candidate"]
    assert [(diff.pairs["rank"][row], diff.pairs["site"][row]) for row in wrong] == [(0, "/f1"), (1, "/f1")]


def test_a_call_is_replayed_once_in_each_run_and_a_rank_has_no_more_than_some(monkeypatch):
    SAYS["/f3"] = 5.0
    compared(OFF | {"/f3": 1.02})
    assert len(REPLAYED) == 2 * len(set(REPLAYED))
    REPLAYED.clear()
    monkeypatch.setattr(replaying, "MOST_CALLS", 1)
    compared(OFF | {"/f3": 1.02})
    assert REPLAYED == ["/f1", "/f1"]
