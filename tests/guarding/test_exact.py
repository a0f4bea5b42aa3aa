"""An exact guard stops the program at the very call."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import astray
from guarding.training import Net, batch, guarded, hooks_of, loss_of, train, tripped
from nonfinite import accidents
from nonfinite.accidents import Model


class RootOfZero(nn.Module):
    """All is fine in the forward; in the backward of its n-th forward the root of zero has no derivative."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.bad = bad
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.forwards == self.bad:
            h = torch.sqrt(h * 0)
        self.forwards += 1
        return h


def test_it_stops_in_the_forward_at_the_call(tmp_path: Path) -> None:
    model = Net(bad=[2])
    with tripped() as caught:
        guarded(model, tmp_path / "guard", exact=True, level=["module", "function"])
    assert model.forwards == 2  # it did not come to the line behind
    trip = caught.value.trip
    assert trip.alarm is not None
    origin = trip.alarm.origin
    assert (trip.step, origin.site, origin.phase, trip.alarm.kind.word) == (2, "<root>/log", "forward", "log of zero")
    assert origin.frame is not None
    assert origin.frame.code.endswith("# origin")
    assert caught.value.__traceback__ is not None
    frames = inspect.getinnerframes(caught.value.__traceback__)
    assert "forward" in [frame.function for frame in frames if frame.filename.endswith("training.py")]
    assert hooks_of(model) == 0
    (again,) = astray.open(trip.path or "").alarms()  # though it came no further than this call
    assert again.origin.site == origin.site


def test_the_tensors_of_the_call_are_in_the_run(tmp_path: Path) -> None:
    model = Net(bad=[1])
    with tripped() as caught:
        guarded(model, tmp_path / "guard", exact=True, level=["module", "function"])
    run = astray.open(caught.value.trip.path or "")
    rank = run.ranks[0]
    values: dict[tuple[str, str, str], Any] = {}
    for row, call in enumerate(rank.call_rows.tolist()):
        if rank.calls["step"][call] == 1:
            name = (rank.calls["site"][call], rank.tensors["role"][row], rank.tensors["path"][row])
            values[name] = rank.values(row)
    assert (values["<root>/log", "input", "0"] == 0).all()
    assert (values["<root>/log", "output", "out"] == -float("inf")).all()
    assert values["first", "parameter", "weight"].shape == (4, 4)
    assert (values["first/linear", "input", "0"] == batch(1).numpy()).all()
    assert not any(value is None for value in values.values())


@pytest.mark.parametrize("level", ["module", "function", ["module", "function", "op"]], ids=str)
def test_it_stops_in_the_backward(level: Any, tmp_path: Path) -> None:
    model = RootOfZero(bad=2)
    begun: list[int] = []
    with tripped() as caught:
        guarded(model, tmp_path / "guard", exact=True, level=level, between=lambda step, _: begun.append(step))
    assert begun == [0, 1]  # in step 2 the backward did not come back
    trip = caught.value.trip
    assert trip.alarm is not None
    site = {"module": "<root>", "function": "<root>/sqrt"}.get(str(level), "<root>/aten.div")
    assert (trip.step, trip.alarm.origin.site, trip.alarm.origin.phase) == (2, site, "backward")
    assert hooks_of(model) == 0
    assert guarded(RootOfZero(bad=99), tmp_path / "again", level="function").trips == []


@pytest.mark.parametrize("program", [accidents.causal_mask, accidents.added_mask, accidents.torchs_own_norm,
                                     accidents.torchs_own_std, accidents.torchs_own_atan2])  # fmt: skip
@pytest.mark.parametrize("level", ["module", "function", ["module", "function", "op"]], ids=str)
def test_what_is_meant_to_be_does_not_stop_it(program: Any, level: Any, tmp_path: Path) -> None:
    def square(_: int) -> Tensor:
        return torch.randn(4, 4)

    torch.manual_seed(0)
    guard = guarded(Model(program), tmp_path / "guard", 2, exact=True, level=level, x=square)
    assert guard.summary.startswith("no alarm in 2 steps")


