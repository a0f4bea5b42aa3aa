"""A ring buffer of the rows of the last steps: what a flight recorder holds.

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
from astray.store.run_format.rows import VALUES, AnyCells, EncodedCells, ListCells, MaskedCells, RowBuffer, numbers
from astray.store.run_format.schema import CALLS, TENSORS, Column
from astray.store.run_info import End
from astray.store.writing.record_queue import QueuedRows
from astray.wording import sized

ReadValues = Callable[[TensorBytes], npt.NDArray[np.uint8] | None]
"""Reads the bytes of values that are not in memory; None when they were not kept."""

_BLOB = [column.name for column in TENSORS].index("blob_file")
_SAMPLED = [column.name for column in TENSORS].index("sampled")  # `part` follows it
_SEQ, _ROLE, _PATH, _PRINT = map([column.name for column in TENSORS].index, ("seq", "role", "path", "fingerprint"))
_NUMBERS = {column.name: (place, column) for place, column in enumerate(TENSORS) if column.type.endswith("64")}


class AttachedValues:
    """Values of tensors whose rows were handed over before, by the call, role and path of the row.

    A tensor may have been written to in the meantime: then its fingerprint differs from that of the row, and the values
    are not the row's. Only the last `most_calls` calls are kept. Any thread may `add`.
    """

    def __init__(self, most_calls: int) -> None:
        self._most = most_calls
        self._by_call: dict[int, dict[tuple[str, str], tuple[int, TensorBytes]]] = {}

    def add(self, seq: int, role: str, path: str, fingerprint: int, values: TensorBytes) -> None:
        self._by_call.setdefault(seq, {})[role, path] = fingerprint, values
        while len(self._by_call) > self._most:
            del self._by_call[next(iter(self._by_call))]

    def put_into(self, cells: list[TensorBytes | None], tensors: Sequence[AnyCells], rows: RowBuffer) -> None:
        """Put the values into the rows to which they belong and that have none."""
        if not self._by_call:
            return
        seqs = _numbers(tensors[_SEQ], TENSORS[_SEQ])
        at = np.flatnonzero(np.isin(seqs, list(self._by_call)))
        if not len(at):
            return
        prints = _numbers(tensors[_PRINT], TENSORS[_PRINT])
        roles, paths = rows.cells(_ROLE), rows.cells(_PATH)
        for row in at.tolist():
            of_call = self._by_call.get(int(seqs[row]), {})
            fingerprint, values = of_call.get((roles[row], paths[row]), (None, None))
            if cells[row] is None and fingerprint == int(prints[row]):
                cells[row] = values


class RowBlock:
    """Rows of one step that were taken together, as columns, and the values that came with them."""

    __slots__ = ("_attached", "_rows", "calls", "nbytes", "owned", "step", "tensors")

    def __init__(
        self,
        step: int,
        rows: QueuedRows,
        owned: list[TensorBytes],
        deferred: DeferredMeasurements | None,
        attached: AttachedValues | None = None,
    ) -> None:
        self.step = step
        self.calls = call_columns(rows.calls)
        self.tensors = tensor_columns(rows.tensors, deferred=deferred)
        self.owned = owned
        self._rows = rows.tensors
        self._attached = attached
        redeemed = [column for column in self.tensors if isinstance(column, MaskedCells)]
        self.nbytes = (
            rows.calls.nbytes
            + rows.tensors.nbytes
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
        if all(each is None or (each.sampled is None and each.part is None) for each in values):
            return self.tensors
        extent = (
            ListCells([None if each is None else getattr(each, name) for each in values])
            for name in ("sampled", "part")
        )
        return [*self.tensors[:_SAMPLED], *extent, *self.tensors[_SAMPLED + 2 :]]

    def with_blobs(self, blobs: Sequence[Blob | None]) -> list[AnyCells]:
        """The columns of the tensors, with these blobs."""
        where = [
            ListCells([None if blob is None else blob[field] for blob in blobs]) for field in range(len(Blob._fields))
        ]
        return [*self.tensors[:_BLOB], *where, *self.tensors[_BLOB + len(where) :]]


class BufferedStep:
    """The rows of one step. They can be read like a rank of a run: `RankRun(0, rows)`.

    `whole` is False when the step was not over, or too large to be held at once. Values can be read as long as the
    recorder holds the step, or `read_values` gives them.
    """

    end: End | None = None

    def __init__(
        self,
        step: int,
        blocks: Sequence[RowBlock],
        stacks: dict[int, list[Frame]],
        whole: bool,
        read_values: ReadValues | None = None,
    ) -> None:
        self.step = step
        self.whole = whole
        self.problems: list[str] = []
        self._blocks = blocks
        self._stacks = stacks
        self._read_values = read_values

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers of the tensors, such as `nan`; null is zero, and NaN in a column of floats.

        It takes microseconds, unlike the whole table.
        """
        place, column = _NUMBERS[name]
        columns = [_numbers(block.tensors[place], column) for block in self._blocks]
        return columns[0] if len(columns) == 1 else np.concatenate([np.zeros(0, column.type), *columns])

    def calls(self) -> tuple[Table, list[str]]:
        """The calls; nothing can be wrong with them."""
        return self._calls, []

    def tensors(self) -> tuple[Table, list[str]]:
        """The tensors, likewise. Their values are not in a file, so the `blob_*` columns are null."""
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
        return None if self._read_values is None else self._read_values(values)

    @cached_property
    def _calls(self) -> Table:
        return in_memory([block.calls for block in self._blocks], CALLS)

    @cached_property
    def _tensors(self) -> Table:
        return in_memory([block.with_samples() for block in self._blocks], TENSORS)

    @cached_property
    def _values(self) -> list[TensorBytes | None]:
        return list(chain.from_iterable(block.values for block in self._blocks))


