"""The true producer of NaN and infinity, in programs that are really recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import astray
from astray.nonfinite import alarms
from astray.nonfinite.step_rows import function_of
from nonfinite import accidents
from nonfinite.accidents import ACCIDENTS, PEACEFUL, Program, origin_line
from nonfinite.recording import record

LEVELS = (("function",), ("module", "function"))


OPS = {
    accidents.fully_masked_row: ("softmax", "forward", "fully masked"),
    accidents.where_and_sqrt: ("div", "backward", "division by zero"),
    accidents.half_scores: ("matmul", "forward", "overflow"),
    accidents.half_underflow: ("reciprocal", "forward", "underflow then reciprocal"),
    accidents.norm_by_hand: ("div", "backward", "division by zero"),
    accidents.angle_by_hand: ("div", "forward", "division by zero"),
    accidents.cross_entropy_by_hand: ("log", "forward", "log of zero"),
    accidents.naive_softplus: ("exp", "forward", "overflow"),
}


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
@pytest.mark.parametrize("program", ACCIDENTS, ids=lambda program: program.__name__)
def test_functions_name_the_producer_and_its_line(program: Program, levels: tuple[str, ...], tmp_path: Path) -> None:
    (alarm,) = alarms(record(tmp_path / "run", program, *levels))
    function, phase, word = ACCIDENTS[program]
    assert (function_of(alarm.origin.type), alarm.origin.phase, alarm.kind.word) == (function, phase, word)
    assert alarm.origin.frame is not None
    assert (alarm.origin.frame.function, alarm.origin.frame.line) == (program.__name__, origin_line(program))
    assert alarm.chain[0].site == alarm.origin.site == f"<root>/{alarm.origin.site.split('/')[1]}"
    assert alarm.surfaced


@pytest.mark.parametrize("program", OPS, ids=lambda program: program.__name__)
def test_ops_name_the_op(program: Program, tmp_path: Path) -> None:
    alarm = alarms(record(tmp_path / "run", program, "op"))[0]
    function, phase, word = OPS[program]
    assert alarm.origin.type.startswith("aten.")
    assert (function_of(alarm.origin.type), alarm.origin.phase, alarm.kind.word) == (function, phase, word)
    if phase == "forward":
        assert alarm.origin.frame is not None
        assert alarm.origin.frame.line == origin_line(program)


@pytest.mark.parametrize("program", ACCIDENTS, ids=lambda program: program.__name__)
def test_of_all_levels_the_innermost_call_is_named(program: Program, tmp_path: Path) -> None:
    alarm = alarms(record(tmp_path / "run", program, "module", "function", "op"))[0]
    assert (alarm.origin.kind, alarm.origin.phase) == ("op", ACCIDENTS[program][1])
    assert alarm.origin.frame is not None
    assert alarm.origin.frame.line == origin_line(program)  # in backward, too: of the function it is the backward of
    assert alarm.enclosing[0] == ("<root>", "Model")


@pytest.mark.parametrize("program", ACCIDENTS, ids=lambda program: program.__name__)
def test_modules_name_the_module_whose_own_code_it_was(program: Program, tmp_path: Path) -> None:
    (alarm,) = alarms(record(tmp_path / "run", program, "module"))
    assert (alarm.origin.site, alarm.origin.phase) == ("<root>", ACCIDENTS[program][1])
    assert alarm.kind.word == "unknown"
    assert "level='function'" in alarm.kind.advice


@pytest.mark.parametrize("levels", [("module",), *LEVELS, ("op",), ("module", "function", "op")], ids="+".join)
@pytest.mark.parametrize("program", PEACEFUL, ids=lambda program: program.__name__)
def test_what_is_killed_before_it_surfaces_is_not_an_alarm(
    program: Program, levels: tuple[str, ...], tmp_path: Path
) -> None:
    found = alarms(record(tmp_path / "run", program, *levels, steps=2))
    assert list(found) == []
    assert str(found).startswith("✓ No NaN or infinity reached a result")


def test_an_accident_that_was_killed_is_counted(tmp_path: Path) -> None:
    found = alarms(record(tmp_path / "run", accidents.torchs_own_norm, "op"))
    assert (len(found), found.harmless) == (0, 1)  # torch divides 0 by 0, and fills the result with zeros
    assert alarms(record(tmp_path / "mask", accidents.causal_mask, "op")).harmless == 0


def test_memory_that_nobody_filled_is_told_from_data_when_modules_are_recorded_too(tmp_path: Path) -> None:
    program = accidents.unfilled_memory
    (alarm,) = alarms(record(tmp_path / "both", program, "module", "function"))
    assert (alarm.origin.site, alarm.kind.word) == ("<root>/mul", "uninitialised memory")
    assert alarm.origin.frame is not None
    assert alarm.origin.frame.line == origin_line(program)
    (alarm,) = alarms(record(tmp_path / "functions", program, "function"))
    assert (alarm.origin.site, alarm.kind.word) == ("<root>/mul", "bad input")


def test_an_alarm_has_numbers_an_element_and_the_way(tmp_path: Path) -> None:
    (alarm,) = alarms(record(tmp_path / "run", accidents.half_scores, "function"))
    (output,) = alarm.offenders
    assert (output.role, output.path, output.dtype, output.shape) == ("output", "out", "float16", (4, 4))
    assert output.statistics.inf == 12
    assert output.statistics.nan == 0
    assert output.first is not None
    assert (output.first.index, output.first.value) == ((0, 0), float("inf"))
    assert [(one.name, one.statistics.absmax) for one in alarm.given] == [("input `0`", 485.25), ("input `1`", 485.25)]
    assert "65504" in alarm.kind.text
    assert "485.2 and 485.2" in alarm.kind.text
    assert [call.site for call in alarm.chain] == ["<root>/matmul", "<root>/softmax", "<root>/float", "/sum"]
    assert [str(one) for one in alarm.surfaced][:2] == ["the loss (/sum)", "the gradient of lin.bias"]


def test_a_long_way_is_shortened_in_the_middle(tmp_path: Path) -> None:
    def program(lin, x):  # type: ignore[no-untyped-def]
        h = (lin(x) * 0).log()
        for _ in range(20):
            h = h * 1.5
        return h

    (alarm,) = alarms(record(tmp_path / "run", program, "function"))
    assert len(alarm.chain) == 8
    assert alarm.skipped == 14
    assert (alarm.chain[0].site, alarm.chain[-1].site) == ("<root>/log", "/sum")
    assert "… 14 more calls …" in str(alarm)


def test_a_gradient_that_a_loss_outside_of_modules_spoils_is_nobodys_inside(tmp_path: Path) -> None:
    """It arrives at the model and, with the same bits, at its last part: neither has made it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))
    torch.manual_seed(0)
    with astray.record(tmp_path / "run", model, level="module") as recorder:
        (model(torch.randn(5, 4)) * 0).sqrt().sum().backward()
        recorder.step()
    (alarm,) = astray.open(tmp_path / "run").alarms().alarms
    assert (alarm.origin.site, alarm.origin.phase) == ("<root>", "backward")
    assert alarm.kind.text.startswith("The gradient that arrives at it holds 15 NaN among 15 elements, and comes from")
    assert [(one.role, one.forward) for one in (*alarm.offenders, *alarm.given)] == [
        ("input", False),
        ("input", True),
        ("output", True),
    ]
