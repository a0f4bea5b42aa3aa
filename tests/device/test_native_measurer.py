"""The native observer reserves and launches as the measurer does: the same launches and tickets, under the same lock.

Without a card: tensors of the host stand for those of a device, and the kernels go to the fake driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from astray.capture.adapters import TensorIdentity
from astray.capture.pytorch.native.build import load
from astray.capture.pytorch.tensors import NAMES
from astray.device.cuda_measurer import Slots
from astray.device.tickets import CAPTURED, SLOTS, Tickets
from astray.stats import Strided

_launch = pytest.importorskip("astray.device._launch", reason="The native launcher was not built: no C compiler?")
TensorObserver = load().TensorObserver
cuda_measurer = pytest.importorskip("astray.device.cuda_measurer", reason="There is no Triton here.")

DEVICE = torch.device("cpu")
STREAM = 0xABC


class Driver:
    """The fake driver: its variables, and its launches as lines."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        _launch.open(str(path))

    def set(self, **values: int) -> None:
        for name, value in values.items():
            ctypes.c_int.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def launches(self) -> list[str]:
        """Those since the last time."""
        log = (ctypes.c_char * (1 << 16)).in_dll(self.library, "calls")
        lines = log.value.decode().splitlines()
        log.value = b""
        return [line for line in lines if line.startswith("launch")]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("There is no C compiler here to build the fake driver with.")
    library, source = tmp_path / "libfake.so", Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o", library, source], check=True)
    fake = Driver(library)
    fake.set(words=7)  # as many as every kernel has
    yield fake
    with contextlib.suppress(OSError):  # where there is a real one, the tests that follow want it
        _launch.open(_launch.DRIVER)


class Ring(cuda_measurer.CudaMeasurer):
    """The measurer of a card that is not there. It notes how many measurements there were whenever it fetches them."""

    def __init__(self, partials: int = 1 << 18) -> None:
        self._device, self._index, self._tickets = DEVICE, 0, Tickets()
        self._processors, self._pairs = 4, False
        self._into = 0x1000, partials, 0x2000
        self._slots = Slots(SLOTS, partials, 0x1000, 0x2000)
        self._merge_rows = _launch.load(b"merge_rows", "merge_rows", 0, 128, 0, 5, 0)
        self._kernels, self._launches, self._lists = {}, {}, {}
        self._segment = self._tickets.open()
        self._slots.open(self._segment.number)
        self._opened, self._streams, self._merged = 0.0, {}, None
        self.measured, self.sent = 0, []

    def measure(self, memory: Any, shard: Any, statistics: bool) -> int | str:
        self.measured += 1
        return super().measure(memory, shard, statistics)

    def _merge(self, segment: Any) -> bool:
        self.sent.append(segment.count)
        segment.lose("it is not there")
        return True


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(cuda_measurer, "_stream", lambda raw, device: None)
    monkeypatch.setattr(cuda_measurer, "_is_captured", lambda stream: False)  # before the launcher is asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def kernel(source: Any, device: int) -> Any:
        return _launch.load(b"measure", source.function.__name__, device, 128, 0, len(source.signature), 0)

    monkeypatch.setattr(cuda_measurer, "kernel", kernel)


