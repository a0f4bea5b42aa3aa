"""Reports are there in full or not at all: on a disk that is full, in a place that is none, and when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from astray import compare
from astray.report.atomic_files import atomic_file, check_writable
from pairwise import grid

WRITERS = {"csv": "c", "xlsx": "d.xlsx", "json": "d.json", "junit": "j.xml"}


@pytest.fixture
def diff(runs):
    return compare(runs.program(runs.Builder()), runs.program(runs.Builder("runs/bad"), proj=1.01))


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_takes_its_place_at_the_end(tmp_path):
    place = tmp_path / "new" / "report.txt"
    with atomic_file(place) as file:
        file.write_text("done")
        assert not place.exists()
    assert place.read_text() == "done"
    assert everything(tmp_path) == ["new", "new/report.txt"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_an_older_report_stays_when_the_new_one_fails(tmp_path, failure):
    place = tmp_path / "report.txt"
    place.write_text("old")

    def fail() -> None:
        with atomic_file(place) as file:
            file.write_text("half")
            raise failure

    with pytest.raises(failure):
        fail()
    assert place.read_text() == "old"
    assert everything(tmp_path) == ["report.txt"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there" / "report.txt")
    with atomic_file(link) as file:
        file.write_text("done")
    assert link.is_symlink()
    assert (tmp_path / "there" / "report.txt").read_text() == "done"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_file(pipe) as file:
            file.write_text("done")
        assert os.read(end, 10) == b"done"
    finally:
        os.close(end)
    assert pipe.is_fifo()


@pytest.mark.parametrize("kind", WRITERS)
def test_no_writer_leaves_anything_but_its_report(diff, tmp_path, kind):
    getattr(diff, f"to_{kind}")(tmp_path / WRITERS[kind])
    expected = ["c", "c/pairs.csv", "c/summary.csv"] if kind == "csv" else [WRITERS[kind]]
    assert everything(tmp_path) == expected


@pytest.mark.parametrize("kind", ["xlsx", "json", "junit"])
def test_a_full_device(diff, kind):
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        getattr(diff, f"to_{kind}")("/dev/full")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_place_that_is_none(diff, tmp_path, kind):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "pairs.csv").mkdir(parents=True)
    write = getattr(diff, f"to_{kind}")
    with pytest.raises(NotADirectoryError, match=r"Not a directory: '.*/file/"):
        write(tmp_path / "file" / "x")
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*/folder"):
        write(tmp_path / "folder")
    assert everything(tmp_path) == ["file", "folder", "folder/pairs.csv"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_must_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        check_writable(tmp_path / "report.txt")


PROGRAM = """
import resource, signal, sys
from astray.cli import main
reference, candidate, limit, *options = sys.argv[1:]
import astray.comparison.comparison, astray.report.xlsx, xlsxwriter  # what is imported is not written any more
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
sys.exit(main(["compare", reference, candidate, *options]))
"""


@grid(kind=WRITERS, limit=[0, 2048, 16384], pairs=False)
def test_a_disk_that_is_full_is_one_sentence_and_leaves_nothing(large_runs, tmp_path, kind, limit):
    place = tmp_path / "out" / WRITERS[kind]
    old = place / "pairs.csv" if kind == "csv" else place
    old.parent.mkdir(parents=True)
    old.write_text("old")
    command = [sys.executable, "-X", "dev", "-c", PROGRAM, *large_runs, str(limit), f"--{kind}", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    allowed = f"files may have {limit:,} bytes here (raise that with `ulimit -f unlimited`)"
    assert done.stderr == f"astray compare: {old}: File too large: {allowed}.\n"
    assert done.returncode == 2
    assert "First divergence" in done.stdout  # what could be said was said
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [old]
    assert not list(tmp_path.rglob(".*"))
    assert old.read_text() == "old"


@pytest.fixture(scope="module")
def large_runs(tmp_path_factory) -> tuple[str, str]:
    """Two runs whose reports are larger than 16 kB each."""
    from astray.records import Call, Tensor
    from astray.stats.kernels import Strided, measure
    from astray.store import RunInfo, RunWriter

    folder = tmp_path_factory.mktemp("large")
    for name, factor in (("a", 1.0), ("b", 1.5)):
        with RunWriter(folder / name, info=RunInfo.of_process()) as writer:
            for seq in range(200):
                values = np.ones(4, np.float32) * np.float32(factor * (seq + 1))
                found = measure(Strided.from_numpy(values))
                writer.call(Call(seq, 0, 0, "module", f"layers.{seq}", "Linear", 0, "forward"))
                writer.tensor(Tensor(seq, "output", "out", "float32", (4,), (1,), "cpu", False, *found))
    return str(folder / "a"), str(folder / "b")
