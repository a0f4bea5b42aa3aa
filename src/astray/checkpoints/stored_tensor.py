"""A tensor in files: one box or several, each with strides; and how its values are read from there.

The readers of all formats describe tensors as `Stored` and give them in `CheckpointContents`. Values are read whole, or
in blocks of bounded size in row-major order, so that a tensor of any size can be measured: at most one block is in
memory at a time, plus as much again to pick its elements from. Bytes that a pickle holds as a text are decoded as they
are read (`EncodedBytes`). `Files` keeps a few files open and copies bytes out of them. It maps none into memory: pages
of a mapped file count as memory of the process, and a mapped file that shrinks crashes it.
"""

from __future__ import annotations

import math
import stat
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray import wording
from astray.errors import CheckpointError
from astray.stats import dtypes

Array = npt.NDArray[Any]
Index = tuple[int, ...]

BLOCK_BYTES = 1 << 24
"""Large enough for the kernels, and small enough that the allocator hands out the same memory again: what is larger
than 32 MB it takes from the system each time, page by page, at half the speed."""

SPARSE = 4
"""Strided elements are read with everything between them, if that is at most so many times more."""

_SMALL = 1 << 18
"""A span of so few bytes is read at once, however sparse: a read costs about as much as these bytes do."""


MOST_DIMENSIONS = 64  # of an array of numpy, and of most operations of torch
MOST_ELEMENTS = 1 << 58  # so that their bytes, 16 for each at most, fit into 63 bits

LONGEST = 200
"""The most characters of a file's text that are shown."""


def is_shape(sizes: Sequence[object]) -> bool:
    """Whether these can be the sizes of a tensor. A size of 0 does not allow larger other sizes.

    >>> is_shape((2, 3)), is_shape((2, -3)), is_shape((0, 1 << 60)), is_shape((True,))
    (True, False, False, False)
    """
    if len(sizes) > MOST_DIMENSIONS:
        return False
    elements = 1
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MOST_ELEMENTS:
            return False
        elements *= max(size, 1)
    return elements <= MOST_ELEMENTS


