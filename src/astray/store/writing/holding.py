"""Brings the bytes of tensors into memory of ours, to be held there until they are written or let go.

Some come as they are. Others are on their way from a device, through memory that is short and has to be given back at
once; the rest of a large one may not have set out yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from astray.store.run_format.shard_file import LARGE
from astray.store.run_format.tensor_values import Values
from astray.store.writing.buffer_pool import Room


class Holding:
    """Tensors whose bytes are coming. All of its methods are for one thread.

    `written` is told how much memory of the queue became free, and `lost` why a tensor's bytes could not be had.
    """

    def __init__(self, written: Callable[[int], None], lost: Callable[[str], None]) -> None:
        self._written = written
        self._lost = lost
        self._growing: list[tuple[Values, Iterator[None], int]] = []  # with what each takes of the queue

    @property
    def is_growing(self) -> bool:
        """Whether more of a tensor is still to come."""
        return bool(self._growing)

    def begin(self, values: Values) -> None:
        """Take the bytes of a tensor, as far as they are there. `values.data` holds them once that is all."""
        self._go_on(values, _gather(values), values.held)

    def collect(self) -> None:
        """Take what has come meanwhile."""
        growing, self._growing = self._growing, []
        for values, coming, held in growing:
            if values.settled:  # it was let go before it was here
                self._written(held)
            else:
                self._go_on(values, coming, held)

    def refuse(self, values: Values, why: str) -> None:
        """Let go of a tensor for which there is no room."""
        self._lose(values, values.held, why)

    def _go_on(self, values: Values, coming: Iterator[None], held: int) -> None:
        try:
            for _ in coming:
                self._growing.append((values, coming, held))
                return
        except Exception as error:  # noqa: BLE001 - these bytes are lost, and no others
            self._lose(values, held, f"{type(error).__name__}: {error}")
        else:
            self._written(held)

    def _lose(self, values: Values, held: int, why: str) -> None:
        values.settle(None)
        self._written(held)
        self._lost(why)


def _gather(values: Values) -> Iterator[None]:
    """Puts the bytes into `values.data`. Yields whenever the next of them are still to come."""
    source = values.source
    if source is None:
        return
    if isinstance(source, Room) and values.size >= LARGE:  # a smaller one takes a page however small it is
        values.data = source.array.data
        return
    data, end = memoryview(bytearray(values.size)), 0
    for piece in source.pieces():
        if piece is None:
            yield
            continue
        try:
            if piece.ready is not None:
                piece.ready()
            data[end : end + piece.data.nbytes] = piece.data
            end += piece.data.nbytes
        finally:
            if piece.release is not None:
                piece.release()
    values.data, values.source = data, None
    source.release()
