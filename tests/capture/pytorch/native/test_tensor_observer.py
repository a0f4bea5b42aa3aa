"""The native observer makes the same rows as the oracle, on the host and on a simulated device."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
import tensor_oracle
from astray.capture.adapters import TensorIdentity
from astray.capture.pytorch.native.build import load
from astray.capture.pytorch.tensors import NAMES
from astray.capture.settings import Settings
from astray.store.run_format import rows as store_rows
from astray.store.run_format.rows import TICKET, PythonRowBuffer, tensor_rows
from recorded_rows import different, rows
from small_models import MODELS, build

TensorObserver = load().TensorObserver

ROLES = frozenset({"input", "output"})


class Odd(nn.Module):
    """Returns tensors of every unusual kind, and some that are nearly plain."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        complex_ = torch.complex(x, -x)
        with torch.inference_mode():
            frozen = torch.ones(3)
        made = [
            x, x.t(), x[:, ::2], x.view(-1), x[1:1], x[0, 0], x.expand(2, *x.shape), x.double(), x.bfloat16(), x > 0,
            x.to_sparse(), complex_, complex_.conj(), complex_.conj().imag, complex_.conj().imag[:1, :1],
            torch._neg_view(x[:, ::2]), frozen, frozen[1:], torch.empty(2, 3, device="meta"), x.long(),
            torch.nested.nested_tensor([x[0], x[1, :2]]), torch.zeros(2, dtype=torch.complex64), x.detach(), x.data,
            torch.empty(4, 0), nn.Parameter(x.detach().clone()), torch.zeros(()), x.to(torch.float8_e5m2),
        ]  # fmt: skip
        x.data.add_(1)  # past the version counter of x, but not of what comes next
        return [*made, x, x * 1, torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)]


def recorded(path: Path, model: nn.Module, device: str = "cpu", **settings: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    data = torch.randn(5, 6).to(device)
    with astray.record(path, model, **settings) as rec:
        for _ in range(2):
            result = model(data)
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.square().mean().backward()
            rec.step()
    return rows(astray.open(path))


def in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], **settings: Any
) -> Any:
    found = []
    for way in ("native", "oracle"):
        if way == "oracle":
            tensor_oracle.use(monkeypatch)
        torch.manual_seed(1)
        found.append(recorded(tmp_path / way, make(), **settings))
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
@pytest.mark.parametrize("keep", ["stats", "fingerprint", "tensors", "sample"])
@pytest.mark.parametrize("level", ["module", "op"])
def test_odd_tensors_have_the_rows_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str, level: str
) -> None:
    ours, others = in_both_ways(tmp_path, monkeypatch, Odd, keep=keep, level=level)
    assert len(ours) > 60
    assert different(ours, others) == []


@pytest.mark.parametrize("settings", [{}, {"max_tensors": 20}, {"slice": "0"}, {"roles": ["output"]}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_models_have_the_rows_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], settings: dict[str, Any]
) -> None:
    ours, others = in_both_ways(tmp_path, monkeypatch, lambda: build(kind), level=["module", "function"], **settings)
    assert ours
    assert different(ours, others) == []


@pytest.mark.gpu
@pytest.mark.parametrize("keep", ["stats", "fingerprint", "sample"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_on_a_card_have_the_rows_of_the_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], keep: str
) -> None:
    settings = {"device": "cuda", "keep": keep, "level": ["module", "function"]}
    ours, others = in_both_ways(tmp_path, monkeypatch, lambda: build(kind).to("cuda"), **settings)
    assert ours
    assert different(ours, others) == []


def test_a_recording_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "native", model) as rec:
        assert isinstance(rec._engine.tensors.observe.__self__, TensorObserver)
    tensor_oracle.use(monkeypatch)
    with astray.record(tmp_path / "oracle", model) as rec:
        assert rec._engine.tensors.observe.__self__ is rec._engine.tensors