def test_an_infinity_made_of_finite_numbers_stops_it_even_if_it_is_meant(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tripped() as caught:
        model = Model(accidents.logarithm_of_a_mask)
        guarded(model, tmp_path / "guard", 2, exact=True, level="function", x=lambda _: torch.randn(4, 4))
    assert caught.value.trip.alarm is not None
    assert caught.value.trip.alarm.origin.site == "<root>/log"


def test_the_program_does_not_swallow_it(tmp_path: Path) -> None:
    model = Net(bad=[1])

    def careless() -> None:
        for step in range(4):
            try:
                loss_of(model, batch(step))
            except Exception:  # noqa: BLE001, PERF203 - the point of the test
                continue

    asked: dict[str, Any] = {"exact": True, "level": "function", "path": tmp_path / "guard"}
    with tripped() as caught, astray.guard(model, **asked):
        careless()
    assert caught.value.trip.alarm is not None
    assert model.forwards == 1


def test_a_program_that_swallows_everything_is_told_in_the_end(tmp_path: Path) -> None:
    model = Net(bad=[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        for step in range(2):
            try:
                loss_of(model, batch(step)).backward()
                optimizer.step()
            except BaseException:  # noqa: BLE001, PERF203 - the point of the test
                continue
    assert caught.value.trip.what == "non-finite"
    assert hooks_of(model) == 0


def test_another_exception_on_the_way_out_does_not_hide_it(tmp_path: Path) -> None:
    model = Net(bad=[0])
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        try:
            model(batch(0))
        finally:
            raise KeyError("while cleaning up")
    assert caught.value.trip.alarm is not None
    assert isinstance(caught.value.__cause__, KeyError)


class _Nested(torch.autograd.Function):
    """Its backward runs another backward, so deep that autograd takes a thread of its own for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: nn.Module, depth: int) -> Tensor:
        ctx.model, ctx.depth = model, depth
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            if ctx.depth:
                _Nested.apply(x, ctx.model, ctx.depth - 1).backward()
            else:
                _threads.append(threading.get_ident())
                ctx.model(x).sum().backward()
        return x.grad, None, None


_threads: list[int] = []


def test_it_stops_on_a_thread_of_autograds(tmp_path: Path) -> None:
    model = RootOfZero(bad=0)
    _threads.clear()
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        _Nested.apply(batch(0).requires_grad_(), model, 80).backward()
    assert _threads != [threading.get_ident()]
    assert caught.value.trip.alarm is not None
    assert caught.value.trip.alarm.origin.phase == "backward"
    assert hooks_of(model) == 0


def test_it_is_heard_of_a_thread_of_the_programs(tmp_path: Path) -> None:
    model = Net(bad=[0])
    ended: list[str] = []

    def work() -> None:
        try:
            model(batch(0))
        finally:
            ended.append("by an exception" if sys.exc_info()[0] is not None else "normally")

    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with tripped(), astray.guard(model, path=tmp_path / "guard", exact=True):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    finally:
        threading.excepthook = before
    assert ended == ["by an exception"]


def test_a_recording_after_it_sees_everything(tmp_path: Path) -> None:
    """The calls that were open when the program was stopped belong to nothing any more."""
    model = Net(bad=[0])
    with tripped() as caught, astray.guard(model, path=tmp_path / "guard", exact=True):
        model(batch(0))
    assert caught.value.trip.alarm is not None
    with astray.record(tmp_path / "run", model, level="function"):
        loss_of(model, batch(0))
    sites = astray.open(tmp_path / "run").ranks[0].calls["site"]
    assert list(sites) == ["/randn", "first/linear", "second/linear", "/square", "/mean"]


def test_losses_are_those_of_a_bare_program(tmp_path: Path) -> None:
    bare, watched = Net(), Net()
    losses = train(bare)
    with astray.guard(watched, path=tmp_path / "guard", exact=True, level=["module", "function"]):
        assert train(watched) == losses
    for name, weight in watched.state_dict().items():
        assert torch.equal(weight, bare.state_dict()[name])
