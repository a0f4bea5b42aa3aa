"""Where the steps of a guarded program end."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import astray
from guarding.training import Net, batch, loss_of, steps_in, train, tripped


def test_without_an_optimizer_steps_end_where_the_program_says(tmp_path: Path) -> None:
    model = Net(bad=[3])
    done = []
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", remember=2) as guard:
        for step in range(6):
            with torch.no_grad():
                model(batch(step))
            done.append(step)
            guard.step()
    assert done == [0, 1, 2, 3]
    assert caught.value.trip.step == 3
    assert caught.value.trip.path is not None
    assert steps_in(astray.open(caught.value.trip.path)) == [2, 3]


def test_a_program_without_steps_is_looked_at_when_it_ends(tmp_path: Path) -> None:
    model = Net(bad=[1])
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", level="function"):
        for step in range(3):
            model(batch(step))
    assert caught.value.trip.alarm is not None
    assert (caught.value.trip.step, caught.value.trip.alarm.micro) == (0, 1)


def test_with_an_optimizer_steps_end_where_the_program_says(tmp_path: Path) -> None:
    """From the first call on; the optimizer's step right before that call is the same step."""
    model = Net(bad=[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with astray.guard(model, path=tmp_path / "guard", on="warn") as guard:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            model(batch(step))  # what it does after the optimizer belongs to the step
            guard.step()
    # In the first iteration this could not be known: the optimizer has ended step 0, and the program step 1.
    (trip,) = guard.trips
    run = astray.open(trip.path or "")
    assert (trip.step, steps_in(run)) == (2, [0, 1, 2])
    calls = run.ranks[0].calls
    rows = zip(calls["step"].tolist(), calls["site"], calls["phase"], strict=True)
    outermost = [step for step, site, phase in rows if (site, phase) == ("<root>", "forward")]
    assert outermost == [0, 1, 2, 2]


def test_a_step_that_an_optimizer_has_just_ended_is_not_ended_again(tmp_path: Path) -> None:
    model = Net(bad=[3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard") as guard:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            guard.step()
    assert caught.value.trip.step == 3
    assert steps_in(astray.open(caught.value.trip.path or "")) == [0, 1, 2, 3]


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    model = Net(bad=[5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", level="function"):
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(4):
                loss_of(model, batch(4 * step + micro)).backward()
            optimizer.step()
    trip = caught.value.trip
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.micro, trip.alarm.origin.site) == (1, 1, "<root>/log")


def test_several_models_have_their_names_in_front(tmp_path: Path) -> None:
    models = nn.ModuleDict({"left": Net(), "right": Net(bad=[1])})
    optimizer = torch.optim.SGD(models.parameters(), lr=0.01)
    with tripped() as caught, astray.guard(dict(models), path=tmp_path / "guard", level="function"):
        for step in range(3):
            optimizer.zero_grad()
            (loss_of(models["left"], batch(step)) + loss_of(models["right"], batch(step))).backward()
            optimizer.step()
    trip = caught.value.trip
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.origin.site) == (1, "right/log")


def test_a_step_too_large_for_memory_is_looked_at_in_parts(tmp_path: Path) -> None:
    model = Net(bad=[2000])
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", max_memory=1 << 20), torch.no_grad():
        for step in range(5000):
            model(batch(step))
    assert caught.value.trip.alarm is not None
    assert caught.value.trip.alarm.micro == 2000


def test_steps_that_were_not_asked_for_are_not_looked_at(tmp_path: Path) -> None:
    model = Net(bad=[1])
    with astray.guard(model, path=tmp_path / "guard", steps="3:", on="warn") as guard:
        train(model)
    (trip,) = guard.trips
    assert trip.alarm is not None
    assert (trip.step, trip.alarm.kind.word) == (3, "bad weight")
