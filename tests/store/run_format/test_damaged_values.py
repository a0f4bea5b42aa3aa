"""Values that a disk has changed decide no verdict; files that are cut, missing or zeroed are reported on opening."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import astray
from astray.errors import RunError
from astray.records import Call, Tensor
from astray.stats.kernels import Strided, measure
from astray.store import RunData, RunWriter, open_run
from astray.store.run_info import RunInfo


def record(path: Path, noise: float = 0.0, part: str | None = None) -> RunData:
    """Two steps of four layers; `noise` is added to what they give."""
    random = np.random.default_rng(0)
    with RunWriter(path, info=RunInfo.of_process(framework="torch")) as writer:
        for seq in range(8):
            writer.call(Call(seq, seq // 4, 0, "module", f"h.{seq % 4}", "Linear", 0, "forward"))
            array = random.normal(size=(16, 16)).astype(np.float32)
            array *= np.float32(1 + noise)
            found = measure(Strided.from_numpy(array))
            tensor = Tensor(seq, "output", "out", "float32", (16, 16), (16, 1), "cpu", False, *found)
            writer.tensor(tensor, array if part is None else array[:4], part=part)
    return open_run(path)


def flip(run: RunData, row: int, bit: int = 6, byte: int = 43) -> None:
    """Flip a bit of a row's values: that of an exponent, unless another is said."""
    tensors = run.ranks[0].tensors
    file = run.path / "rank0" / "values-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[int(tensors.numbers("blob_offset")[row]) + byte] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_flipped_bit_is_not_a_divergence(tmp_path: Path, side: str) -> None:
    runs = {"reference": record(tmp_path / "good"), "candidate": record(tmp_path / "other", noise=1e-7)}
    flip(runs[side], 2)
    diff = astray.compare(tmp_path / "good", tmp_path / "other")
    assert diff.first is None
    assert diff.pairs["source"][2] == "statistics"
    assert "the kept values could not be read" in diff.pairs["reason"][2]
    assert diff.pairs["source"][3] == "values"
    problems = [problem for problem in diff.problems if "do not have the fingerprint" in problem]
    assert len(problems) == 1
    assert f"In the {side}" in problems[0]
    assert "1 tensor, first output out of h.2" in problems[0]


def test_several_are_reported_once(tmp_path: Path) -> None:
    run = record(tmp_path / "good")
    record(tmp_path / "other", noise=1e-7)
    flip(run, 1)
    flip(run, 6, bit=0, byte=0)  # the last bit of a number
    diff = astray.compare(tmp_path / "good", tmp_path / "other")
    assert ["2 tensors, first output out of h.1" in problem for problem in diff.problems] == [True]
    assert not diff.reference.complete


def test_reading_them_raises(tmp_path: Path) -> None:
    run = record(tmp_path / "good")
    flip(run, 5)
    run = open_run(run.path)
    assert run.ranks[0].verified(4) is not None
    for _ in range(2):
        with pytest.raises(RunError, match="not those that it was measured from"):
            run.ranks[0].verified(5)
    assert len(run.ranks[0].problems) == 1


def test_values_of_a_slice_must_lie_within_the_statistics(tmp_path: Path) -> None:
    run = record(tmp_path / "good", part="0:4")
    assert all(run.ranks[0].verified(row) is not None for row in range(8))
    flip(run, 3)
    run = open_run(run.path)
    with pytest.raises(RunError, match="not those that it was measured from"):
        run.ranks[0].verified(3)


def test_files_that_are_cut_missing_or_zeroed_are_reported_on_opening(tmp_path: Path) -> None:
    run = record(tmp_path / "good")
    file = run.path / "rank0" / "values-00000.safetensors"
    assert run.problems == []
    whole = file.read_bytes()
    os.truncate(file, len(whole) - 1)
    run = open_run(run.path)
    assert f"{file} is cut: it has {len(whole) - 1:,} bytes" in run.problems[0]
    assert not run.complete
    file.write_bytes(bytes(len(whole)))
    assert open_run(run.path).problems == [
        f"{file} does not begin as a safetensors file does: it was overwritten. It has the values of 8 tensors."
    ]
    file.unlink()
    assert open_run(run.path).problems == [f"{file} is missing. It has the values of 8 tensors."]


def test_stopping_puts_everything_onto_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    record(tmp_path / "good")
    synced = [name.partition(".json.")[0] for name in synced]
    files = {"calls.arrows", "tensors.arrows", "stacks.jsonl", "values-00000.safetensors"}
    assert files <= set(synced[: synced.index(".end")])  # before the word that they are whole
    assert synced[synced.index(".end") :] == [".end", "rank0", "good"]


def test_a_disk_that_fails_then_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name == "tensors.arrows":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    run = record(tmp_path / "good")
    assert run.problems == [f"{run.path}/rank0/tensors.arrows could not be put onto the disk: Input/output error."]
    assert not run.complete
