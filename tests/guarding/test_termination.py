"""How programs end, and what a guard leaves then."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import astray
from astray.guarding import Trip
from astray.guarding.guard import TerminationHandler
from guarding.training import Net, batch, guarded, hooks_of, steps_in, train, tripped

HERE = Path(__file__).parent


class RefusedError(Exception):
    """Of the program's own."""


@pytest.mark.parametrize("error", [RefusedError("no more data"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_an_exception_passes_unchanged_and_the_last_steps_are_written(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()

    def fail(step: int, _: object) -> None:
        if step == 3:
            raise error

    with pytest.raises(type(error)) as caught:
        guarded(model, tmp_path / "guard", remember=2, between=fail)
    assert caught.value is error
    path = tmp_path / "guard" / "step3-exception"
    run = astray.open(path)
    assert steps_in(run) == [1, 2, 3]  # two that are over, and what there was of the third
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.ended == f"{type(error).__name__}: {error}"
    look = f"The last steps are in {path}: astray show {path} --risk"
    assert caplog.messages == [f"✗ {type(error).__name__} in step 3: {error}\n\n{look}"]
    assert hooks_of(model) == 0
    assert list(run.alarms()) == []


def test_nan_in_the_step_that_an_exception_ends_is_what_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: int, _: object) -> None:
        if step == 2:
            raise RefusedError("loss is nan")

    with pytest.raises(RefusedError), astray.guard(model := Net(bad=[2]), path=tmp_path / "guard", level="function"):
        train(model, between=fail)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("✗ Infinity from step 2, forward, call 0 of <root>/log")
    assert [path.name for path in (tmp_path / "guard").iterdir()] == ["step2-non-finite"]


def test_a_function_is_told_of_an_exception_and_cannot_replace_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Trip] = []

    def tell(trip: Trip) -> None:
        told.append(trip)
        raise LookupError("mine")

    with pytest.raises(RefusedError), astray.guard(Net(), path=tmp_path / "guard", on=tell):
        raise RefusedError
    assert [trip.what for trip in told] == ["exception"]
    assert caplog.messages == ["LookupError in the function given as on=: mine"]


@pytest.mark.parametrize("code", [0, None])
def test_leaving_by_exit_is_not_an_accident(code: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with pytest.raises(SystemExit), astray.guard(model, path=tmp_path / "guard"):
        sys.exit(code if model(batch(0)).isfinite().all() else 1)
    assert (caplog.messages, list(tmp_path.iterdir()), hooks_of(model)) == ([], [], 0)


def test_a_generator_that_is_closed_is_not_an_accident(tmp_path: Path) -> None:
    def steps() -> Iterator[int]:
        with astray.guard(model, path=tmp_path / "guard"):
            for step in range(5):
                model(batch(step))
                yield step

    model = Net()
    going = steps()
    next(going)
    going.close()  # type: ignore[attr-defined]
    assert (list(tmp_path.iterdir()), hooks_of(model)) == ([], 0)


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    threads, handler = threading.enumerate(), signal.getsignal(signal.SIGTERM)
    with astray.guard(model := Net(), path=tmp_path / "guard"):
        assert signal.getsignal(signal.SIGTERM) != handler
        model(batch(0))
    assert (threading.enumerate(), signal.getsignal(signal.SIGTERM)) == (threads, handler)
    with tripped():
        guarded(Net(bad=[0]), tmp_path / "guard")
    assert (threading.enumerate(), signal.getsignal(signal.SIGTERM)) == (threads, handler)


@contextlib.contextmanager
def program(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A guarded program in its tenth step or so."""
    command = [sys.executable, str(HERE / "ending.py"), str(path), how]
    places = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        line = one.stdout.readline()
        try:
            assert line == "ready\n", one.communicate()
            yield one
        finally:
            one.kill()


def whole(path: Path) -> astray.Run:
    run = astray.open(path)
    assert run.problems == []
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.complete
    return run


@pytest.mark.slow
@pytest.mark.parametrize("how", ["busy", "asleep"])
def test_a_signal_from_the_scheduler_leaves_the_last_steps_and_ends_the_program(how: str, tmp_path: Path) -> None:
    with program(tmp_path / "guard", how) as running:
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGTERM
    (path,) = (tmp_path / "guard").iterdir()
    step = int(path.name.removeprefix("step").removesuffix("-signal"))
    assert f"✗ SIGTERM in step {step}" in said
    run = whole(path)
    assert steps_in(run)[-1] in (step - 1, step)
    assert len(steps_in(run)) in (5, 6)
    tensors = run.ranks[0].tensors
    assert all(run.ranks[0].values(row) is not None for row in range(len(tensors)))
    assert astray.compare(run, run).same


@pytest.mark.slow
def test_the_handler_that_was_there_is_called_behind(tmp_path: Path) -> None:
    with program(tmp_path / "guard", "handled") as running:
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (7, f"handler {int(signal.SIGTERM)}\n")
    assert [path.name.partition("-")[2] for path in (tmp_path / "guard").iterdir()] == ["signal"]


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    with program(tmp_path / "guard", "ignored") as running:
        output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (0, "over no alarm in 11 steps\n")
    assert not (tmp_path / "guard").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thread", "stopped"])
def test_where_it_does_not_listen_the_signal_ends_the_program_as_ever(how: str, tmp_path: Path) -> None:
    with program(tmp_path / "guard", how) as running:
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    assert running.returncode == -signal.SIGTERM
    assert not (tmp_path / "guard").exists()


@pytest.mark.slow
def test_a_kill_leaves_nothing(tmp_path: Path) -> None:
    with program(tmp_path / "guard", "busy") as running:
        running.send_signal(signal.SIGKILL)
        running.communicate(timeout=60)
    assert running.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_passes_the_signal_on() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        listening = TerminationHandler(lambda: heard.append("act"))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.raise_signal(signal.SIGTERM)
            os._exit(0 if heard == ["before"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["act", "before"]
        listening.remove()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_guard_that_is_stopped_elsewhere_only_passes_the_signal_on() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        listening = TerminationHandler(lambda: heard.append("act"))
        thread = threading.Thread(target=listening.remove)  # which cannot take the handler away
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["before"]
    finally:
        signal.signal(signal.SIGTERM, before)
