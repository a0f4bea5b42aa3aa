"""Tickets: handed out by measurers, fetched in segments, redeemed by the writer; and rows that become statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from astray.device import tickets as module
from astray.device.devices import DeviceMeasurer
from astray.device.tickets import FIELDS, FORGOTTEN, NONE, UNSENT, WIDTH, Tickets, measurements
from astray.stats import Strided, measure


def strided(tensor: torch.Tensor) -> Strided:
    name = str(tensor.dtype).removeprefix("torch.")
    return Strided(tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride())


def tensors(count: int) -> list[torch.Tensor]:
    torch.manual_seed(count)
    return [torch.randn(3 + number, 5) * 10.0**number for number in range(count)]


def ticket_for(devices: DeviceMeasurer, tensor: torch.Tensor, statistics: bool = True) -> int:
    ticket = devices.measure(tensor, strided(tensor), None, statistics)
    assert isinstance(ticket, int)
    return ticket


def test_what_comes_back_is_what_the_kernels_here_find() -> None:
    devices = DeviceMeasurer()
    given = tensors(5)
    given[2][1, 3], given[2][2, 0], given[4][3, 2] = -math.inf, math.nan, math.nan
    held = np.array([ticket_for(devices, tensor) for tensor in given])
    devices.tickets.start_fetch()
    found, counted, here, lost = devices.tickets.redeem(held)
    assert lost is None
    assert here.all()
    assert counted.all()
    for place, tensor in enumerate(given):
        expected, fingerprint = measure(strided(tensor))
        assert expected is not None
        assert found.fingerprints[place] == fingerprint
        assert found.moments[:, place] == pytest.approx(expected[:6], rel=1e-12)
        assert found.at(place)[0][6:] == expected[6:]


def test_a_ticket_is_due_once_it_is_sent_for_and_can_be_redeemed_often() -> None:
    devices = DeviceMeasurer()
    (tensor,) = tensors(1)
    ticket = ticket_for(devices, tensor)
    assert not devices.tickets.is_due(ticket)
    devices.tickets.start_fetch()
    assert devices.tickets.is_due(ticket)
    later = ticket_for(devices, tensor)
    assert not devices.tickets.is_due(later)
    first, again = (devices.tickets.redeem(np.array([ticket, ticket])).measurements for _ in range(2))
    assert np.array_equal(first.fingerprints, again.fingerprints)
    assert first.fingerprints[0] == first.fingerprints[1] == measure(strided(tensor)).fingerprint


def test_the_numbers_are_those_of_the_moment_of_measuring() -> None:
    devices = DeviceMeasurer()
    (tensor,) = tensors(1)
    expected = measure(strided(tensor)).fingerprint
    ticket = ticket_for(devices, tensor)
    tensor.zero_()
    devices.tickets.start_fetch()
    assert devices.tickets.redeem(np.array([ticket])).measurements.fingerprints[0] == expected


def test_fingerprints_alone() -> None:
    devices = DeviceMeasurer()
    (tensor,) = tensors(1)
    held = np.array([ticket_for(devices, tensor, statistics) for statistics in (True, False)])
    devices.tickets.start_fetch()
    found, counted, here, _ = devices.tickets.redeem(held)
    assert counted.tolist() == [True, False]
    assert here.all()
    assert found.fingerprints[0] == found.fingerprints[1]


def test_a_full_segment_is_sent_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astray.device.devices.SLOTS", 2)
    devices = DeviceMeasurer()
    held = [ticket_for(devices, tensor) for tensor in tensors(3)]
    assert [devices.tickets.is_due(ticket) for ticket in held] == [True, True, False]


def test_tickets_are_used_again_until_the_program_has_all_sent_for_or_many_segments_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("astray.device.devices.SLOTS", 1)
    monkeypatch.setattr(module, "_KEPT", 12)  # a quarter is shared
    devices, forgotten = DeviceMeasurer(), []
    devices.tickets.forget = lambda: forgotten.append(1)
    (tensor,) = tensors(1)
    for expected in (0, 0, 1, 1, 1, 2, 2):
        ticket_for(devices, tensor)
        devices.tickets.start_fetch(own_thread=True)  # the writer's, which only the time decides
        assert len(forgotten) == expected
    devices.tickets.start_fetch()
    assert len(forgotten) == 3
    devices.tickets.start_fetch()  # nothing was measured since
    assert len(forgotten) == 3


def test_a_segment_that_is_lost_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("astray.device.devices._send", fail)
    devices, forgotten = DeviceMeasurer(), []
    devices.tickets.forget = lambda: forgotten.append(1)
    ticket_for(devices, tensors(1)[0])
    devices.tickets.start_fetch(own_thread=True)
    assert len(forgotten) == 1


def test_what_cannot_be_fetched_is_lost_with_a_reason() -> None:
    tickets = Tickets()
    good, bad = tickets.open(), tickets.open()
    rows = np.zeros((WIDTH, 1), np.int64)
    rows[FIELDS.index("finite")] = 1
    good.send(lambda: rows)
    bad.send(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    found, counted, here, lost = tickets.redeem(np.array([bad.ticket(0, True), good.ticket(0, True)]))
    assert here.tolist() == counted.tolist() == [False, True]
    assert lost == "the device failed before its measurement came: division by zero"
    assert found.counts[3].tolist() == [0, 1]


def test_an_end_leaves_nothing_undue() -> None:
    class Stuck:
        segment = (tickets := Tickets()).open()

        def close(self) -> None: ...

        def abandon(self, why: str) -> None:
            self.segment.lose(why)

    Stuck.tickets.add(Stuck())
    ticket = Stuck.segment.ticket(0, True)
    Stuck.tickets.start_fetch()
    assert not Stuck.tickets.is_due(ticket)
    Stuck.tickets.finish()
    assert Stuck.tickets.is_due(ticket)
    assert Stuck.tickets.redeem(np.array([ticket])).lost == UNSENT


def test_old_segments_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 2)
    devices = DeviceMeasurer()
    (tensor,) = tensors(1)
    held = []
    for _ in range(6):
        held.append(ticket_for(devices, tensor))
        devices.tickets.start_fetch()
        devices.tickets.redeem(np.array(held[-1:]))
    assert devices.tickets.redeem(np.array(held[:1])).lost == FORGOTTEN
    assert devices.tickets.redeem(np.array(held[-2:])).lost is None


def test_rows_of_nothing_finite_and_of_one_number_only() -> None:
    rows = np.zeros((WIDTH, 3), np.int64)
    for name, values in {
        "finite": [0, 4, 2],
        "mean": [0.0, 0.1000001, 1e300],
        "spread": [0.0, 1e-9, 1e300],
        "low": [math.inf, 0.1, -1e300],
        "high": [-math.inf, 0.1, 1e300],
        "nan": [3, 0, 0],
        "first": [4 * 7 + 2, NONE, NONE],
    }.items():
        column = np.array(values)
        rows[FIELDS.index(name)] = column.view(np.int64)
    moments, counts, _, first_bad, first_bad_value = measurements(rows)
    assert np.isnan(moments[:, 0]).all()
    assert moments[:, 1].tolist() == [0.1, 0.1, 0.1, 0.0, 0.2, 0.1]  # all are equal: nothing spreads
    assert np.isfinite(moments[:, 2]).all()
    assert counts[3].tolist() == [3, 4, 2]
    assert (first_bad.tolist(), first_bad_value.tolist()) == ([7, -1, -1], [-math.inf, 0.0, 0.0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_measured_together_have_the_numbers_they_have_alone(dtype: torch.dtype) -> None:
    devices, given = DeviceMeasurer(), [tensor.cuda().to(dtype) for tensor in [*tensors(40), torch.randn(3000, 1001)]]
    memories = [strided(tensor) for tensor in given]
    alone = [ticket_for(devices, tensor) for tensor in given]
    for _ in range(3):  # the list is on the device from the second time on
        together = devices.measure_together(given[0].device, memories, True)
        assert together is not None
        devices.tickets.start_fetch()
        one, other = (devices.tickets.redeem(np.array(held)) for held in (alone, together))
        assert other.available.all()
        for ours, theirs in zip(other.measurements, one.measurements, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert devices.measure_together(torch.device("cpu"), memories, True) is None
    devices.stop()
