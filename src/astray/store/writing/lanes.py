"""Tensors on their way into a shard: what is written together, in which order, and what becomes of each.

`values_writer.py` fills lanes with batches; `store/run_format/disk_io.py` does the jobs that a batch is made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from astray.records import Blob
from astray.store.deferred import PAGE, PIECE_BYTES, Piece
from astray.store.run_format.disk_io import Job
from astray.store.run_format.shard_file import LARGE, Place, Shard
from astray.store.run_format.tensor_values import Values


class Lane:
    """A shard being filled, and the batches that are being written to it or to the one before it, in their order."""

    __slots__ = ("load", "shard", "waiting")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.waiting: deque[Batch] = deque()
        self.load = 0  # bytes of the batches


class Batch:
    """Tensors that follow one another in a shard, and of which its header is told at once."""

    __slots__ = ("complete", "error", "large", "left", "lost", "nbytes", "places", "shard")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.places: dict[Values, Place] = {}
        self.nbytes = 0
        self.large = 0  # bytes of them that may be written directly
        self.left = 0  # jobs that are not done
        self.complete = False  # all its jobs have been given out
        self.error: Exception | None = None
        self.lost: dict[Values, str] = {}  # whose bytes never came, and why

    def add(self, values: Values) -> bool:
        """Find a place for a tensor; False when it needs the next shard."""
        place = self.shard.place(values.name, values.dtype, values.shape, values.size, certain=values.source is None)
        if place is not None:
            self.places[values] = place
            self.nbytes += place.nbytes
            self.large += place.nbytes if place.nbytes >= LARGE else 0
        return place is not None

    def jobs(self, direct: bool) -> Iterator[Job | None]:
        """The work to be done, cut so that memory is given back as it is written.

        A job is direct from its first byte on. None says that there is more to come later.
        """
        job: Job | None = None
        for values, place in self.places.items():
            end, pages = place.offset, direct and place.nbytes >= LARGE
            for piece in self._pieces(values):
                full = job is not None and job.nbytes >= PIECE_BYTES
                if job is not None and (piece is None or full or (pages and not job.direct) or end - job.end >= PAGE):
                    yield job
                    job = None
                if piece is None:
                    yield None
                else:
                    job = job or Job(self.shard.file, end, pages and end % PAGE == 0, self)
                    job.add(values, piece, end)
                    end = job.end
        if job is not None:
            yield job

    def _pieces(self, values: Values) -> Iterable[Piece | None]:
        if values.data is not None and values.size <= PIECE_BYTES:
            return (Piece(values.data),)
        return self._pieces_to_come(values)

    def _pieces_to_come(self, values: Values) -> Iterator[Piece | None]:
        try:
            yield from values.pieces()
        except Exception as error:  # noqa: BLE001 - these bytes are lost, and no others
            self.lost[values] = f"{type(error).__name__}: {error}"

    def finish(self, job: Job) -> None:
        self.left -= 1
        self.error = self.error or job.error
        self.lost.update(job.lost)

    def publish(self) -> None:
        """Tell the header."""
        self.shard.publish(self.places.values(), [self.places[values] for values in self.lost])

    def settle(self) -> int:
        """Say where everything is; returns how much memory became free."""
        held = 0
        for values, place in self.places.items():
            held += values.held
            blob = Blob(self.shard.number, place.offset, place.nbytes, values.sampled, values.part)
            values.settle(None if values in self.lost else blob)
        return held
