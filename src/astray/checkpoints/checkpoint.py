"""`Checkpoint`: a mapping from names to tensors that loads a tensor on access, and caches none.

`measure_blocks` measures a tensor that is read in blocks as if it were read whole. Only `to_torch` needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from astray.checkpoints.stored_tensor import (
    BLOCK_BYTES,
    CheckpointContents,
    Files,
    Stored,
    TensorSpec,
    Unread,
    read_blocks,
    read_whole,
)
from astray.errors import CheckpointError
from astray.records import Statistics
from astray.stats import DTYPES, Measurement, ShardPosition, Strided, measure, merge_fingerprints
from astray.wording import counted, did_you_mean, sized

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint by name, in the order of its files. Use it in a `with`, or call `close`.

    >>> with astray.checkpoints.open("checkpoint.pt") as weights:
    ...     weights.names[:2], weights.spec("model.wte.weight"), weights["model.wte.weight"].sum()
    (('model.wte.weight', 'model.wpe.weight'), TensorSpec(dtype='float32', shape=(50257, 768)), tensor(-21.3))

    path: what was opened. format: its format, in words. files: every file that belongs to it.
    names: the names of its tensors.
    others: the rest of its content: plain values as they are, `Unread` with the reason for everything else.
    """

    def __init__(self, path: Path, contents: CheckpointContents, files: Files) -> None:
        self.path = path
        self.format = contents.format
        self.files = contents.files
        self.others = contents.others
        self.names = tuple(contents.tensors)
        self._tensors = contents.tensors
        self._files = files

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together; a tensor with two names counts once."""
        return sum({stored.place: stored.spec.nbytes for stored in self._tensors.values()}.values())

    @property
    def unread(self) -> dict[str, Unread]:
        """The tensors that cannot be read, or the objects that contain them, with the reason."""
        return {name: what for name, what in self.others.items() if isinstance(what, Unread) and what.tensors}

    def spec(self, name: str) -> TensorSpec:
        """The dtype and shape of a tensor, without loading it."""
        return self._stored(name).spec

    def place(self, name: str) -> object:
        """A value that is equal for two names of one tensor, as with tied weights."""
        return self._stored(name).place

    def read(self, name: str) -> tuple[npt.NDArray[Any], str, tuple[int, ...]]:
        """The values of a tensor as a numpy array, its dtype and its shape; needs no framework.

        numpy has no bfloat16 and no 8-bit floats: these come as unsigned integers of their bits, and
        `astray.stats.decode` widens them.
        """
        stored = self._stored(name)
        return read_whole(stored, self._files), stored.spec.dtype, stored.spec.shape

    def blocks(self, name: str, nbytes: int = BLOCK_BYTES) -> Iterator[npt.NDArray[Any]]:
        """The values of a tensor in row-major order, as flat arrays of at most about `nbytes` bytes."""
        return read_blocks(self._stored(name), self._files, nbytes)

    def measure(self, name: str) -> Measurement:
        """The statistics and the fingerprint of a tensor, which is never wholly in memory."""
        stored = self._stored(name)
        return measure_blocks(read_blocks(stored, self._files), stored.spec)

    def __getitem__(self, name: str) -> Tensor:
        values, dtype, _ = self.read(name)
        return to_torch(values, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def close(self) -> None:
        """Close its files. Names and specs stay; values can no longer be read."""
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        facts = f"{self.format}, {counted(len(self), 'tensor')}, {sized(self.nbytes)}"
        return f"<Checkpoint {self.path}: {facts}>"

    def _stored(self, name: str) -> Stored:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"{self.path} has no tensor {name!r}.{did_you_mean(name, self._tensors)}") from None


def to_torch(values: npt.NDArray[Any], dtype: str) -> Tensor:
    """The values as a tensor that shares their memory; `dtype` is the true one, where numpy has no such type."""
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            "Tensors need torch, which is not installed. Without it, read() gives numpy arrays."
        ) from None

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no {dtype}. read() gives it as a numpy array.")
    if not values.size:
        return torch.empty(values.shape, dtype=kind)
    flat: Any = values.reshape(-1)
    return torch.frombuffer(flat.view("u1"), dtype=kind).reshape(values.shape)


def measure_blocks(blocks: Iterable[npt.NDArray[Any]], spec: TensorSpec) -> Measurement:
    """Measure consecutive blocks in row-major order. For a single block the result is that of `measure`."""
    parts: list[Measurement] = []
    start = 0
    for block in blocks:
        whole = block.size == spec.size
        shard = None if whole else ShardPosition((start,), (spec.size,))
        parts.append(measure(Strided.from_numpy(block, spec.dtype), shard=shard))
        start += block.size
    if not parts:
        empty = np.empty(0, DTYPES[spec.dtype].storage)
        return measure(Strided.from_numpy(empty, spec.dtype))
    if len(parts) == 1:
        return parts[0]
    statistics = [part.statistics for part in parts if part.statistics is not None]
    fingerprints = [part.fingerprint for part in parts if part.fingerprint is not None]
    return Measurement(merge_statistics(statistics), merge_fingerprints(fingerprints))


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of a whole from those of its parts; exact but for the rounding of float64.

    The index of a part's first bad element counts from the beginning of the whole.

    >>> parts = Statistics(0, 2, 1, 1, 2, 2, 1, 0, 0, 2), Statistics(4, 4, 4, 0, 4, 4, 0, 1, 0, 2)
    >>> merge_statistics(parts)[:4]
    (0, 4, 2.0, 1.632993161855452)
    """
    counts = [sum(part[field] or 0 for part in parts) for field in range(6, 10)]
    known = [part for part in parts if part.absmax is not None]
    bad = ((part.first_bad, part.first_bad_value) for part in parts if part.first_bad is not None)
    first = min(bad, default=(None, None))
    if not known:
        return Statistics(None, None, None, None, None, None, *map(int, counts), *first)
    weights = [part.count - part.nan - part.inf for part in known]
    total = sum(weights)
    scale = max(_number(part.absmax) for part in known) or 1.0  # so that no square overflows
    means = [_number(part.mean) / scale for part in known]
    mean = math.fsum(weight * part_mean for weight, part_mean in zip(weights, means, strict=True)) / total
    spread = math.fsum(
        weight * ((_number(part.std) / scale) ** 2 + (part_mean - mean) ** 2)
        for weight, part_mean, part in zip(weights, means, known, strict=True)
    )
    return Statistics(
        min(_number(part.min) for part in known),
        max(_number(part.max) for part in known),
        mean * scale,
        math.sqrt(spread / total) * scale,
        math.sqrt(math.fsum((_number(part.l2) / scale) ** 2 for part in known)) * scale,
        max(_number(part.absmax) for part in known),
        *map(int, counts),
        *first,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
