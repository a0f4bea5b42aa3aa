"""Batches of rows whose measurements come by ticket, and files that native code and Python write alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pytest

from astray.records import Blob, Call, Statistics, Tensor
from astray.stats import Measurements
from astray.store.deferred import RedeemedTickets
from astray.store.run_format import rows as rows_module
from astray.store.run_format.encoder import BatchFile, call_columns, tensor_columns
from astray.store.run_format.rows import PythonRowBuffer, RowBuffer, call_rows, tensor_rows
from astray.store.run_format.schema import CALLS, TENSORS

MakeTensor = Callable[..., Tensor]
STATISTICS = Statistics._fields


class IsNan:
    """Equal to NaN, which itself is not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and math.isnan(other)


class Counter:
    """A ticket is the number that is behind it, several times over; odd ones are for fingerprints alone.

    From 4 on everything is finite; behind 0 the first bad element is NaN, behind 2 it is infinite.
    """

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        self.lost = lost

    def start_fetch(self) -> None: ...
    def finish(self) -> None: ...

    def due(self, tickets: npt.NDArray[np.int64]) -> int:
        return len(tickets)

    def redeem(self, tickets: npt.NDArray[np.int64]) -> RedeemedTickets:
        moments = tickets + np.arange(6)[:, None] / 8
        moments[0, tickets == 4] = np.nan
        here = ~np.isin(tickets, list(self.lost))
        counts, prints = tickets + np.arange(4)[:, None], tickets.astype(np.uint64) << np.uint64(40)
        first_bad = np.where(tickets < 4, tickets + 10, -1)
        found = Measurements(moments, counts, prints, first_bad, np.where(tickets, -np.inf, np.nan))
        return RedeemedTickets(found, here & (tickets % 2 == 0), here, "the card caught fire" if self.lost else None)


def behind(ticket: int) -> dict[str, Any]:
    """What a row with that ticket should say."""
    moments: list[float | None] = [ticket + i / 8 for i in range(6)]
    if ticket == 4:
        moments[0] = None
    first = [ticket + 10, -math.inf if ticket else IsNan()] if ticket < 4 else [None, None]
    known = dict(zip(STATISTICS, [*moments, *range(ticket, ticket + 4), *first], strict=True))
    statistics = known if ticket % 2 == 0 else dict.fromkeys(STATISTICS)
    return {**statistics, "fingerprint": ticket << 40}


def filled(found: RowBuffer, rows: list[tuple[Any, ...]]) -> RowBuffer:
    for row in rows:
        found.append(row)
    return found


def written(path: Path, rows: list[tuple[Any, ...]], late: Counter, blobs: list[Blob | None]) -> list[dict[str, Any]]:
    with closing(BatchFile(path, TENSORS)) as file:
        file.append(tensor_columns(filled(tensor_rows(), rows), blobs, late))
    table = pyarrow.ipc.open_stream(path).read_all()
    table.validate(full=True)
    return table.to_pylist()


def test_tickets_alone(tmp_path: Path, tensor: MakeTensor) -> None:
    rows = [tuple(tensor(seq, statistics=seq, fingerprint=None)) for seq in range(9)]
    found = written(tmp_path / "tensors", rows, Counter(), [None] * 9)
    assert [{name: row[name] for name in (*STATISTICS, "fingerprint")} for row in found] == list(map(behind, range(9)))
    assert [row["note"] for row in found] == [None] * 9


def test_tickets_among_rows_that_were_measured_at_once(tmp_path: Path, tensor: MakeTensor) -> None:
    empty = Statistics(None, None, None, None, None, None, 0, 0, 0, 0)
    odd = Statistics(-math.inf, math.inf, 0.0, 1.0, 2.0, 3.0, 1, 2, 3, 2**40, 2**39, -math.inf)
    rows = [
        tensor(0, statistics=6, fingerprint=None),
        tensor(1, statistics=odd, fingerprint=2**64 - 1),
        tensor(2, statistics=None, fingerprint=None),
        tensor(3, statistics=empty, fingerprint=0),
        tensor(4, statistics=3, fingerprint=None),
        tensor(5, statistics=None, fingerprint=5),
    ]
    found = written(tmp_path / "tensors", [tuple(row) for row in rows], Counter(), [None] * 6)
    nothing = dict.fromkeys(STATISTICS)
    assert [{name: row[name] for name in (*STATISTICS, "fingerprint")} for row in found] == [
        behind(6),
        {**odd._asdict(), "fingerprint": 2**64 - 1},
        {**nothing, "fingerprint": None},
        {**empty._asdict(), "fingerprint": 0},
        behind(3),
        {**nothing, "fingerprint": 5},
    ]


