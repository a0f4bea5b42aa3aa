"""Only what was given is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from astray.errors import RunError, UsageError
from astray.store import RunInfo, RunWriter
from astray.web.run_list import RunList


def write(path: Path) -> Path:
    with RunWriter(path, info=RunInfo.of_process()):
        pass
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with runs, with something else, and with a link that leads out of it."""
    runs = tmp_path / "runs"
    for name in ("b", "a", "deep/c", "deep/er/d"):
        write(runs / name)
    (runs / "notes").mkdir()
    (runs / "notes" / "todo.txt").write_text("nothing")
    (runs / "escape").symlink_to(write(tmp_path / "secret"))
    return runs


def test_runs_that_are_named(folder: Path):
    run_list = RunList([str(folder / "b"), folder / "a"])
    assert run_list.named == ["0", "1"]
    assert [run_list.path(number).name for number in run_list.named] == ["b", "a"]
    assert run_list.open("1").path == folder / "a"


def test_runs_in_a_folder_that_is_named(folder: Path):
    run_list = RunList([folder])
    assert run_list.named == []
    assert [document["label"] for document in run_list.documents()] == ["a", "b", "c"]
    assert not any(document["open"] for document in run_list.documents())
    assert run_list.document("2")["open"] is True
    assert [document["open"] for document in run_list.documents()] == [False, False, True]


@pytest.mark.parametrize("number", ["9", "-1", "", "../secret", "/etc/passwd", "0/../1", "a" * 5000])
def test_nothing_else_can_be_named(folder: Path, number: str):
    run_list = RunList([folder / "a"])
    for ask in (run_list.path, run_list.open, run_list.document):
        with pytest.raises(UsageError) as caught:
            ask(number)
        assert len(str(caught.value)) < 100


def test_what_is_not_a_run_is_said_at_once(folder: Path):
    with pytest.raises(RunError, match="is not a run"):
        RunList([folder / "notes"])
    with pytest.raises(RunError, match="does not exist"):
        RunList([folder / "nowhere"])


def test_a_run_in_a_folder_that_cannot_be_read_says_so(folder: Path):
    run_list = RunList([folder])
    (folder / "a" / "run.json").write_text("{")
    found = run_list.document("0")
    assert found["open"] is False
    assert "run.json" in found["problems"][0]
