"""A run from another machine: links, pipes, devices and garbage in place of its files are reported as problems."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from astray.errors import RunError
from astray.store import RunData, open_run

FILES = ("calls.arrows", "tensors.arrows", "stacks.jsonl", "setup.jsonl", "end.json", "values-00000.safetensors")


def look_at(path: Path) -> RunData:
    """Open a run and read all of it; values that cannot be read say why."""
    run = open_run(path)
    for rank in run.ranks.values():
        assert rank.stack(0) is not None
        for row in range(len(rank.tensors)):
            with contextlib.suppress(RunError):
                rank.values(row)
    assert all(problem.endswith(".") for problem in run.problems)
    return run


@pytest.mark.parametrize("name", FILES)
def test_links_that_lead_out_are_not_followed(small_run: RunData, tmp_path: Path, name: str) -> None:
    file = small_run.path / "rank0" / name
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if file.exists():
        shutil.move(file, elsewhere / name)
    else:
        (elsewhere / name).write_text('{"id": 0, "frames": [["secret.py", 1, "f", "secret"]]}\n')
    file.symlink_to(elsewhere / name)
    run = look_at(small_run.path)
    assert run.ranks[0].stack(0) == []
    if name.startswith("values"):
        with pytest.raises(RunError, match="leads out of"):
            run.ranks[0].values(0)
    else:
        assert any("leads out of" in problem for problem in run.problems)


def test_a_link_to_another_file_of_the_run_is_followed(small_run: RunData) -> None:
    file = small_run.path / "rank0" / "calls.arrows"
    file.rename(small_run.path / "calls.arrows")
    file.symlink_to(small_run.path / "calls.arrows")
    assert len(look_at(small_run.path).ranks[0].calls) == 8


def test_a_rank_that_is_elsewhere_is_missing(small_run: RunData, tmp_path: Path) -> None:
    shutil.move(small_run.path / "rank0", tmp_path / "rank0")
    (small_run.path / "rank0").symlink_to(tmp_path / "rank0")
    assert look_at(small_run.path).ranks == {}


def test_run_json_may_not_lead_out_either(small_run: RunData, tmp_path: Path) -> None:
    shutil.move(small_run.path / "run.json", tmp_path / "run.json")
    (small_run.path / "run.json").symlink_to(tmp_path / "run.json")
    with pytest.raises(RunError, match="leads out of"):
        open_run(small_run.path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["fifo", "folder", "device"])
def test_what_is_not_a_plain_file_is_not_waited_for(small_run: RunData, name: str, what: str) -> None:
    file = small_run.path / "rank0" / name
    file.unlink(missing_ok=True)
    if what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    run = look_at(small_run.path)
    if not name.startswith("values"):
        assert any(name in problem for problem in run.problems)


@pytest.mark.parametrize("name", ["run.json", "rank0/end.json", "rank0/stacks.jsonl", "rank0/setup.jsonl"])
def test_json_that_is_nested_without_end(small_run: RunData, name: str) -> None:
    file = small_run.path / name
    key = b'"settings"' if name == "run.json" else b'"frames"'
    file.write_bytes(b'{"format": 4, "id": 0, ' + key + b": " + b"[" * 200_000 + b"]" * 200_000 + b"}\n")
    if name == "run.json":
        with pytest.raises(RunError, match=r"run\.json"):
            open_run(small_run.path)
    else:
        assert any(file.name in problem for problem in look_at(small_run.path).problems)


@pytest.mark.parametrize(
    "line",
    [b'{"id": "0", "frames": []}', b'{"id": 0, "frames": [[1, 2, 3, 4]]}', b'{"id": 0, "frames": [["a"]]}', b"[]"],
)
def test_stacks_that_are_none(small_run: RunData, line: bytes) -> None:
    (small_run.path / "rank0" / "stacks.jsonl").write_bytes(line + b"\n")
    run = look_at(small_run.path)
    assert run.problems == [f"{small_run.path}/rank0/stacks.jsonl: 1 of 1 line cannot be read."]


def test_files_that_are_too_large_are_not_read(small_run: RunData) -> None:
    for name in ("calls.arrows", "stacks.jsonl", "end.json"):
        os.truncate(small_run.path / "rank0" / name, 1 << 43 if name == "calls.arrows" else 1 << 33)  # sparse
    problems = look_at(small_run.path).problems
    assert sum("bytes, more than" in problem for problem in problems) == 3


@pytest.mark.parametrize("name", ["rank01", "rank99999999999999999999", "rank٣", "rank-1"])
def test_folders_that_are_no_ranks(small_run: RunData, name: str) -> None:
    shutil.copytree(small_run.path / "rank0", small_run.path / name)
    assert list(look_at(small_run.path).ranks) == [0]