class Bench:
    """An observer for a measurer, and the tickets in its rows."""

    def __init__(self, measurer: Ring) -> None:
        self.measurer, self.rows = measurer, []
        self.groups: list[int] = []  # how many were measured by one launch
        examples = [(torch.empty(0, dtype=dtype), name) for dtype, name in NAMES.items() if name != "complex32"]
        writer = SimpleNamespace(tensor_row=self.rows.append)
        refuse = lambda *_: pytest.fail("the twin was asked")  # noqa: E731
        self.observer = TensorObserver(
            examples, nn.Parameter, {}, {DEVICE: measurer}, lambda index: STREAM, self.together, None, TensorIdentity,
            {}, writer, None, 1 << 20, refuse, refuse, refuse, refuse, self.first,
        )  # fmt: skip
        self.observer.apply(True, frozenset({"output", "parameter", "state"}), True, False, False)

    def together(self, device: torch.device, memories: list[Any], statistics: bool) -> list[int] | None:
        assert device == DEVICE
        tickets = self.measurer.measure_together(memories, statistics)
        self.groups.append(0 if tickets is None else len(tickets))
        return tickets

    def first(self, tensor: torch.Tensor, identity: TensorIdentity, *_: Any) -> tuple[Any, ...]:
        ticket = self.measurer.measure(Strided(*identity[2:6]), None, True)
        note = ticket if isinstance(ticket, str) else None
        return (ticket if note is None else None, None, None, None, note)

    def see(self, tensor: torch.Tensor, role: str = "output") -> Any:
        self.observer.observe(1, role, "0", tensor)
        return self.rows[-1][8]

    def step(self, parameters: list[torch.Tensor]) -> list[Any]:
        """The tickets of parameters that are seen in a step."""
        found = [self.see(parameter, "parameter") for parameter in parameters]
        self.measurer.close()
        self.observer.next_step()
        return found


def tensors(count: int) -> list[torch.Tensor]:
    kinds = [torch.zeros(5, 6), torch.zeros(6, 5).t(), torch.zeros(9, dtype=torch.bfloat16)[1:], torch.zeros(700, 800)]
    return [kinds[number % 4].clone() for number in range(count)]


@pytest.mark.usefixtures("one_stream")
def test_the_launches_and_tickets_are_those_of_the_ring(driver: Driver) -> None:
    seen = tensors(150)
    bench, plain = Bench(Ring()), Ring()
    tickets, launches = [], []
    for tensor in seen:
        tickets.append(bench.see(tensor))
        launches += driver.launches()
    twins, others = [], []
    for tensor in seen:
        memory = Strided(tensor.data_ptr(), NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride())
        twins.append(plain.measure(memory, None, True))
        others += driver.launches()
    assert len(launches) == 150
    assert launches == others
    assert tickets == twins == [2 * slot + 1 for slot in range(150)]
    assert bench.measurer._slots.count == plain._slots.count == 150
    assert bench.measurer._slots.used == plain._slots.used
    assert bench.measurer.measured < 10  # of each layout the first, and one in 64 for the clock
    assert bench.see(seen[0]) == tickets[0]
    assert driver.launches() == []


@pytest.mark.usefixtures("one_stream")
def test_a_full_ring_is_sent_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_measurer, "PARTIALS", 100)
    bench = Bench(Ring(partials=100))
    for tensor in tensors(64):
        bench.see(tensor)
    assert bench.measurer.sent
    assert sum(bench.measurer.sent) + bench.measurer._slots.count == 64
    assert len({row[8] for row in bench.rows}) == 64


@pytest.mark.usefixtures("one_stream")
def test_a_stream_that_is_captured_takes_no_slot(driver: Driver) -> None:
    bench = Bench(Ring())
    first, *others = tensors(9)
    bench.see(first)
    bench.see(others[3])  # of the same layout
    driver.set(status=1)
    assert bench.see(others[7]) is None
    assert bench.rows[-1][12] == CAPTURED
    assert bench.measurer._slots.count == 2
    assert not bench.measurer._slots.locked()


@pytest.mark.usefixtures("one_stream")
def test_a_failed_launch_leaves_a_reason_and_no_slot(driver: Driver) -> None:
    bench = Bench(Ring())
    first, *others = tensors(9)
    bench.see(first)
    (ctypes.c_char * 64).in_dll(driver.library, "failing").value = b"cuLaunchKernel"
    driver.set(failure=700)
    assert bench.see(others[3]) is None
    assert bench.rows[-1][12] == "the CUDA driver answered CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert bench.measurer._slots.count == 1
    assert not bench.measurer._slots.locked()


