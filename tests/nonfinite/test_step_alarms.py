"""The rows of a single step, as they lie in memory, and what cannot be shown by a small program."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import astray
from astray.nonfinite import alarms, step_alarms
from nonfinite import accidents
from nonfinite.recording import record


def test_the_rows_of_one_step_are_enough(tmp_path: Path) -> None:
    run = record(tmp_path / "run", accidents.where_and_sqrt, "module", "function", steps=2, optimizer="calls")
    rank = run.ranks[0]
    steps = rank.calls.numbers("step")
    found = step_alarms(
        rank.calls.take(steps == 0), rank.tensors.take(steps[rank.call_rows] == 0), rank=5, stacks=rank.stack
    )
    (alarm,) = found.alarms
    assert (found.step, found.rank, found.updated) == (0, 5, True)
    assert (alarm.origin.site, alarm.origin.phase, alarm.rank) == ("<root>/sqrt", "backward", 5)
    assert alarm.key == alarms(run)[0].key
    (bare,) = step_alarms(rank.calls.take(steps == 0), rank.tensors.take(steps[rank.call_rows] == 0)).alarms
    assert bare.origin.frame is None


def test_a_step_without_rows_has_no_alarms(tmp_path: Path) -> None:
    rank = record(tmp_path / "run", accidents.naive_softplus, "function").ranks[0]
    nothing = np.zeros(0, np.int64)
    assert step_alarms(rank.calls.take(nothing), rank.tensors.take(nothing)).alarms == ()


def test_an_alarm_goes_to_json(tmp_path: Path) -> None:
    (alarm,) = alarms(record(tmp_path / "run", accidents.half_scores, "function"))
    told = json.loads(json.dumps(alarm.to_dict(), allow_nan=False))
    assert told["origin"]["site"] == "<root>/matmul"
    assert told["origin"]["stack"][0]["function"] == "half_scores"
    assert told["offenders"][0]["first"] == {"index": [0, 0], "value": "inf", "part": None, "whole": None}
    assert told["offenders"][0]["statistics"]["inf"] == 12
    assert told["offenders"][0]["statistics"]["first_bad_value"] == "inf"
    assert told["kind"]["word"] == "overflow"


def test_the_report_says_who_where_why_and_what_next(tmp_path: Path) -> None:
    found = alarms(record(tmp_path / "run", accidents.fully_masked_row, "module", "function"))
    line = accidents.origin_line(accidents.fully_masked_row)
    assert str(found).splitlines() == [
        "✗ NaN from step 0, forward, call 0 of <root>/softmax (torch.softmax)",
        f"    accidents.py:{line} in fully_masked_row    return torch.softmax(scores, -1)  # origin",
        "    inside       <root> (Model)",
        "    kind         fully masked. Its input `0` holds 4 Inf among 16 elements: where every entry of a",
        "                 row is −inf there is nothing to divide by, and it gives 4 NaN among 16 elements.",
        "",
        "               tensor       min       max       zeros  NaN, Inf",
        "    output     float32 4×4  0.055165  0.494883  0      4 NaN of 16",
        "    input `0`  float32 4×4  -1.61737  0.71418   0      4 Inf of 16",
        "    first        element [1, 0] of output is nan",
        "    first        element [1, 0] of input `0` is -inf",
        "",
        "    surfaced     the output of <root>, the loss (/sum)",
        "    way there    <root>/softmax → <root>",
        "    next         Leave an entry of each row unmasked, or replace the rows that are all masked behind",
        "                 it.",
    ]


class Attention(nn.Module):
    """Attention with a mask that is given, or kept as a buffer."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.lin(x) + (self.bias if mask is None else mask)
        return torch.softmax(scores, -1)


CAUSAL = torch.full((4, 4), float("-inf")).triu(1)
CLOSED = torch.full((4, 4), float("-inf"))


@pytest.mark.parametrize("levels", [("module",), ("function",), ("module", "function", "op")], ids="+".join)
def test_a_mask_that_is_given_or_kept_is_intended(levels: tuple[str, ...], tmp_path: Path) -> None:
    for name, model, arguments in (("given", Attention(), (CAUSAL,)), ("kept", Attention(CAUSAL), ())):
        with astray.record(tmp_path / name, model, level=list(levels)) as recorder:
            model(torch.ones(4, 4), *arguments).sum().backward()
            recorder.step()
        assert list(alarms(tmp_path / name)) == []


def test_a_mask_that_leaves_nothing_is_the_softmaxs_fault(tmp_path: Path) -> None:
    for name, model, arguments in (("given", Attention(), (CLOSED,)), ("kept", Attention(CLOSED), ())):
        with astray.record(tmp_path / name, model, level=["module", "function"]) as recorder:
            model(torch.ones(4, 4), *arguments)
            recorder.step()
        (alarm,) = alarms(tmp_path / name)
        assert (alarm.origin.site, alarm.kind.word) == ("<root>/softmax", "fully masked")


def test_a_loss_that_counts_a_masked_place_is_an_alarm(tmp_path: Path) -> None:
    def program(lin: nn.Module, x: Tensor) -> Tensor:
        logits = lin(x).masked_fill(torch.eye(4).bool(), float("-inf"))
        return F.cross_entropy(logits, torch.arange(4))

    (alarm,) = alarms(record(tmp_path / "run", program, "function"))
    assert (alarm.origin.site, alarm.kind.word) == ("<root>/cross_entropy", "infinity in a result")


def test_infinities_on_purpose_that_are_multiplied_by_zero(tmp_path: Path) -> None:
    def program(lin: nn.Module, x: Tensor) -> Tensor:
        return lin(x) + torch.full((4, 4), float("-inf")) * 0

    (alarm,) = alarms(record(tmp_path / "run", program, "function"))
    assert (alarm.origin.site, alarm.kind.word) == ("<root>/mul", "0·inf")


def test_modules_inside_modules_are_not_blamed_for_what_they_were_given(tmp_path: Path) -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x * 0)

    inner = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 4))
    (alarm,) = alarms(record(tmp_path / "run", nn.Sequential(inner, nn.Linear(4, 4)), "module"))
    assert (alarm.origin.site, alarm.origin.type) == ("0.1", "Logarithm")
    assert alarm.enclosing == (("<root>", "Sequential"), ("0", "Sequential"))
    assert [call.site for call in alarm.chain] == ["0.1", "0.2", "0", "1", "<root>"]


def test_two_accidents_are_two_alarms(tmp_path: Path) -> None:
    def program(lin: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([(lin(x) * 0).log(), (lin(x) * 1e4).exp()])

    found = alarms(record(tmp_path / "run", program, "function"))
    assert [(alarm.origin.site, alarm.kind.word) for alarm in found] == [
        ("<root>/log", "log of zero"),
        ("<root>/exp", "overflow"),
    ]
    assert "These have other origins:" in str(found)


def test_what_is_computed_again_in_the_backward_pass_is_not_blamed_twice(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    def program(lin: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda h: (lin(h) * 0).log(), x, use_reentrant=False)  # type: ignore[no-any-return]

    (alarm,) = alarms(record(tmp_path / "run", program, "module", "function"))
    assert (alarm.origin.site, alarm.kind.word) == ("<root>/log", "log of zero")