class StepRingBuffer:
    """The blocks of the last `remember` steps, and of the one that is not over, in at most `most_bytes`.

    When that is too little the oldest step is evicted first. Of a step that alone is too large the oldest blocks are
    evicted, each after `on_evict` was called with it; the block added last always stays.
    """

    def __init__(self, remember: int, most_bytes: int, on_evict: Callable[[RowBlock], None]) -> None:
        self.remember = remember
        self.most_bytes = most_bytes
        self.blocks: deque[RowBlock] = deque()
        self.current_step = 0  # the one that is not over
        self.stacks: dict[int, list[Frame]] = {}  # all: a call may refer to any; their number is bounded by the code
        self._on_evict = on_evict
        self._sizes: Counter[int] = Counter()  # bytes of each step, with those of values whose block is still to come
        self._steps_with_rows = 0  # of those that are over
        self._dropped: Counter[tuple[int, str]] = Counter()  # dropped rows of steps that are held in part

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(list(self._sizes.values()))  # an atomic copy: any thread may call this

    @property
    def steps(self) -> list[int]:
        """The steps that are held, oldest first."""
        return list(dict.fromkeys(block.step for block in self.blocks))

    def of_step(self, step: int) -> list[RowBlock]:
        """The blocks of a step."""
        return [block for block in self.blocks if block.step == step]

    def is_whole(self, step: int) -> bool:
        """Whether all rows of a step are still held."""
        return not self._dropped[step, "call"] and not self._dropped[step, "tensor"]

    def reserve(self, size: int, step: int) -> bool:
        """Evict older steps until values of this size fit into the next block; False when they never would."""
        if self._sizes[step] + size > self.most_bytes:
            return False
        self._sizes[step] += size
        self._fit(step)
        return True

    def unreserve(self, size: int, step: int) -> None:
        """Release the bytes reserved for values that never arrived."""
        self._sizes[step] -= size

    def add(self, block: RowBlock) -> None:
        """Hold a block, of the same step as the block before it or of the next."""
        self.blocks.append(block)
        self._sizes[block.step] += block.nbytes - sum(values.size for values in block.owned)  # these were reserved
        self._fit(block.step)
        while self.nbytes > self.most_bytes and len(self.blocks) > 1:
            self._on_evict(self.blocks[0])
            oldest = self._evict_block()
            self._dropped[oldest.step, "call"] += len(oldest.calls[0])
            self._dropped[oldest.step, "tensor"] += len(oldest.tensors[0])

    def end_step(self, step: int) -> None:
        """A step is over."""
        self.current_step = step + 1
        if self.blocks and self.blocks[-1].step == step:
            self._steps_with_rows += 1
        while len(self.steps) > self.remember:
            self._evict_step()

    def missing(self) -> list[MissedTensor]:
        """What should be held and is not."""
        limit = f"more than {sized(self.most_bytes)} would have to be remembered"
        steps = min(self.remember, self._steps_with_rows) - sum(step < self.current_step for step in self.steps)
        missed = [MissedTensor("an older step", limit, steps)] if steps > 0 else []
        missed += [
            MissedTensor(f"a {kind} of step {step}", limit, count)
            for (step, kind), count in self._dropped.items()
            if count
        ]
        if self.blocks and self.blocks[-1].step >= self.current_step:
            missed.append(MissedTensor(f"the rest of step {self.blocks[-1].step}", "the step was not over", 1))
        return missed

    def clear(self) -> None:
        """Drop everything."""
        while self.blocks:
            self._evict_step()
        self._sizes.clear()

    def _fit(self, step: int) -> None:
        while self.nbytes > self.most_bytes and self.blocks and self.blocks[0].step != step:
            self._evict_step()

    def _evict_step(self) -> None:
        step = self.blocks[0].step
        while self.blocks and self.blocks[0].step == step:
            self._evict_block()
        del self._sizes[step]
        for kind in ("call", "tensor"):
            self._dropped.pop((step, kind), None)

    def _evict_block(self) -> RowBlock:
        block = self.blocks.popleft()
        self._sizes[block.step] -= block.nbytes
        for values in block.owned:
            values.resolve(None)
        return block


def _numbers(cells: AnyCells, column: Column) -> npt.NDArray[Any]:
    """The numbers of a column; nulls are zero, or NaN in a float column."""
    if isinstance(cells, EncodedCells):
        return numbers(cells, column).data
    null = np.full(len(cells), np.nan if column.type == "float64" else 0, column.type)
    return np.where(cells.present, cells.data, null) if isinstance(cells, MaskedCells) else null