@pytest.mark.usefixtures("one_stream")
def test_no_segment_is_sent_during_a_launch(driver: Driver) -> None:
    bench = Bench(Ring())
    first, *others = tensors(9)
    bench.see(first)
    driver.set(blocked=1)
    seeing = threading.Thread(target=bench.see, args=(others[3],))
    seeing.start()
    while not driver.get("arrived"):
        pass
    closing = threading.Thread(target=bench.measurer.close)
    closing.start()
    time.sleep(0.05)
    assert bench.measurer.sent == []
    driver.set(released=1)
    seeing.join()
    closing.join()
    assert bench.measurer.sent == [2]


@pytest.mark.usefixtures("one_stream")
def test_the_ring_waits_for_a_lock_that_another_holds() -> None:
    bench = Bench(Ring())
    first, *others = tensors(9)
    bench.see(first)
    before = bench.measurer.measured
    bench.measurer._slots.__enter__()
    seeing = threading.Thread(target=bench.see, args=(others[3],))
    seeing.start()
    while bench.measurer.measured == before:
        pass
    assert len(bench.rows) == 1
    bench.measurer._slots.__exit__()
    seeing.join()
    assert [row[8] for row in bench.rows] == [1, 3]


@pytest.mark.usefixtures("one_stream")
def test_nothing_of_the_ring_is_kept() -> None:
    measurer = Ring()
    bench = Bench(measurer)
    for tensor in tensors(9):
        bench.see(tensor)
    alive = weakref.ref(measurer)
    bench.measurer = None  # type: ignore[assignment]
    cuda_measurers = [one for one in gc.get_referrers(measurer) if isinstance(one, dict) and DEVICE in one]
    for one in cuda_measurers:
        one.clear()
    del measurer, cuda_measurers, one
    until = time.monotonic() + 10
    while alive() is not None and time.monotonic() < until:  # a thread of an earlier test may look at it just now
        gc.collect()
        time.sleep(0.01)
    assert alive() is None


def parameters(count: int) -> list[torch.Tensor]:
    return [torch.zeros(4 * number, 8) for number in range(1, count + 1)]


@pytest.mark.usefixtures("one_stream")
def test_parameters_are_measured_together_from_the_second_step_on(driver: Driver) -> None:
    bench, model = Bench(Ring()), parameters(20)
    tickets = bench.step(model)
    assert len(driver.launches()) == 20
    for _ in range(3):
        tickets += bench.step(model)
        assert len(driver.launches()) == 1
    assert bench.groups == [20] * 3
    assert len(set(tickets)) == 80
    assert bench.measurer.sent == [20] * 4
    one = model[7]
    tickets = [bench.see(one, "parameter"), bench.see(one), bench.see(one.view(-1))]
    assert len(set(tickets)) == 1
    assert len(driver.launches()) == 1


@pytest.mark.usefixtures("one_stream")
def test_each_type_has_a_launch_and_what_does_not_fit_its_own(driver: Driver) -> None:
    bench, model = Bench(Ring()), parameters(6)
    model += [torch.zeros(8, dtype=torch.bfloat16) for _ in range(3)]
    model += [torch.zeros(5, 6).t(), torch.zeros(9)[1:], torch.zeros(3, dtype=torch.int64)]
    bench.step(model)
    driver.launches()
    assert len(set(bench.step(model))) == len(model)
    assert sorted(bench.groups) == [3, 6]
    assert len(driver.launches()) == 2 + 3


@pytest.mark.usefixtures("one_stream")
def test_a_parameter_that_changes_before_it_is_seen_is_measured_again_and_from_then_on_alone(driver: Driver) -> None:
    bench, (first, second, third) = Bench(Ring()), parameters(3)
    bench.step([first, second, third])
    driver.launches()
    seen = [bench.see(first, "parameter")]
    second.add_(1)  # its module has not been called yet
    seen += [bench.see(second, "parameter"), bench.see(third, "parameter")]
    assert len(driver.launches()) == 2
    assert len(set(seen)) == 3
    bench.measurer.close()
    bench.observer.next_step()
    for _ in range(2):
        bench.step([first, second, third])
        assert len(driver.launches()) == 2
    first.add_(1)  # between steps, as an optimizer does
    bench.step([first, second, third])
    assert len(driver.launches()) == 2
    assert bench.groups == [3, 2, 2, 2]


