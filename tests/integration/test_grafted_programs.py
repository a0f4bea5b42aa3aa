"""Real programs that are given what they have computed themselves: no bit of them changes, and nothing remains.

`astray run --single-step` of the same program, once as it is, and once with every tensor replaced by one with the same
numbers: what is grafted has the place of the program's own in its graph, its memory and its objects.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import astray
from astray.capture.graft_words import graft_notes
from astray.capture.pytorch.experiments import applied_graft
from integration.programs import PROGRAMS, Program
from integration.programs.recorded import bare, record

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("in_place", "view_outputs", "checkpointing", "double_backward", "two_threads", "complex_numbers")
WITHOUT_VALUES = ("transforms_of_functions", "compiled_function_by_aot_eager", "compiled_function_by_inductor")
"""Programs of which there is nothing to graft."""

OTHER_SUMS = ("recurrent",)
"""A gradient that is the sum of several is summed in another order where a tensor of ours lies in between."""

CASES = [
    pytest.param(program, marks=[] if name in QUICK else pytest.mark.slow, id=name)
    for name, program in PROGRAMS.items()
    if name not in WITHOUT_VALUES and not program.racy
]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("program", CASES)
def test_bits(program: Program, is_replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = ("module", "function")
    record(program, tmp_path / "a", level=level, keep="tensors")
    if is_replaced:
        monkeypatch.setattr(applied_graft, "have_same_bits", lambda first, second: first is second)
    grafted = record(program, tmp_path / "b", level=level, keep="fingerprint", graft=str(tmp_path / "a"))
    alone = bare(program.name).state
    different = [name for name in {**alone, **grafted.state} if alone.get(name) != grafted.state.get(name)]
    assert different == [] or (is_replaced and program.name in OTHER_SUMS)
    assert grafted.left == []
    assert grafted.complaints == []
    notes = [note for rank in astray.open(tmp_path / "b").ranks.values() for note in graft_notes(rank.setup)]
    assert sum(note.tensors for note in notes) > 0
    assert is_replaced or not any(note.differed for note in notes)
