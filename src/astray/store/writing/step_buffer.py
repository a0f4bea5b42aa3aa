"""The rows of the last steps, in memory: what a flight recorder holds.

Rows stay in the columns into which they were appended; only measurements of devices are added, since devices do not
keep those for long. They become Arrow when a snapshot is written, or a table when a listener reads one: encoding every
step, most of which are never read, would cost more than all the rest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.records import Blob, Frame, MissedTensor
from astray.store.columns import Table
from astray.store.deferred import DeferredMeasurements, TensorBytes
from astray.store.run_format.decoder import in_memory
from astray.store.run_format.encoder import call_columns, tensor_columns
from astray.store.run_format.rows import VALUES, AnyCells, EncodedCells, ListCells, MaskedCells, Rows, numbers
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.store.run_info import End
from astray.store.writing.record_queue import QueuedRows
from astray.wording import sized

KeptBytes = Callable[[TensorBytes], npt.NDArray[np.uint8] | None]
"""Gives the bytes of values that are not in memory; None when they were not kept."""

_BLOB = [column.name for column in TENSORS].index("blob_file")
_SAMPLED = [column.name for column in TENSORS].index("sampled")  # `part` follows it
_SEQ, _ROLE, _PATH, _PRINT = map([column.name for column in TENSORS].index, ("seq", "role", "path", "fingerprint"))
_NUMBERS = {column.name: (place, column) for place, column in enumerate(TENSORS) if column.type.endswith("64")}


class Attached:
    """Values of tensors whose rows were handed over before, by the call, role and path of the row.

    A tensor may have been written to in the meantime: then its fingerprint is not that of the row any more, and the
    values are not the row's. Only the last `most_calls` calls are kept. Any thread may `add`.
    """

    def __init__(self, most_calls: int) -> None:
        self._most = most_calls
        self._of_calls: dict[int, dict[tuple[str, str], tuple[int, TensorBytes]]] = {}

    def add(self, seq: int, role: str, path: str, fingerprint: int, values: TensorBytes) -> None:
        self._of_calls.setdefault(seq, {})[role, path] = fingerprint, values
        while len(self._of_calls) > self._most:
            del self._of_calls[next(iter(self._of_calls))]

    def put_into(self, cells: list[TensorBytes | None], tensors: Sequence[AnyCells], rows: Rows) -> None:
        """Put the values into the rows to which they belong and that have none."""
        if not self._of_calls:
            return
        seqs = _numbers(tensors[_SEQ], TENSORS[_SEQ])
        at = np.flatnonzero(np.isin(seqs, list(self._of_calls)))
        if not len(at):
            return
        prints = _numbers(tensors[_PRINT], TENSORS[_PRINT])
        roles, paths = rows.cells(_ROLE), rows.cells(_PATH)
        for row in at.tolist():
            of_call = self._of_calls.get(int(seqs[row]), {})
            fingerprint, values = of_call.get((roles[row], paths[row]), (None, None))
            if cells[row] is None and fingerprint == int(prints[row]):
                cells[row] = values


class RowBlock:
    """Rows of one step that were taken together, as columns, and the values that came with them."""

    __slots__ = ("_attached", "_rows", "calls", "nbytes", "owned", "step", "tensors")

    def __init__(
        self,
        step: int,
        taken: QueuedRows,
        owned: list[TensorBytes],
        late: DeferredMeasurements | None,
        attached: Attached | None = None,
    ) -> None:
        self.step = step
        self.calls = call_columns(taken.calls)
        self.tensors = tensor_columns(taken.tensors, late=late)
        self.owned = owned
        self._rows = taken.tensors
        self._attached = attached
        redeemed = [column for column in self.tensors if isinstance(column, MaskedCells)]
        self.nbytes = (
            taken.calls.nbytes
            + taken.tensors.nbytes
            + sum(column.data.nbytes + column.present.nbytes for column in redeemed)
            + sum(values.size for values in owned)
        )

    @property
    def values(self) -> list[TensorBytes | None]:
        """The values of each tensor's row."""
        cells: list[TensorBytes | None] = self._rows.cells(VALUES)
        if self._attached is not None:
            self._attached.put_into(cells, self.tensors, self._rows)
        return cells

    def with_samples(self) -> list[AnyCells]:
        """The columns of the tensors, with `sampled` and `part` for values that are not the whole tensor."""
        values = self.values
        if all(one is None or (one.sampled is None and one.part is None) for one in values):
            return self.tensors
        said = (
            ListCells([None if one is None else getattr(one, name) for one in values]) for name in ("sampled", "part")
        )
        return [*self.tensors[:_SAMPLED], *said, *self.tensors[_SAMPLED + 2 :]]

    def with_blobs(self, blobs: Sequence[Blob | None]) -> list[AnyCells]:
        """The columns of the tensors, with these blobs."""
        where = [
            ListCells([None if blob is None else blob[field] for blob in blobs]) for field in range(len(Blob._fields))
        ]
        return [*self.tensors[:_BLOB], *where, *self.tensors[_BLOB + len(where) :]]


