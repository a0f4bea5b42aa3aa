"""Real programs, recorded: no bit of them changes, nothing of the recorder remains, and two recordings agree.

Every program runs at every level there is, alone and all together. `tests/integration/programs` has the programs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import astray
from integration.programs import PROGRAMS, Program
from integration.programs.recorded import bare
from integration.programs.recordings import Recordings

ALL = ("module", "function", "op")
ALONE = [(level,) for level in ALL]
MODULE = ("module",)
TENSORS = ("gpt2", "in_place", "view_outputs", "autocast_bfloat16", "checkpointing", "complex_numbers", "two_threads")
"""The programs that are recorded with every value too."""

WALKED_TWICE = ("double_backward", "gradients_of_some")
"""Programs that go backward through one graph twice: the second time has the keys of the first."""


pytestmark = pytest.mark.usefixtures("one_thread")


def matrix(*quick: tuple[str, ...] | None) -> list[Any]:
    """Program × level × keep, each program at one of the quick levels in turn, or at none.

    What is not among them is slow, and so is what takes seconds by itself.
    """
    cases = []
    for number, (name, program) in enumerate(PROGRAMS.items()):
        for level in [*ALONE, ALL]:
            marks = [] if level == quick[number % len(quick)] and not program.slow else [pytest.mark.slow]
            cases.append(pytest.param(program, level, "stats", marks=marks, id=f"{name}-{'+'.join(level)}"))
        if name in TENSORS:
            cases += [
                pytest.param(program, level, "tensors", marks=pytest.mark.slow, id=f"{name}-{'+'.join(level)}-tensors")
                for level in (MODULE, ALL)
            ]
    return cases


@pytest.mark.parametrize(("program", "level", "keep"), matrix(ALL, ALL, MODULE))
def test_bits(program: Program, level: tuple[str, ...], keep: str, recordings: Recordings) -> None:
    watched = recordings.get(program, level, keep)
    alone = bare(program.name).state
    assert [name for name in {**alone, **watched.state} if alone.get(name) != watched.state.get(name)] == []
    assert watched.left == []
    assert watched.complaints == []
    run = astray.open(watched.path)
    assert run.complete
    assert run.problems == []


@pytest.mark.parametrize(("program", "level", "keep"), matrix(ALL, None, None))
def test_two_recordings_agree(program: Program, level: tuple[str, ...], keep: str, recordings: Recordings) -> None:
    if program.racy:
        pytest.skip("which call comes first is left to the threads")
    first, second = (recordings.get(program, level, keep, take).path for take in (0, 1))
    diff = astray.compare(first, second)
    assert diff.first is None
    assert {verdict: count for verdict, count in diff.counts.items() if count and verdict != "identical"}.keys() <= {
        "unknown"  # tensors whose numbers cannot be read, which each of the recordings says of them
    }


@pytest.mark.parametrize(("program", "level", "keep"), matrix(ALL))
def test_rows_have_one_key_each_and_hang_together(
    program: Program, level: tuple[str, ...], keep: str, recordings: Recordings
) -> None:
    rank = astray.open(recordings.get(program, level, keep).path).ranks[0]
    calls = {name: list(rank.calls[name]) for name in rank.calls.names}
    keys = list(zip(*(calls[name] for name in ("step", "micro", "site", "call", "phase", "recompute")), strict=True))
    if program.name not in WALKED_TWICE:
        tensors = zip(rank.call_rows.tolist(), rank.tensors["role"], rank.tensors["path"], strict=True)
        counted = Counter((keys[call], role, path) for call, role, path in tensors)
        assert [key for key, count in counted.items() if count > 1][:3] == []
    rows = {seq: row for row, seq in enumerate(calls["seq"])}
    parents = [rows.get(seq) for seq in calls["parent"]]
    sites, kinds, phases = calls["site"], calls["kind"], calls["phase"]
    for row, parent in enumerate(parents):
        if parent is None:
            assert calls["parent"][row] < 0
            continue
        assert parent < row
        assert keys[parent][:2] == keys[row][:2]  # step and micro step
        assert phases[parent] == ("update" if phases[row] == "update" else "forward")
        if phases[row] == "backward" and not (kinds[row] in ("function", "op") and kinds[parent] == "module"):
            # The backward of a call. Otherwise it is a call that the backward of a module makes.
            assert (kinds[parent], sites[parent], keys[parent][3]) == (kinds[row], sites[row], keys[row][3])
        enclosing: int | None = parent
        while enclosing is not None and kinds[enclosing] != "module":
            enclosing = parents[enclosing]
        if kinds[row] in ("function", "op") and enclosing is not None:
            assert sites[row].startswith(f"{sites[enclosing]}/")
