"""Long work in a thread: its progress, its end, and how it is stopped."""

from __future__ import annotations

import threading

import pytest

from astray.errors import CompareError
from astray.web.workspace import BackgroundJob


def test_progress_can_be_asked_for_while_it_works():
    reached, go_on = threading.Event(), threading.Event()

    def work(progress):
        progress(3, 10)
        reached.set()
        assert go_on.wait(20)
        progress(10, 10)

    job = BackgroundJob(work, "comparing values")
    assert job.document() == {"state": "idle", "done": 0, "total": 0, "text": "comparing values"}
    job.start()
    assert reached.wait(20)
    assert job.document() == {"state": "running", "done": 3, "total": 10, "text": "comparing values"}
    go_on.set()
    job.wait(20)
    assert job.document() == {"state": "done", "done": 10, "total": 10, "text": ""}


def test_it_stops_at_the_next_report():
    reached, go_on = threading.Event(), threading.Event()
    after = []

    def work(progress):
        progress(1, 2)
        reached.set()
        assert go_on.wait(20)
        try:
            progress(2, 2)
        except Exception:  # noqa: BLE001 - what code in between may well do
            after.append("caught")
        after.append("went on")

    job = BackgroundJob(work).start()
    assert reached.wait(20)
    job.stop()
    go_on.set()
    job.wait(20)
    assert job.document() == {"state": "stopped", "done": 1, "total": 2, "text": "Stopped before it was done."}
    assert after == []


def test_what_cannot_be_done_is_said():
    def work(progress):
        raise CompareError("The runs have nothing in common.")

    job = BackgroundJob(work).start()
    job.wait(20)
    assert job.document()["state"] == "failed"
    assert job.document()["text"] == "The runs have nothing in common."


def test_a_fault_does_not_leave_the_page_waiting(capsys: pytest.CaptureFixture[str]):
    def work(progress):
        raise ValueError("oh")

    job = BackgroundJob(work).start()
    job.wait(20)
    assert job.document()["state"] == "failed"
    assert job.document()["text"] == "This is a fault in astray itself, please report it: ValueError('oh')."
    assert "ValueError: oh" in capsys.readouterr().err