class BufferedStep:
    """The rows of one step. They read like a rank of a run: `RankRun(0, rows)`.

    `whole` is False when the step was not over, or too large to be held at once. Values can be read as long as the
    recorder holds the step, or `kept` gives them.
    """

    end: End | None = None

    def __init__(
        self,
        step: int,
        pieces: Sequence[RowBlock],
        stacks: dict[int, list[Frame]],
        whole: bool,
        kept: KeptBytes | None = None,
    ) -> None:
        self.step = step
        self.whole = whole
        self.problems: list[str] = []
        self._pieces = pieces
        self._stacks = stacks
        self._kept = kept

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers of the tensors, such as `nan`; null is zero, and NaN in a column of floats.

        It takes microseconds, unlike the whole table.
        """
        place, column = _NUMBERS[name]
        found = [_numbers(piece.tensors[place], column) for piece in self._pieces]
        return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, column.type), *found])

    def calls(self) -> tuple[Table, list[str]]:
        """The calls; nothing can be wrong with them."""
        return self._calls, []

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, likewise. Their values are not in a file, so `blob_file` and its like are null."""
        return self._tensors, []

    def stack(self, id: int) -> list[Frame]:
        """A Python stack, innermost frame first; empty when it was not recorded."""
        return self._stacks.get(id, [])

    def values(self, tensors: Table, row: int) -> npt.NDArray[np.uint8] | None:  # noqa: ARG002 - as a RankSource has it
        """A copy of the bytes of a tensor; None when they were not kept."""
        values = self._values[row]
        if values is None:
            return None
        if values.data is not None:
            return np.frombuffer(values.data, np.uint8).copy()
        return None if self._kept is None else self._kept(values)

    @cached_property
    def _calls(self) -> Table:
        return in_memory([piece.calls for piece in self._pieces], CALLS)

    @cached_property
    def _tensors(self) -> Table:
        return in_memory([piece.with_samples() for piece in self._pieces], TENSORS)

    @cached_property
    def _values(self) -> list[TensorBytes | None]:
        return list(chain.from_iterable(piece.values for piece in self._pieces))