class TensorSpec(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return self.size * dtypes.find(self.dtype).itemsize


class EncodedBytes:
    """Bytes in a file as a text in UTF-8 whose characters they are: those above 127 take two bytes of the file.

    Where the bytes of each block begin in the text is found in one pass, when the first of them are read.
    """

    _BLOCK = 1 << 20

    def __init__(self, file: Path, start: int, nbytes: int) -> None:
        self.file = file
        self._start = start
        self._end = start + nbytes
        self._begins: list[tuple[int, int]] = []  # how many bytes come before a position of the file

    def read_into(self, files: Files, offset: int, into: memoryview) -> None:
        """Fill a buffer from an offset of the decoded bytes."""
        if not self._begins:
            self._begins = list(self._blocks(files))
        done, number = 0, bisect_right(self._begins, offset, key=lambda begin: begin[0]) - 1
        while done < len(into):
            before, position = self._begins[number]
            _, end = self._begins[number + 1] if number + 1 < len(self._begins) else (0, self._end)
            part = self._decoded(files, position, end)[offset + done - before :][: len(into) - done]
            if not part:
                break
            into[done : done + len(part)] = part
            done, number = done + len(part), min(number + 1, len(self._begins) - 1)
        if done < len(into):
            raise CheckpointError(
                f"{self.file} is damaged: the text at byte {self._start:,} stands for {offset + done:,} bytes, before "
                f"{len(into) - done:,} that belong to a tensor. Copy it again."
            )

    def _blocks(self, files: Files) -> Iterator[tuple[int, int]]:
        before, position = 0, self._start
        while position < self._end:
            yield before, position
            text = np.frombuffer(files.read(self.file, position, min(self._BLOCK, self._end - position)), np.uint8)
            begins = (text & 0xC0) != 0x80  # of characters; the others continue one
            if position + len(text) < self._end and text[-1] >= 0xC0:  # the next block begins with this character
                begins = begins[:-1]
            before, position = before + int(np.count_nonzero(begins)), position + len(begins)

    def _decoded(self, files: Files, start: int, end: int) -> bytes:
        try:
            return files.read(self.file, start, end - start).decode().encode("latin-1")
        except ValueError:
            raise CheckpointError(
                f"{self.file} is damaged: the text at byte {self._start:,} stands for no bytes. Copy it again."
            ) from None


ByteSource = Path | bytes | EncodedBytes


class StoredBox(NamedTuple):
    """A box of a tensor in a file, or in what has its bytes in another way.

    start: the byte of its first element. offset: the index of that element in the tensor. stride: in elements.
    """

    file: ByteSource
    start: int
    offset: Index
    shape: Index
    stride: Index


class Stored(NamedTuple):
    """A tensor in files. `locate` returns the boxes that make it up; some formats read their locations only then.

    place: equal for two names of one tensor.
    """

    spec: TensorSpec
    locate: Callable[[], Sequence[StoredBox]]
    place: object

    @classmethod
    def contiguous(cls, spec: TensorSpec, file: Path, start: int) -> Stored:
        """A tensor in one file, in row-major order."""
        return cls.of(spec, StoredBox(file, start, (0,) * len(spec.shape), spec.shape, row_major(spec.shape)))

    @classmethod
    def of(cls, spec: TensorSpec, box: StoredBox) -> Stored:
        """A tensor that is one box."""
        return cls(spec, lambda: (box,), (spec, box))


class Unread(NamedTuple):
    """Something in a checkpoint that is not read: what it is, why not, and how many tensors it contains."""

    what: str
    why: str = ""
    tensors: int = 0

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


@dataclass(frozen=True)
class CheckpointContents:
    """The tensors of a checkpoint by name, in the order of the file, and everything else that is in it.

    others: plain values as they are, and `Unread` for everything else.
    """

    format: str
    files: tuple[Path, ...]
    tensors: dict[str, Stored]
    others: dict[str, object] = field(default_factory=dict)


def row_major(shape: Sequence[int]) -> Index:
    """The strides of a contiguous tensor, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of storage a tensor spans, from its first to its last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def read_whole(stored: Stored, files: Files) -> Array:
    """All values, in the storage type of their dtype: bfloat16 as uint16, 8-bit floats as uint8."""
    values = _empty(stored.spec.dtype, stored.spec.shape)
    _fill(values, (0,) * values.ndim, stored.locate(), files)
    return values


def read_blocks(stored: Stored, files: Files, nbytes: int = BLOCK_BYTES) -> Iterator[Array]:
    """The values in row-major order, in flat arrays of at most about `nbytes` bytes."""
    stored_boxes = stored.locate()
    itemsize = dtypes.find(stored.spec.dtype).itemsize
    for offset, shape in boxes(stored.spec.shape, max(nbytes // itemsize, 1)):
        block = _empty(stored.spec.dtype, shape)
        _fill(block, offset, stored_boxes, files)
        yield block.reshape(-1)


def boxes(shape: Index, most: int) -> Iterator[tuple[Index, Index]]:
    """Cut a shape into consecutive boxes of at most `most` elements, in row-major order.

    >>> list(boxes((2, 3), 4)), list(boxes((2, 3), 2))
    ([((0, 0), (1, 3)), ((1, 0), (1, 3))], [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))])
    """
    if 0 in shape:
        return
    if math.prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    # The first dimension of which one index fits is cut into slabs, the dimensions before it into single indices.
    cut = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= most)
    rest = shape[cut + 1 :]
    slab = most // math.prod(rest)
    for outer in product(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], slab):
            size = min(slab, shape[cut] - begin)
            yield (*outer, begin, *(0,) * len(rest)), (*(1,) * cut, size, *rest)


def _empty(dtype: str, shape: Index) -> Array:
    try:
        return np.empty(shape, dtypes.find(dtype).storage)
    except (MemoryError, ValueError):
        raise CheckpointError(f"There is not enough memory for a tensor of {dtype} and shape {list(shape)}.") from None


def _fill(into: Array, offset: Index, stored_boxes: Sequence[StoredBox], files: Files) -> None:
    """Fill an array, which begins at this index of the tensor, from the boxes that it intersects."""
    for box in stored_boxes:
        low = [max(begins) for begins in zip(offset, box.offset, strict=True)]
        high = [
            min(begin + size, box_begin + box_size)
            for begin, size, box_begin, box_size in zip(offset, into.shape, box.offset, box.shape, strict=True)
        ]
        if all(begin < end for begin, end in zip(low, high, strict=True)):
            index: Any = (*(slice(b - o, e - o) for b, e, o in zip(low, high, offset, strict=True)), ...)
            target = into[index]
            skipped = sum((b - o) * step for b, o, step in zip(low, box.offset, box.stride, strict=True))
            _copy(target, box.file, box.start + skipped * into.itemsize, box.stride, files)


def _copy(target: Array, file: ByteSource, start: int, stride: Index, files: Files) -> None:
    """Copy strided elements of a file into an array of the same shape."""
    if target.flags.c_contiguous and _is_dense(target.shape, stride):
        files.read_into(file, start, target)
        return
    span = extent(target.shape, stride) * target.itemsize
    if span <= _SMALL or (span <= BLOCK_BYTES and span <= SPARSE * target.nbytes) or target.size == 1:
        raw = np.empty(span // target.itemsize, target.dtype)
        files.read_into(file, start, raw)
        steps = [step * target.itemsize for step in stride]
        target[...] = np.lib.stride_tricks.as_strided(raw, target.shape, steps, writeable=False)
        return
    # Halve the longest dimension in the file until the span to read at once is short or dense.
    dim = max(range(target.ndim), key=lambda dim: (target.shape[dim] - 1) * stride[dim])
    half = target.shape[dim] // 2
    before = (slice(None),) * dim
    _copy(target[(*before, slice(half))], file, start, stride, files)
    _copy(target[(*before, slice(half, None))], file, start + half * stride[dim] * target.itemsize, stride, files)


def _is_dense(shape: Index, stride: Index) -> bool:
    """Whether elements are contiguous in row-major order; dimensions of size 1 do not count."""
    contiguous = row_major(shape)
    return all(size == 1 or step == wanted for size, step, wanted in zip(shape, stride, contiguous, strict=True))


def printable(text: str, longest: int = LONGEST) -> str:
    """A text of a file, safe to show: it may contain control characters, invalid text, or be very long.

    >>> printable("red\x1b[31m")
    'red\\x1b[31m'
    """
    return wording.printable(text[:longest]) + "…" * (len(text) > longest)


# -- the open files ----------------------------------------------------------------------------------------------------

MOST_OPEN = 32
"""A distributed checkpoint may have thousands of files, and a process may open about that many."""

_AT_ONCE = 1 << 30
"""The most bytes of one read; Linux returns no more than 2 GiB."""


class Files:
    """Reads parts of files, of which it keeps a few open. May be used from several threads."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, FileIO] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = weakref.finalize(self, _close_all, self._open)

    def size(self, path: Path) -> int:
        """The size of a file. Anything but a plain file, such as a pipe or a device, is refused."""
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a plain file, so it is not read.")
        return status.st_size

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes at an offset of a file."""
        data = np.empty(nbytes, np.uint8)
        self.read_into(path, offset, data)
        return data.tobytes()

    def read_into(self, source: ByteSource, offset: int, into: npt.NDArray[Any]) -> None:
        """Fill a contiguous array from an offset of a file. Raises CheckpointError when the file ends before that."""
        flat: Any = into.reshape(-1).view(np.uint8)
        buffer = memoryview(flat)
        if isinstance(source, EncodedBytes):
            source.read_into(self, offset, buffer)
        elif isinstance(source, bytes):
            buffer[:] = source[offset : offset + len(buffer)]
        else:
            self._read_into(source, offset, buffer)

    def _read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        done = 0
        with self._lock:
            file = self._file(path)
            while done < len(buffer):
                try:
                    file.seek(offset + done)
                    got = file.readinto(buffer[done : done + _AT_ONCE])
                except (OSError, OverflowError) as error:
                    raise _unreadable(path, error) from None
                if not got:
                    raise CheckpointError(
                        f"{path} ends after {offset + done:,} bytes, before {len(buffer) - done:,} that belong to a "
                        "tensor: the file was cut, or has been changed since it was opened. Copy it again."
                    )
                done += got

    def _file(self, path: Path) -> FileIO:
        if self._closed:
            raise CheckpointError(f"{path} was closed with its checkpoint. Open that again.")
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        self.size(path)  # refuses pipes: opening one would wait for a writer
        while len(self._open) >= MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        try:
            self._open[path] = FileIO(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return self._open[path]

    def close(self) -> None:
        """Close the files. Nothing can be read after that."""
        with self._lock:
            self._closed = True
            _close_all(self._open)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """With the system's reason; or Python's, for an impossible file name or offset."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return CheckpointError(f"{wording.printable(str(path))} cannot be read: {why}.")


def _close_all(files: OrderedDict[Path, FileIO]) -> None:
    while files:
        files.popitem()[1].close()
