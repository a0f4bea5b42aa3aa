"""What steps and ranks have to do with each other: weights that stay bad, updates that a scaler skips, collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import astray
from astray.errors import UsageError
from astray.nonfinite import alarms
from integration.distributed.launching import torchrun
from nonfinite import accidents
from nonfinite.recording import LEVELS, layers, record

HERE = Path(__file__).parent


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
def test_infinity_in_the_data_is_a_bad_input(levels: tuple[str, ...], tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    x[1, 2] = float("inf")
    (alarm,) = alarms(record(tmp_path / "run", layers(), *levels, steps=3, x=x))
    assert (alarm.kind.word, alarm.step, alarm.later) == ("bad input", 0, (1, 2))
    assert alarm.origin.site in ("<root>", "0/linear", "0/aten.addmm")
    assert alarm.offenders[0].first is not None
    assert (alarm.offenders[0].first.index, alarm.offenders[0].first.value) == ((1, 2), float("inf"))


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
def test_a_weight_that_was_loaded_so_is_a_bad_weight(levels: tuple[str, ...], tmp_path: Path) -> None:
    good, model = layers(), layers()
    state = good.state_dict()
    state["2.weight"] = state["2.weight"].clone()
    state["2.weight"][0, 3] = float("nan")
    model.load_state_dict(state)
    (alarm,) = alarms(record(tmp_path / "run", model, *levels, steps=3))
    assert (alarm.kind.word, alarm.step, alarm.later) == ("bad weight", 0, (1, 2))
    assert alarm.origin.site.partition("/")[0] == "2"
    assert alarm.kind.text.startswith("2.weight, its ")
    assert alarm.kind.text.endswith("That is so in the first step that was recorded.")
    assert alarm.offenders[0].first is not None
    assert alarm.offenders[0].first.index == (0, 3)


def test_a_weight_that_turns_bad_between_steps_says_since_when(tmp_path: Path) -> None:
    model = layers()
    with astray.record(tmp_path / "run", model) as recorder:
        for step in range(4):
            if step == 2:
                model[2].weight.data[0, 0] = float("inf")
            model(torch.ones(4, 4))
            recorder.step()
    (alarm,) = alarms(tmp_path / "run")
    assert (alarm.kind.word, alarm.step, alarm.later) == ("bad weight", 2, (3,))
    assert alarm.kind.text.endswith("It was finite in step 1: something has written to it since.")


def test_an_update_that_spoils_a_weight_is_the_origin(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38)
    with astray.record(tmp_path / "run", model, optimizer=["gradient", "weight"]) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((4, 4), 100.0)).sum().backward()
            optimizer.step()
            recorder.step()
    (alarm, _) = alarms(tmp_path / "run")
    assert (alarm.step, alarm.origin.kind, alarm.origin.phase, alarm.origin.site) == (
        0,
        "optimizer",
        "update",
        "weight",
    )
    assert alarm.later == (1,)
    assert str(alarm.surfaced[0]) == "the update of weight"


def test_an_optimizer_is_not_blamed_for_the_gradient_it_was_given(tmp_path: Path) -> None:
    settings = {"steps": 3, "optimizer": ["weight", "state"]}  # and not the gradient as the optimizer saw it
    (alarm,) = alarms(record(tmp_path / "run", accidents.where_and_sqrt, "module", "function", **settings))
    assert (alarm.origin.site, alarm.step, alarm.later) == ("<root>/sqrt", 0, (1, 2))
    assert "the update of lin.weight" in map(str, alarm.surfaced)


class Halved(nn.Module):
    """Gradients pass through float16 on their way to the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x).half() * 1).float()


def train_with_scaler(path: Path, levels: tuple[str, ...], scale: float, **settings: object) -> None:
    torch.manual_seed(0)
    model, x = Halved(), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with astray.record(path, model, level=list(levels), **settings) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step()