def test_lost_tickets_are_noted(tmp_path: Path, tensor: MakeTensor) -> None:
    notes = [None, "it is small", "it is large", None]
    rows = [tuple(tensor(seq, statistics=seq, fingerprint=None, note=note)) for seq, note in enumerate(notes)]
    found = written(tmp_path / "tensors", rows, Counter(frozenset({0, 2})), [None] * 4)
    assert [row["note"] for row in found] == [
        "the card caught fire", "it is small", "it is large; the card caught fire", None,
    ]  # fmt: skip
    assert [row["fingerprint"] for row in found] == [None, 1 << 40, None, 3 << 40]
    assert [row["count"] for row in found] == [None] * 4


def test_a_batch_that_is_split_keeps_its_tickets(
    tmp_path: Path, tensor: MakeTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astray.store.run_format.encoder.OFFSET_LIMIT", 100)
    rows = [tuple(tensor(seq, statistics=seq, fingerprint=None, note="x" * 60)) for seq in range(5)]
    found = written(tmp_path / "tensors", rows, Counter(), [None] * 5)
    assert [row["fingerprint"] for row in found] == [seq << 40 for seq in range(5)]
    assert [row["seq"] for row in found] == list(range(5))
    monkeypatch.setattr("astray.store.run_format.encoder.OFFSET_LIMIT", 50)
    with pytest.raises(ValueError, match="more than 50 bytes of text"):
        written(tmp_path / "other", rows, Counter(), [None] * 5)


def test_many_rows_are_several_batches(
    tmp_path: Path, call: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astray.store.run_format.encoder.MOST_ROWS", 8)
    with closing(BatchFile(tmp_path / "calls", CALLS)) as file:
        file.append(call_columns(filled(call_rows(), [tuple(call(seq)) for seq in range(21)])))
    with pyarrow.ipc.open_stream(tmp_path / "calls") as stream:
        assert [batch.num_rows for batch in stream] == [8, 8, 5]
    assert file.rows == 21


def test_files_are_the_same_without_the_native_extension(
    tmp_path: Path, tensor: MakeTensor, call: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [
        tuple(call(seq, parent=None if seq % 3 else seq, args="caf\udce9 é" if seq % 5 else None)) for seq in range(100)
    ]
    rows = [tuple(tensor(seq, statistics=None if seq % 4 else tensor().statistics, note=None)) for seq in range(50)]
    rows += [tuple(tensor(seq, statistics=seq, fingerprint=None, shape=(seq,) * (seq % 6))) for seq in range(50, 99)]
    blobs = [Blob(0, 64 * seq, seq, None, "0:1" if seq % 2 else None) if seq % 3 else None for seq in range(99)]

    def write(folder: Path) -> tuple[bytes, bytes]:
        folder.mkdir()
        files = BatchFile(folder / "calls", CALLS), BatchFile(folder / "tensors", TENSORS)
        for part in (slice(0, 1), slice(1, 60), slice(60, 100)):
            files[0].append(call_columns(filled(call_rows(), calls[part])))
            found = filled(tensor_rows(), rows[part])
            files[1].append(tensor_columns(found, blobs[part], Counter(frozenset({70}))))
        for file in files:
            file.close()
        return (folder / "calls").read_bytes(), (folder / "tensors").read_bytes()

    native = write(tmp_path / "native")
    monkeypatch.setattr(rows_module, "RowBuffer", PythonRowBuffer)
    assert write(tmp_path / "python") == native
