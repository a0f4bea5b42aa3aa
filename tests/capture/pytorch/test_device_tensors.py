"""Tensors measured on their device, by ticket: on a GPU, and on the CPU as a simulated device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import astray
import tensor_oracle
from astray.capture.pytorch import adapter
from capture.simulated_device import SimulatedDeviceReader
from recorded_rows import different, rows
from small_models import InPlace, Residual

MEASURED = ("min", "max", "mean", "std", "l2", "absmax", "zeros", "nan", "inf", "count", "fingerprint")


@pytest.fixture(params=["far", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the model and its data. "far" is the CPU, as a simulated device."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(adapter, "TorchReader", SimulatedDeviceReader)
    return "cpu"


def train(path: Path, device: str, build: Any = Residual, steps: int = 2, **settings: Any) -> astray.Run:
    torch.manual_seed(0)
    model = build().to(device)
    data = torch.randn(4, 6).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with astray.record(path, model, overwrite=True, **settings) as rec:
        for _ in range(steps):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            rec.step()
    return astray.open(path)


@pytest.mark.parametrize("build", [Residual, InPlace])
@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_what_is_recorded_is_what_is_recorded_here(
    build: Any, level: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = rows(train(tmp_path / "far", device, build, level=level))
    monkeypatch.undo()
    near = rows(train(tmp_path / "near", "cpu", build, level=level))
    assert len(far) == len(near) > 30
    for one, other in zip(far, near, strict=True):
        for name in set(one) - {*MEASURED, "device", "stack"}:
            assert one[name] == other[name], (name, one["site"])
        if device == "cpu":  # the same bits were computed
            assert one["fingerprint"] == other["fingerprint"]
            assert [one[name] for name in MEASURED[:6]] == pytest.approx(
                [other[name] for name in MEASURED[:6]], rel=1e-12
            )
        assert [one[name] for name in ("nan", "inf", "count")] == [other[name] for name in ("nan", "inf", "count")]


def test_fingerprints_alone(device: str, tmp_path: Path) -> None:
    for row in rows(train(tmp_path / "run", device, keep="fingerprint")):
        assert row["fingerprint"] is not None
        assert row["mean"] is row["count"] is None


def test_two_recordings_are_identical(device: str, tmp_path: Path) -> None:
    for name in "ab":
        train(tmp_path / name, device)
    assert astray.compare(tmp_path / "a", tmp_path / "b").first is None
    a, b = (rows(astray.open(tmp_path / name)) for name in "ab")
    assert [[row[name] for name in MEASURED] for row in a] == [[row[name] for name in MEASURED] for row in b]


@pytest.mark.parametrize("kept", [4, 16])  # of the second, tickets of earlier segments are used for new rows
def test_a_program_without_steps_loses_nothing(
    kept: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (
        *(["cuda_measurer"] if device == "cuda" else []),
        "devices",
        "tickets",
    ):  # which the others import it from
        monkeypatch.setattr(f"astray.device.{part}.SLOTS", 8)
    monkeypatch.setattr("astray.device.tickets._KEPT", kept)
    model = nn.Linear(3, 3).to(device)
    data = torch.randn(2, 3).to(device)
    with astray.record(tmp_path / "run", model, phases="forward") as rec:
        for _ in range(100):
            model(data)
        rec.flush()
        flushed = astray.open(tmp_path / "run").ranks[0].tensors
        assert len(flushed["count"]) > 200
    run = astray.open(tmp_path / "run")
    assert all(row["fingerprint"] is not None for row in rows(run))
    outputs = rows(run, role="output")
    assert len(outputs) == 100
    assert len({row["fingerprint"] for row in outputs}) == 1
    assert all(row["note"] is None for row in outputs)


def test_rows_wait_for_their_measurements_and_calls_do_not(device: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 3).to(device)
    data = torch.randn(2, 3).to(device)
    with astray.record(tmp_path / "run", model) as rec:
        model(data)
        rec.step()
        rec.flush()
        first = len(astray.open(tmp_path / "run").ranks[0].tensors["count"])
        model(data)
        rec.flush()
        assert len(astray.open(tmp_path / "run").ranks[0].tensors["count"]) == 2 * first


KILLED = """
import os, signal, sys, torch
from torch import nn
import astray
from astray.capture.pytorch import adapter
if sys.argv[2] == "cpu":
    sys.path.insert(0, sys.argv[3])
    from simulated_device import SimulatedDeviceReader
    adapter.TorchReader = SimulatedDeviceReader