@pytest.mark.parametrize("levels", LEVELS, ids="+".join)
def test_what_a_scaler_skips_is_counted_and_no_alarm(levels: tuple[str, ...], tmp_path: Path) -> None:
    train_with_scaler(tmp_path / "run", levels, 2.0**17)
    found = alarms(tmp_path / "run")
    assert list(found) == []
    assert found.skipped_by_scaler == ((0, 0), (1, 0))  # 2¹⁷ and 2¹⁶ are too large for float16
    assert "GradScaler left out 2 updates" in str(found)


def test_updates_that_were_recorded_show_which_were_skipped(tmp_path: Path) -> None:
    train_with_scaler(tmp_path / "run", ("module",), 2.0**17, optimizer=["weight"])
    found = alarms(tmp_path / "run")
    assert (list(found), found.skipped_by_scaler) == ([], ((0, 0), (1, 0)))


def test_the_same_gradients_without_a_scaler_are_an_alarm(tmp_path: Path) -> None:
    (alarm,) = alarms(record(tmp_path / "run", lambda lin, x: (lin(x).half() * 1).float() * 1e5, "function"))
    assert (alarm.origin.site, alarm.origin.phase, alarm.kind.word) == ("<root>/float", "backward", "overflow")


def test_every_step_has_the_same_accident_once(tmp_path: Path) -> None:
    run = record(tmp_path / "run", accidents.fully_masked_row, "function", steps=4)
    (alarm,) = alarms(run)
    assert (alarm.step, alarm.later) == (0, (1, 2, 3))
    (alarm,) = alarms(run, steps="2:")
    assert (alarm.step, alarm.later) == (2, (3,))
    assert list(alarms(run, steps=[7])) == []


def test_a_rank_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path / "run", accidents.causal_mask, "module")
    with pytest.raises(UsageError, match="has no rank 3; it has 0"):
        alarms(run, rank=3)


def test_a_run_without_statistics_says_that_nothing_can_be_seen(tmp_path: Path) -> None:
    run = record(tmp_path / "run", accidents.naive_softplus, "function", keep="fingerprint")
    with pytest.raises(astray.errors.RunError, match=r"run was recorded without statistics, .* with keep='stats'\.$"):
        alarms(run)


def test_what_a_cut_run_does_not_show_is_not_called_fine(tmp_path: Path) -> None:
    record(tmp_path / "run", accidents.causal_mask, "function")
    assert str(alarms(tmp_path / "run")).startswith("✓ No NaN")
    (tmp_path / "run" / "rank0" / "end.json").unlink()  # as a kill leaves it
    found = alarms(tmp_path / "run")
    assert found.notes
    assert str(found).startswith("≈ No NaN or infinity is seen")
    table = tmp_path / "run" / "rank0" / "tensors.arrows"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(astray.errors.RunError, match=r"run holds no tensors, .* has no end\.json"):
        alarms(tmp_path / "run")


@pytest.mark.slow
def test_a_sum_over_ranks_that_overflows_is_the_collectives(tmp_path: Path) -> None:
    torchrun(HERE / "summing.py", tmp_path / "run", "both")
    (alarm,) = alarms(tmp_path / "run")
    assert (alarm.origin.kind, alarm.origin.site, alarm.kind.word) == ("collective", "<root>/all_reduce", "overflow")
    assert alarm.ranks == (0, 1)
    assert alarm.origin.frame is not None
    assert alarm.origin.frame.code.endswith("# origin")


@pytest.mark.slow
def test_infinity_of_one_rank_that_a_sum_spreads_is_that_ranks(tmp_path: Path) -> None:
    torchrun(HERE / "summing.py", tmp_path / "run", "one")
    (alarm,) = alarms(tmp_path / "run")
    assert (alarm.rank, alarm.ranks) == (1, (0, 1))
    assert (alarm.origin.kind, alarm.origin.site, alarm.kind.word) == ("function", "<root>/mul", "overflow")
    (alone,) = alarms(tmp_path / "run", rank=0)
    assert (alone.origin.site, alone.ranks) == ("<root>/all_reduce", (0,))
