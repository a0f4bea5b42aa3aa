"""`Finalizer`: its callback runs in every case, and no exception of the program is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from astray.capture.pytorch.native.build import load

Finalizer = load().Finalizer


class LimitError(Exception):
    pass


@pytest.fixture
def _limited() -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        raise LimitError

    before = signal.signal(signal.SIGUSR1, end)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_it_is_done_once() -> None:
    done: list[int] = []
    ending = Finalizer(lambda: done.append(1))
    assert done == []
    del ending
    assert done == [1]


@pytest.mark.usefixtures("_limited")
def test_what_a_signal_handler_raises_then_reaches_the_program() -> None:
    done: list[str] = []

    def callback() -> None:
        done.append("begun")
        if len(done) == 1:
            signal.raise_signal(signal.SIGUSR1)
        done.append("ended")

    def program() -> str:
        ending: Any = Finalizer(callback)
        try:
            del ending
            for _ in range(1000):
                pass
        except LimitError:
            return "reached"
        return "lost"

    assert program() == "reached"
    assert done == ["begun", "begun", "ended"]  # and what was interrupted has been done


def test_an_exception_under_way_goes_on() -> None:
    done: list[int] = []

    def program() -> None:
        ending = Finalizer(lambda: done.append(1))
        assert ending is not None
        raise LimitError

    with pytest.raises(LimitError) as raised:
        program()
    del raised
    assert done == [1]