@pytest.mark.usefixtures("one_stream")
def test_those_that_are_handed_to_functions_are_measured_together_too(driver: Driver) -> None:
    bench, model = Bench(Ring()), [nn.Parameter(one) for one in parameters(4)]
    for _ in range(2):
        tickets = [bench.see(one, "output") for one in model]
        bench.measurer.close()
        bench.observer.next_step()
    assert bench.groups == [4]
    assert len(set(tickets)) == 4
    assert len(driver.launches()) == 4 + 1


@pytest.mark.usefixtures("one_stream")
def test_buffers_are_measured_together_though_each_call_writes_to_its_own(driver: Driver) -> None:
    """As batch norms do: what each finds is what the call of the step before has left."""
    bench, buffers = Bench(Ring()), parameters(6)
    seen = []
    for _ in range(3):
        for one in buffers:
            seen.append(bench.see(one, "state"))
            one.add_(1)
        bench.measurer.close()
        bench.observer.next_step()
    assert bench.groups == [6, 6]
    assert len(driver.launches()) == 6 + 1 + 1
    assert len(set(seen)) == 18


@pytest.mark.usefixtures("one_stream")
def test_what_is_forgotten_within_a_step_is_measured_alone_only_there(driver: Driver) -> None:
    bench, model = Bench(Ring()), parameters(4)
    bench.step(model)
    bench.see(model[0], "parameter")
    bench.observer.clear()  # as when the segment was sent, because the step takes long
    driver.launches()
    bench.step(model[1:])
    assert len(driver.launches()) == 3
    bench.step(model)
    assert len(driver.launches()) == 1
    assert bench.groups == [4, 4]


@pytest.mark.usefixtures("one_stream")
def test_values_are_numbered_as_they_are_seen_and_not_as_they_are_measured(driver: Driver) -> None:
    bench, model = Bench(Ring()), parameters(4)
    bench.step(model)
    assert [row[-1] for row in bench.rows] == [0, 1, 2, 3]
    for one in (model[2], model[0], model[2]):  # all four are measured when the first is seen
        bench.see(one, "parameter")
    bench.observer.clear()  # as when the segment was sent: measured again, and still the same values
    bench.see(model[0].t(), "output")
    bench.see(model[3], "parameter")
    assert [row[-1] for row in bench.rows[4:]] == [4, 5, 4, 5, 6]
    assert bench.groups == [4]


@pytest.mark.usefixtures("one_stream")
def test_what_is_gone_or_was_not_seen_lately_is_left_out(driver: Driver) -> None:
    bench, model = Bench(Ring()), parameters(5)
    bench.step(model)
    bench.step(model[:3])  # measures all
    driver.launches()
    del model[2]
    bench.step(model)
    assert len(driver.launches()) == 1 + 2  # the last two were not seen in the step before
    bench.step([])
    bench.step(model)
    assert len(driver.launches()) == 1
    assert bench.groups == [5, 2, 4]


@pytest.mark.usefixtures("one_stream")
def test_where_they_cannot_be_measured_together_they_are_measured_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, model = Bench(Ring()), parameters(5)
    bench.step(model)
    driver.launches()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert len(set(bench.step(model))) == 5
    assert len(driver.launches()) == 5
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    bench.step(model)
    assert bench.groups == [0, 5]
    assert len(driver.launches()) == 1
    bench.measurer._slots.take(0, SLOTS - 3)  # not enough slots are left for all
    assert bench.measurer.measure_together([(16, "float32", (4,), (1,))] * 4, True) is None
    assert bench.measurer.measure_together([(8, "float32", (4,), (1,))], True) is None
    assert driver.launches() == []