model = nn.Linear(3, 3).to(sys.argv[2])
data = torch.randn(2, 3).to(sys.argv[2])
with astray.record(sys.argv[1], model) as rec:
    for _ in range(3):
        model(data).sum().backward()
        rec.step()
    rec.flush()
    model(data)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_takes_no_step_that_was_flushed(device: str, tmp_path: Path) -> None:
    place = "cuda" if device == "cuda" else "cpu"
    folders = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run"), place, folders[0]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    found = rows(astray.open(tmp_path / "run"))
    assert {row["step"] for row in found} >= {0, 1, 2}
    assert all(row["count"] for row in found if row["step"] < 3)


def test_a_device_that_fails_leaves_rows_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "TorchReader", SimulatedDeviceReader)

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    monkeypatch.setattr("astray.device.devices._send", fail)
    run = train(tmp_path / "run", "cpu", steps=1, phases="forward")
    found = rows(run)
    assert found
    assert {row["note"] for row in found} == {"the device failed: CUDA error: unspecified launch failure"}
    assert all(row["fingerprint"] is row["mean"] is None for row in found)
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.complete


@pytest.mark.parametrize("keep", ["tensors", "sample"])
@pytest.mark.parametrize("part", [None, "0:2, ..., :3"])
def test_values_are_those_of_the_moment(keep: str, part: str | None, device: str, tmp_path: Path) -> None:
    class Overwriting(nn.Module):
        """Writes over its result at once; the next call sees other numbers in the same memory."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2.0
            return y.transpose(0, 1)

    model = Overwriting()
    data = torch.arange(24.0).reshape(4, 6).to(device)
    with astray.record(tmp_path / "run", model, keep=keep, samples=7, slice=part, phases="forward") as rec:
        for _ in range(3):
            model(data).mul_(-1.0)
            data.add_(100.0)
        rec.step()
    run = astray.open(tmp_path / "run")
    expected = torch.arange(24.0).reshape(4, 6)
    for number in range(3):
        (output,) = rows(run, role="output", micro=number)
        values = run.ranks[0].values(output["row"])
        whole = ((expected + 100.0 * number) * 2.0).transpose(0, 1)
        whole = whole if part is None else whole[0:2, :3]
        if keep == "tensors":
            assert values.tolist() == whole.tolist()
        else:
            assert set(values.ravel().tolist()) <= set(whole.ravel().tolist())
            assert values.size == min(7, whole.numel())


@pytest.mark.parametrize("keep", ["tensors", "sample"])
def test_what_is_stored_does_not_depend_on_when_measurements_are_sent_for(
    keep: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer sends for them in the middle of a step if that takes long, as while kernels are being compiled."""

    class Stuck(nn.Module):
        def __init__(self, rec: list[Any]) -> None:
            super().__init__()
            self.first, self.second, self.rec = nn.Linear(6, 6), nn.Linear(6, 6), rec

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            for rec in self.rec:
                deferred = rec._engine.tensors.reader.deferred
                thread = threading.Thread(target=deferred.start_fetch, kwargs={"own_thread": True})
                thread.start()
                thread.join()
            return self.second(torch.relu(y)) + self.first(y) + x

    found = []
    for way in ("quick", "stuck", "oracle"):
        if way == "oracle":
            tensor_oracle.use(monkeypatch)
        torch.manual_seed(0)
        stuck: list[Any] = []
        model = Stuck(stuck).to(device)
        data = torch.randn(4, 6).to(device)
        with astray.record(tmp_path / way, model, keep=keep, level=["module", "function"]) as rec:
            stuck += [] if way == "quick" else [rec]
            for _ in range(2):
                model(data).square().mean().backward()
                rec.step()
        found.append(rows(astray.open(tmp_path / way), kind="module"))
    assert len(found[0]) > 30
    assert different(found[0], found[1]) == different(found[0], found[2]) == []


def test_a_program_that_is_stuck_in_a_step_has_its_rows_written(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astray.store.writing.run_writer.HELD_SECONDS", 0.1)
    monkeypatch.setattr("astray.store.writing.run_writer.IDLE_SECONDS", 0.05)
    model = nn.Linear(3, 3).to(device)
    with astray.record(tmp_path / "run", model):
        model(torch.randn(2, 3).to(device))
        for _ in range(200):
            if rows(astray.open(tmp_path / "run")):
                break
            time.sleep(0.05)
        assert rows(astray.open(tmp_path / "run"), role="output")
