"""A recording that another tool's writer is fed with: every row once, in order, with its values."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensor_oracle
from astray.foreign import live_writer as live
from astray.foreign.live_writer import LiveWriter
from astray.recorder import Recorder
from astray.records import Call, Frame, Tensor
from astray.stats import Strided, measure
from astray.store import End, RankRun, RunInfo


class Notebook:
    """A translator that writes down what it is told."""

    def __init__(self, path: Path, rank: int, info: RunInfo, *, overwrite: bool) -> None:
        self.lost: Counter[str] = Counter({"a colour": 2})
        self.made = (path, rank, info.framework, overwrite)
        self.calls: list[tuple[int, int, str]] = []
        self.tensors: list[tuple[int, int, str, str]] = []
        self.values: list[np.ndarray | None] = []
        self.measured: list[tuple[float | None, int | None]] = []
        self.stacks: list[list[Frame]] = []
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.ended: End | None = None
        self.breaks_at = -1

    def take(self, step: int, rows: RankRun) -> None:
        self.threads.add(threading.current_thread().name)
        if step == self.breaks_at:
            raise OSError(28, "No space left on device")
        for at in range(len(rows.calls)):
            call = rows.calls.row(at)
            self.calls.append((step, call["seq"], call["site"]))
            if call["stack"] is not None:
                self.stacks.append(rows.stack(call["stack"]))
        for at in range(len(rows.tensors)):
            cells = rows.tensors.row(at)
            self.tensors.append((step, cells["seq"], cells["role"], cells["path"]))
            self.values.append(rows.values(at))
            self.measured.append((cells["mean"], cells["fingerprint"]))
        self.events.append(f"take {step}")

    def sync(self) -> None:
        self.events.append("sync")

    def end_step(self, step: int) -> None:
        self.events.append(f"over {step}")

    def close(self, end: End) -> None:
        self.ended = end


def put(writer: LiveWriter, seq: int, step: int) -> None:
    writer.call(Call(seq, step, 0, "module", f"layers.{seq}", "Linear", 0, "forward", stack=seq % 2))
    row = Tensor(seq, "output", "out", "float32", (2, 3), (3, 1), "cpu", False)
    writer.tensor(row, np.full((2, 3), seq, np.float32) if seq % 2 else None)


def test_rows_come_in_order_with_values_and_steps_end_where_they_do(tmp_path: Path, info: RunInfo) -> None:
    writer = LiveWriter(tmp_path, 3, info=info, make=Notebook)
    book = writer.translator
    assert isinstance(book, Notebook)
    writer.stack(0, [Frame("a.py", 1, "f", "x")])
    writer.stack(1, [Frame("b.py", 2, "g", "y")])
    for step in range(3):
        for seq in range(4 * step, 4 * step + 4):
            put(writer, seq, step)
        writer.step_done()
    assert writer.flush()
    assert book.made == (tmp_path, 3, "torch", False)
    assert book.calls == [(seq // 4, seq, f"layers.{seq}") for seq in range(12)]
    assert book.tensors == [(seq // 4, seq, "output", "out") for seq in range(12)]
    shown = [None if one is None else one.tolist() for one in book.values]
    assert shown == [[[seq] * 3] * 2 if seq % 2 else None for seq in range(12)]
    assert [event for event in book.events if event != "sync"] == [
        f"{what} {step}" for step in range(3) for what in ("take", "over")
    ]
    assert book.events[-1] == "sync"
    assert [stack[0].file for stack in book.stacks] == ["a.py", "b.py"] * 6
    assert book.threads == {"astray-writer-rank3"}
    writer.close()
    assert book.ended is not None
    assert book.ended is writer.end
    assert (writer.end.steps, writer.end.calls, writer.end.tensors, writer.end.values) == (3, 12, 12, 6)
    assert writer.end.complete
    assert [missed._asdict() for missed in writer.end.missed] == [
        {"what": "a colour", "why": "this format has no place for it", "count": 2}
    ]


def test_files_are_brought_up_to_date_in_the_middle_of_a_step(tmp_path: Path, info: RunInfo) -> None:
    with LiveWriter(tmp_path, info=info, make=Notebook) as writer:
        book = writer.translator
        assert isinstance(book, Notebook)
        put(writer, 0, 0)
        patience = time.monotonic() + 30
        while "sync" not in book.events or not book.calls:
            assert time.monotonic() < patience
            time.sleep(0.01)


def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path: Path, info: RunInfo) -> None:
    writer = LiveWriter(tmp_path, info=info, make=Notebook)
    book = writer.translator
    assert isinstance(book, Notebook)
    book.breaks_at = 1
    for step in range(3):
        put(writer, step, step)
        writer.step_done()
    assert not writer.flush()
    writer.close()
    assert writer.failure is not None
    assert writer.failure.startswith(f"Writing {tmp_path} stopped: OSError: [Errno 28] No space left on device.")
    assert writer.end is not None
    assert not writer.end.complete
    assert writer.end.steps == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("by", ["native", "oracle"])
@pytest.mark.parametrize("held", [1 << 27, 0])
def test_a_tensor_that_is_met_again_has_its_values_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str, held: int, device: str
) -> None:
    """Whether what was written is still held, or has to be read anew because there is no room for it."""
    if by == "oracle":
        tensor_oracle.use(monkeypatch)
    monkeypatch.setattr(live, "SEEN_BYTES", held)
    monkeypatch.setattr(live, "SYNC_SECONDS", 0.002)
    books: list[Notebook] = []

    def make(*given: Any, **more: Any) -> Notebook:
        books.append(Notebook(*given, **more))
        return books[-1]

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(
        tmp_path, model, level=["module", "function"], keep="tensors", writer=live.live_writer(make)
    ).start()
    for step in range(4):
        model(torch.randn(8, 32, device=device)).square().mean().backward()
        if step == 1:
            recorder.flush()
        optimizer.step()
        recorder.step()
    recorder.stop()
    (book,) = books
    assert len(book.tensors) > 200
    for values, (mean, fingerprint) in zip(book.values, book.measured, strict=True):
        assert values is not None
        found = measure(Strided.from_numpy(values))
        assert found.statistics is not None
        assert (found.statistics.mean, found.fingerprint) == (pytest.approx(mean, rel=1e-6, abs=1e-8), fingerprint)
    assert book.ended is not None
    assert all(missed.what == "a colour" for missed in book.ended.missed)
