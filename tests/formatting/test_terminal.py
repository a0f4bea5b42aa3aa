"""The progress bar: silent without a terminal, and right about the time left."""

from __future__ import annotations

import io
import re

import pytest

from astray.formatting import terminal
from astray.formatting.terminal import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def drawn(screen: Screen) -> list[str]:
    """Each bar that was shown, without the bar itself."""
    return [re.sub(" [█░]+", "", line) for line in screen.getvalue().split("\r\x1b[K")[1:]]


def test_a_pipe_gets_nothing(clock):
    pipe = io.StringIO()
    with Progress("reading", pipe) as progress:
        for done in range(1, 11):
            clock.now += 1
            progress(done, 10)
    assert pipe.getvalue() == ""


def test_a_program_without_stderr_gets_nothing(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress("reading") as progress:
        clock.now += 10
        progress(1, 2)


def test_a_terminal_gets_a_bar_that_goes_away(clock):
    screen = Screen()
    with Progress("reading", screen) as progress:
        clock.now += 2
        progress(250, 1000)
        progress(251, 1000)  # too soon to be drawn again
        clock.now += 2
        progress(500, 1000)
    assert drawn(screen) == ["reading 250 of 1,000, 6 s left", "reading 500 of 1,000, 4 s left", ""]


def test_quick_work_needs_no_bar(clock):
    screen = Screen()
    with Progress("reading", screen) as progress:
        clock.now += 0.4
        progress(9, 10)
    assert screen.getvalue() == ""


def test_the_total_may_change_as_more_is_known(clock):
    screen = Screen()
    with Progress("reading", screen) as progress:
        clock.now += 8
        progress(10, 20)
        clock.now += 1
        progress(15, 60)  # the next rank begins, and has more to do
    assert drawn(screen) == ["reading 10 of 20, 8 s left", "reading 15 of 60, 27 s left", ""]


def test_tables_are_as_wide_as_they_need_to_be_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.table_width() > 100_000
    assert terminal.width() == 100
    monkeypatch.setattr("sys.stdout", Screen())
    assert terminal.table_width() == terminal.width()
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal.table_width() == 80