class StepRingBuffer:
    """The blocks of the last `remember` steps, and of the one that is not over, in at most `most_bytes`.

    When that is too little the oldest step goes first. Of a step that alone is too large the oldest blocks go, each
    after `parting` was called with it; the block taken last always stays.
    """

    def __init__(self, remember: int, most_bytes: int, parting: Callable[[RowBlock], None]) -> None:
        self.remember = remember
        self.most_bytes = most_bytes
        self.pieces: deque[RowBlock] = deque()
        self.over = 0  # steps that are over
        self.stacks: dict[int, list[Frame]] = {}  # all: a call may refer to any; their number is bounded by the code
        self._parting = parting
        self._sizes: Counter[int] = Counter()  # bytes of each step, with those of values whose block is still to come
        self._done = 0  # steps that are over and had rows
        self._cut: Counter[tuple[int, str]] = Counter()  # dropped rows of steps that are held in part

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(list(self._sizes.values()))  # an atomic copy: any thread may call this

    @property
    def steps(self) -> list[int]:
        """The steps that are held, oldest first."""
        return list(dict.fromkeys(piece.step for piece in self.pieces))

    def of_step(self, step: int) -> list[RowBlock]:
        """The blocks of a step."""
        return [piece for piece in self.pieces if piece.step == step]

    def is_whole(self, step: int) -> bool:
        """Whether all rows of a step are still here."""
        return not self._cut[step, "call"] and not self._cut[step, "tensor"]

    def reserve(self, size: int, step: int) -> bool:
        """Drop older steps until values of this size fit into the next block; False when they never would."""
        if self._sizes[step] + size > self.most_bytes:
            return False
        self._sizes[step] += size
        self._fit(step)
        return True

    def give_back(self, size: int, step: int) -> None:
        """Release the bytes reserved for values that have not come."""
        self._sizes[step] -= size

    def add(self, piece: RowBlock) -> None:
        """Hold a block, of the same step as the block before it or of the next."""
        self.pieces.append(piece)
        self._sizes[piece.step] += piece.nbytes - sum(values.size for values in piece.owned)  # these were reserved
        self._fit(piece.step)
        while self.nbytes > self.most_bytes and len(self.pieces) > 1:
            self._parting(self.pieces[0])
            oldest = self._let_go()
            self._cut[oldest.step, "call"] += len(oldest.calls[0])
            self._cut[oldest.step, "tensor"] += len(oldest.tensors[0])

    def step_over(self, step: int) -> None:
        """A step is over."""
        self.over = step + 1
        if self.pieces and self.pieces[-1].step == step:
            self._done += 1
        while len(self.steps) > self.remember:
            self._let_step_go()

    def missing(self) -> list[MissedTensor]:
        """What should be held and is not."""
        limit = f"more than {sized(self.most_bytes)} would have to be remembered"
        steps = min(self.remember, self._done) - sum(step < self.over for step in self.steps)
        gone = [MissedTensor("an older step", limit, steps)] if steps > 0 else []
        gone += [
            MissedTensor(f"a {kind} of step {step}", limit, count) for (step, kind), count in self._cut.items() if count
        ]
        if self.pieces and self.pieces[-1].step >= self.over:
            gone.append(MissedTensor(f"the rest of step {self.pieces[-1].step}", "the step was not over", 1))
        return gone

    def clear(self) -> None:
        """Drop everything."""
        while self.pieces:
            self._let_step_go()
        self._sizes.clear()

    def _fit(self, step: int) -> None:
        while self.nbytes > self.most_bytes and self.pieces and self.pieces[0].step != step:
            self._let_step_go()

    def _let_step_go(self) -> None:
        step = self.pieces[0].step
        while self.pieces and self.pieces[0].step == step:
            self._let_go()
        del self._sizes[step]
        for kind in ("call", "tensor"):
            self._cut.pop((step, kind), None)

    def _let_go(self) -> RowBlock:
        piece = self.pieces.popleft()
        self._sizes[piece.step] -= piece.nbytes
        for values in piece.owned:
            values.settle(None)
        return piece


def _numbers(cells: AnyCells, column: Column) -> npt.NDArray[Any]:
    """The numbers of a column; nulls are zero, or NaN in a float column."""
    if isinstance(cells, EncodedCells):
        return numbers(cells, column).data
    null = np.full(len(cells), np.nan if column.type == "float64" else 0, column.type)
    return np.where(cells.present, cells.data, null) if isinstance(cells, MaskedCells) else null
