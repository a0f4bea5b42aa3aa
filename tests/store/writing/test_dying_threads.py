"""A thread of ours that dies, such as for want of memory, leaves no caller waiting, and the run says what was lost."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import astray
from astray.errors import RunError
from astray.store import RunInfo
from astray.store.run_format import disk_io as disk
from astray.store.run_format.disk_io import WriterThreads
from astray.store.writing.flight_recorder import FlightRecorder
from astray.store.writing.rank_files import RankFiles
from astray.store.writing.record_queue import RecordQueue
from astray.store.writing.values_writer import ShardBatch, ValuesWriter
from pairwise import grid

SECONDS = 30


def no_memory(*_: Any, **__: Any) -> NoReturn:
    raise MemoryError


def within(action: Callable[[], Any]) -> Any:
    """What an action gives, which must not wait for ever."""
    given: Future[Any] = Future()

    def act() -> None:
        try:
            given.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            given.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    return given.result(SECONDS)


PLACES = [
    (WriterThreads, "_do"),
    (WriterThreads, "_next_job"),
    (WriterThreads, "_work"),
    (disk, "_write"),
    (disk, "_fetch"),
    (disk._BounceBuffer, "__init__"),
    (ShardBatch, "publish"),
    (ShardBatch, "resolve"),
    (ValuesWriter, "collect"),
    (ValuesWriter, "_distribute"),
    (RankFiles, "close"),
    (RankFiles, "write_setup"),
    (RecordQueue, "take_values"),
    (RecordQueue, "make_room"),
    (RecordQueue, "drop"),
]


@grid(
    dies=PLACES,
    also=[(), ("abandon", "drop")],
    ids={"dies": [name for _, name in PLACES], "also": ["once", "abandon-drop"]},
    pairs=False,
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_stop_returns_and_the_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: tuple[Any, str], also: tuple[str, ...]
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def record() -> str | None:
        rec = astray.record(tmp_path / "run", model, keep="tensors", queue_bytes=1 << 20)
        model(torch.ones(512, 64))
        monkeypatch.setattr(*dies, no_memory)
        for other in also:
            monkeypatch.setattr({"abandon": RankFiles, "drop": RecordQueue}[other], other, no_memory)
        for _ in range(20):
            model(torch.ones(512, 64)).sum().backward()
            rec.step()
        rec.flush()
        rec.stop()
        writer = rec._writer
        assert writer is not None
        return writer.failure

    failure = within(record)
    monkeypatch.undo()
    assert failure is not None
    assert "stopped: " in failure
    end = astray.open(tmp_path / "run").ranks[0].end
    assert end is not None
    assert not end.complete
    assert end.failure == failure
    with warnings.catch_warnings():  # files that could not be closed
        warnings.simplefilter("ignore")
        gc.collect()


def test_a_guard_does_not_wait_for_a_dead_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a step to be looked at, nor for room."""
    monkeypatch.setattr(FlightRecorder, "_work", no_memory)
    monkeypatch.setattr(RecordQueue, "drop", no_memory)
    recorder = FlightRecorder("never/written", info=RunInfo.of_process())
    recorder._thread.join()
    assert not within(lambda: recorder.listener.wait_until_shown(3))
    within(lambda: recorder._queue.wait_for(lambda: False))
    within(recorder.close)
    assert recorder.failure is not None


def test_where_no_thread_can_be_started_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RunError, match=r"takes a thread of its own, and the system starts no more .*ulimit -u"):
        astray.record(tmp_path / "run", nn.Linear(2, 2))
    assert not (tmp_path / "run").exists()