def test_it_launches_from_the_first_recording_of_a_process_on(tmp_path: Path) -> None:
    pytest.importorskip("astray.device._launch", reason="The native launcher was not built: no C compiler?")
    program = """if True:
        import sys, astray
        from torch import nn
        with astray.record(sys.argv[1], nn.Linear(2, 2)) as rec:
            assert "astray.device.cuda_measurer" not in sys.modules  # nothing has lain on a card yet
            print(rec._engine.tensors.observe.__self__.launches)
        """
    command = [sys.executable, "-c", program, tmp_path / "run"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"


def test_limits_set_later_count_what_came_before(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model, phases="forward") as rec:
        model(torch.ones(1, 2))
        tensors, before = rec._engine.tensors, len(rows_so_far(rec, tmp_path / "run"))
        tensors.apply(Settings.check(max_tensors=before + 1, phases="forward"))
        model(torch.ones(1, 2))
    assert before >= 4
    assert len(rows(astray.open(tmp_path / "run"))) == before + 1


def rows_so_far(rec: Any, path: Path) -> list[dict[str, Any]]:
    rec.flush()
    return rows(astray.open(path))


def test_nothing_of_a_recording_remains(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(1, 2))
        observer = weakref.ref(rec._engine.tensors)
    del rec
    gc.collect()
    assert observer() is None


# ---- one observer --------------------------------------------------------------------------------------------------


class Bench:
    """An observer whose writer only keeps the rows. Notes what goes to the slow path, and which memory is measured."""

    def __init__(self, ring: Any = None, row_buffer: Any = None, batch: int = 1 << 20) -> None:
        self.rows: list[tuple[Any, ...]] = []  # given to the writer's own method, where there is no row buffer
        self.ready_batches: list[int] = []  # how many rows the buffer had at each `batch_ready`
        self.slow: list[tuple[Any, ...]] = []
        self.firsts: list[TensorIdentity] = []
        self.unfilled: dict[int, Any] = {}
        self.failing = False
        self.writer = SimpleNamespace(
            tensor_row=self.rows.append, batch_ready=lambda rows: self.ready_batches.append(len(rows))
        )
        self.ring = ring
        rings = {} if ring is None else {torch.device("cpu"): ring}
        examples = [(torch.empty(0, dtype=dtype), name) for dtype, name in NAMES.items() if name != "complex32"]

        def slow(*given: Any) -> None:
            self.slow.append(given)

        self.observer = TensorObserver(
            examples, nn.Parameter, {}, rings, lambda index: 0xABC, None, None, TensorIdentity, self.unfilled,
            self.writer, row_buffer, batch, slow, slow, slow, slow, self.first,
        )  # fmt: skip
        self.observer.apply(True, ROLES, True, False, False)

    def first(self, tensor: torch.Tensor, identity: TensorIdentity, seq: int, role: str, path: str) -> tuple[Any, ...]:
        if self.failing:
            raise ZeroDivisionError
        self.firsts.append(identity)
        ticket = None
        if self.ring is not None:
            ticket = self.ring.measure(identity[2:], None, True)
        return (len(self.firsts), None, None, None, None) if ticket is None else (ticket, None, None, None, None)

    def see(self, *tensors: torch.Tensor) -> list[Any]:
        """The statistics in the rows of these tensors."""
        before = len(self.rows)
        for tensor in tensors:
            self.observer.observe(7, "output", "0", tensor)
        return [row[8] for row in self.rows[before:]]


def test_a_row_is_made_of_plain_values() -> None:
    bench = Bench()
    x = torch.zeros(2, 3, requires_grad=True)
    bench.observer.observe(7, "output", "y.0", x)
    identity = bench.firsts[0]
    assert (identity.address, identity.dtype, identity.owner) == (x.data_ptr(), "float32", x.untyped_storage())
    assert bench.rows == [(7, "output", "y.0", "float32", (2, 3), (3, 1), "cpu", True, 1, *[None] * 4, 0)]
    assert type(bench.rows[0][4]) is tuple


def test_a_memory_is_measured_once_until_it_changes() -> None:
    bench = Bench()
    x = torch.zeros(4, 6)
    assert bench.see(x, x, x.view(-1), x.view(6, 4), x.detach()) == [1] * 5  # the same numbers in the same order
    assert bench.see(x.t(), x.t(), x[:2], x[2:], x.view(torch.int32)) == [2, 2, 3, 4, 5]
    x.add_(1)
    assert bench.see(x, x) == [6, 6]
    for number, forget in enumerate([bench.observer.changed, bench.observer.written], 7):
        forget(x.view(-1)[3:])
        assert bench.see(x, x) == [number, number]
    bench.observer.forget(x.untyped_storage())
    assert bench.see(x, x) == [9, 9]
    bench.observer.clear()
    assert bench.see(x, x) == [10, 10]
    assert bench.slow == []


def test_a_memory_that_took_the_place_of_another_is_another() -> None:
    bench = Bench()
    seen: list[Any] = []
    for _ in range(50):
        seen += bench.see(torch.zeros(64))
    assert seen == list(range(1, 51))


def test_thousands_of_dead_memories_are_let_go() -> None:
    bench = Bench()
    alive = [torch.zeros(3) for _ in range(100)]
    first = bench.see(*alive)
    for _ in range(20_000):
        bench.observer.observe(7, "output", "0", torch.zeros(3))
    assert bench.see(*alive) == first


def test_thousands_of_layouts_do() -> None:
    bench = Bench()
    x = torch.zeros(250, 250)
    for height in range(1, 201):
        for width in range(1, 201, 2):
            bench.observer.observe(7, "output", "0", x[:height, :width])
    assert bench.rows[-1][4:6] == ((200, 199), (250, 1))
    assert len({row[8] for row in bench.rows}) == len(bench.firsts)


def test_what_is_not_asked_for_leaves_nothing() -> None:
    bench = Bench()
    x = torch.zeros(3)
    bench.observer.observe(-1, "output", "0", x)
    bench.observer.observe(7, "gradient", "0", x)
    assert bench.rows == bench.slow == []


def test_rows_go_to_the_lane_which_is_said_to_be_crowded_once_it_holds_a_batch() -> None:
    row_buffer = tensor_rows()
    bench, given = (
        Bench(row_buffer=row_buffer, batch=3),
        [torch.zeros(3), torch.zeros(2, 2), torch.zeros(4, requires_grad=True)],
    )
    bench.see(*given[:2])
    assert bench.ready_batches == []
    bench.see(given[2])
    assert bench.ready_batches == [3]
    assert bench.rows == []
    assert row_buffer.tickets(TICKET) == tuple(
        np.array(column, np.int64).tobytes() for column in ([0, 1, 2], [1, 2, 3])
    )
    assert np.frombuffer(row_buffer.encode(4, 0, 3, 9)[1][3], np.int64).tolist() == [3, 2, 2, 4]
    assert row_buffer.encode(7, 0, 3, 9)[1][1] == bytes([0b100])
    assert [row_buffer.cells(column) for column in (1, 2, 3, 6)] == [
        [word] * 3 for word in ("output", "0", "float32", "cpu")
    ]
    row_buffer.take()
    row_buffer.open = False
    bench.see(*given)
    assert len(row_buffer) == 0


def test_rows_go_to_the_writer_where_the_lane_is_not_native() -> None:
    bench = Bench(row_buffer=PythonRowBuffer(store_rows._TENSOR), batch=3)
    bench.see(torch.zeros(3))
    assert bench.rows == [(7, "output", "0", "float32", (3,), (1,), "cpu", False, 1, *[None] * 4, 0)]


def test_whatever_is_not_plain_is_handed_over() -> None:
    bench = Bench()
    with torch.inference_mode():
        frozen = torch.zeros(3)
    given = [
        frozen,
        frozen,
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ]
    plain = torch.zeros(3)
    for tensor in [*given, plain]:
        bench.observer.observe(7, "output", "0", tensor)
    assert [call[3] for call in bench.slow] == given
    assert len(bench.rows) == 1
    bench.observer.apply(False, ROLES, True, False, False)
    bench.see(plain)
    assert bench.slow[-1] == (7, "output", "0", plain)


def test_memory_that_is_not_filled_yet() -> None:
    bench = Bench()
    x, other = torch.zeros(3), torch.zeros(3)
    bench.unfilled[id(x.untyped_storage())] = weakref.ref(x.untyped_storage())
    bench.observer.observe_unread(7, "output", "0", other)
    bench.observer.observe_unread(7, "output", "1", x)
    assert [row[2] for row in bench.rows] == ["0"]
    assert bench.slow == [(7, "output", "1", x)]
    bench.observer.observe(8, "input", "a", other)
    bench.observer.observe_unread(8, "input", "b", x)  # which is about to be written over
    assert bench.slow[1:] == [(8, "input", "b", x)]
    assert bench.unfilled
    bench.observer.observe(9, "input", "a", x)  # so it has been filled
    assert bench.unfilled == {}
    bench.observer.observe_unread(9, "output", "c", x)
    bench.observer.observe_unread(9, "output", "d", other)
    assert [row[:3] for row in bench.rows[1:]] == [
        (8, "input", "a"),
        (9, "input", "a"),
        (9, "output", "c"),
        (9, "output", "d"),
    ]


def test_changes_that_may_concern_odd_tensors_are_handed_over() -> None:
    bench = Bench()
    x, sparse = torch.zeros(3), torch.zeros(3).to_sparse()
    bench.observer.written(sparse)
    bench.observer.changed(x)
    assert bench.slow == [(sparse,)]
    bench.unfilled[id(x.untyped_storage())] = weakref.ref(x.untyped_storage())
    bench.observer.written(x)  # perhaps it is filled now
    bench.observer.changed(x)
    assert bench.slow == [(sparse,), (x,)]
    bench.see(sparse)
    bench.observer.changed(x)
    assert len(bench.slow) == 4
    bench.observer.clear()
    bench.observer.changed(x)
    assert len(bench.slow) == 4


def test_errors_come_out_and_leave_no_sighting() -> None:
    bench, x = Bench(), torch.zeros(3)
    bench.failing = True
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bench.see(x)
    with pytest.raises(TypeError):
        bench.observer.observe("7", "output", "0", x)
    with pytest.raises(TypeError):
        bench.observer.observe(7, "output", x)
    assert bench.rows == []


def test_threads_may_observe_at_once() -> None:
    bench = Bench()
    shared = [torch.zeros(3) for _ in range(50)]

    def work() -> None:
        for number in range(2000):
            bench.observer.observe(7, "output", "0", shared[number % 50])
            bench.observer.observe(7, "output", "0", torch.zeros(number % 7 + 1))
            if number % 100 == 0:
                bench.observer.clear()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bench.rows) == 16_000
    assert bench.observer.take_row_count() == 16_000
    assert bench.observer.take_row_count() == 0
