"""An exception raised by a signal handler of the program reaches the program, wherever our code was interrupted."""

from __future__ import annotations

import gc
import inspect
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.interrupts import interrupt_of
from recorded_rows import hooks_of, rows
from small_models import Residual

LEVELS = ("module", "function", "op")


def quick(level: str) -> list[Any]:
    """All levels; all but one of them are slow."""
    return [each if each == level else pytest.param(each, marks=pytest.mark.slow) for each in LEVELS]


HERE = Path(__file__)
OURS = str(Path(astray.__file__).parent)
TRIALS = 40


class LimitError(Exception):
    """The exception of a time limit."""


class TooLateError(LimitError, TimeoutError, RuntimeError):
    """An exception of a class that our narrower `except` clauses catch."""


def too_late(_number: int, _frame: FrameType | None) -> None:
    raise TooLateError("time is up")


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = [(number, signal.signal(number, too_late)) for number in (signal.SIGUSR1, signal.SIGALRM)]
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before:
        signal.signal(number, handler)


class SignalAt:
    """Sends a signal where one of our functions starts in the program's thread: Python checks for signals there."""

    def __init__(self, start: int) -> None:
        self.left = start
        self.where = ""

    def __call__(self, frame: FrameType, _event: str, _arg: Any) -> None:
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # its end is told of too, where nothing is raised
        if frame.f_code.co_filename.startswith(OURS) and not is_generator:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGUSR1)

    def __enter__(self) -> SignalAt:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()


@pytest.mark.parametrize("level", quick("op"))
def test_it_reaches_the_program_from_any_function_of_ours(tmp_path: Path, level: Any) -> None:
    def trial(start: int) -> tuple[SignalAt, list[Any], bool]:
        torch.manual_seed(0)
        model = nn.Sequential(Residual(), nn.ReLU(), Residual())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.ones(2, 6)
        reached = False
        path = tmp_path / str(start)
        with astray.record(path, model, level=level, optimizer="weight") as rec:
            step(model, optimizer, x)
            rec.step()
            with SignalAt(start) as sent:
                try:
                    step(model, optimizer, x)
                    id(model)  # by the next call of anything, what is due is raised
                except LimitError:
                    reached = True
                    torch.set_grad_enabled(True)  # torch's optimizers do so in a line that a signal may hit as well
            rec.step()
            step(model, optimizer, x)
        assert not hooks_of(model)
        run = astray.open(path)
        assert run.ranks[0].end.complete
        last = [(row["site"], row["phase"], row["role"], row["path"], row["call"]) for row in rows(run, step=2)]
        return sent, last, reached

    counted, whole, reached = trial(1 << 30)
    starts = (1 << 30) - counted.left
    assert starts > 20
    assert not reached
    swallowed = []
    for start in range(1, starts + 1, max(1, starts // TRIALS)):
        sent, last, reached = trial(start)
        if sent.where and not reached:
            swallowed.append(sent.where)
        assert last == whole, sent.where
    assert not swallowed


@pytest.mark.parametrize("level", quick("function"))
def test_every_time_limit_is_kept(tmp_path: Path, level: Any) -> None:
    model = nn.Sequential(*(Residual() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 6)
    kept = 0
    with astray.record(tmp_path / "run", model, level=level) as rec:
        step(model, optimizer, x)
        rec.step()
        gc.collect()  # what earlier tests have left may be told of its death, where Python loses exceptions
        for number in range(30):
            begun = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0003 * number)
                while time.monotonic() - begun < 5:
                    step(model, optimizer, x)
            except LimitError:
                kept += 1
                torch.set_grad_enabled(True)
            rec.step()
        step(model, optimizer, x)
    assert kept == 30
    assert astray.open(tmp_path / "run").ranks[0].end.complete


def test_nothing_of_a_recording_is_told_of_its_death(tmp_path: Path) -> None:
    """Python discards what a signal handler raises in the callback of a weak reference."""
    with astray.record(tmp_path / "run", nn.Linear(2, 2), level="function") as rec:
        engine = rec._engine
        assert engine is not None
        everything = [rec, engine, *vars(engine).values(), *vars(rec).values()]
        references = [one for each in everything for one in _weak_references(each)]
        assert references
        assert [one.__callback__ for one in references if one.__callback__ is not None] == []


def _weak_references(owner: Any) -> list[weakref.ref[Any]]:
    return weakref.getweakrefs(owner) if type(owner).__module__.startswith("astray.") else []


def test_the_run_says_what_the_signal_has_cost(tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2)) as rec:
        engine = rec._engine
        assert engine is not None
        with pytest.raises(LimitError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(LimitError):
            engine.failed("a call of Linear", raised.value)  # type: ignore[arg-type]
    missed = [(one.what, one.why) for one in astray.open(tmp_path / "run").ranks[0].end.missed]
    assert ("a call of Linear", "a signal handler of the program raised TooLateError") in missed


def test_handlers_of_all_kinds_are_known() -> None:
    class Object:
        def __call__(self, number: int, frame: Any) -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            self.raising()

        def raising(self, *_: Any) -> None:
            raise ValueError

    def once(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as those do that are to act only once
        raise ValueError

    for handler in (too_late, once, Object(), Object().raising):
        signal.signal(signal.SIGUSR1, handler)
        with pytest.raises((LimitError, ValueError)) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert interrupt_of(raised.value) is raised.value


def test_our_own_failures_are_not_taken_for_it() -> None:
    def ours() -> None:
        raise ValueError("ours")

    try:
        signal.raise_signal(signal.SIGUSR1)
    except LimitError:  # the program is handling one while we run
        with pytest.raises(ValueError, match="ours") as raised:
            ours()
    assert interrupt_of(raised.value) is None
