"""What a measurer and the native taker count together: natively and in Python alike."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from astray.device.cuda_measurer import PythonSlots, Slots

KINDS = [PythonSlots, pytest.param(Slots, marks=pytest.mark.skipif(Slots is PythonSlots, reason="It was not built."))]


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_counted_by_segment(kind: Any) -> None:
    slots = kind(4096, 1 << 18, 1 << 63, 2**64 - 1)
    slots.open(7)
    assert [slots.take(programs) for programs in (3, 1, 100)] == [0, 1, 2]
    assert (slots.number, slots.count, slots.used) == (7, 3, 104)
    assert slots.take(1000, 290) == 3
    assert (slots.count, slots.used) == (293, 1104)
    slots.open(8)
    assert (slots.number, slots.count, slots.used) == (8, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_known_or_not(kind: Any) -> None:
    slots = kind(1, 1, 0, 0)
    assert slots.stream is None
    for stream in (0, 2**64 - 1, None):
        slots.stream = stream
        assert slots.stream == stream


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_at_a_time(kind: Any) -> None:
    slots = kind(1 << 20, 1, 0, 0)
    taken: list[int] = []

    def work() -> None:
        for _ in range(500):
            with slots as held:
                assert held is slots
                taken.append(held.take(1))

    with slots:
        assert slots.locked()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert taken == []
    for thread in threads:
        thread.join()
    assert taken == list(range(2000))
    assert not slots.locked()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_lets_go(kind: Any) -> None:
    slots = kind(1, 1, 0, 0)
    with pytest.raises(KeyError), slots:
        raise KeyError
    assert not slots.locked()
