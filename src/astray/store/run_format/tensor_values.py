"""The bytes of tensors, on their way into safetensors files and back.

`store/writing/values_writer.py` writes them, into files that `shard_file.py` describes. Rows refer to them by file,
offset and length.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Blob
from astray.store.deferred import BytePiece, DeferredBytes, cut
from astray.store.safe_paths import opened
from astray.wording import counted

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_LENGTH = 8  # bytes in which a safetensors file says how long its header is
_END = np.iinfo(np.int64).max


def shard_name(number: int) -> str:
    """The name of a values file."""
    return f"values-{number:05}.safetensors"


class TensorBytes:
    """The bytes of one tensor on their way to the disk. Rows that share a tensor share this object, and so its blob."""

    __slots__ = ("blob", "data", "dtype", "name", "part", "sampled", "settled", "shape", "size", "source", "stale")

    def __init__(
        self,
        data: memoryview | DeferredBytes,
        name: str,
        dtype: str,
        shape: Sequence[int],
        sampled: int | None = None,
        part: str | None = None,
    ) -> None:
        self.data: memoryview | None = data if isinstance(data, memoryview) else None  # dropped once written
        self.source: DeferredBytes | None = None if isinstance(data, memoryview) else data
        self.size = data.nbytes
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.sampled = sampled
        self.part = part
        self.blob: Blob | None = None  # set once written
        self.settled = False  # it is written, or never will be
        self.stale = False  # when the tensor is observed again, its bytes have to be handed over again

    @property
    def held(self) -> int:
        """The bytes of memory it takes in the queue."""
        return self.size if self.source is None else self.source.held

    def pieces(self) -> Iterator[BytePiece | None]:
        """Its bytes, as `DeferredBytes.pieces` has them."""
        if self.source is not None:
            yield from self.source.pieces()
        elif self.data is not None:
            yield from cut(self.data)

    def settle(self, blob: Blob | None) -> None:
        """Set where it was written, or None if it was not, and free its bytes."""
        self.blob, self.settled = blob, True
        self.data = None
        source, self.source = self.source, None
        if source is not None:
            source.release()


class TensorBytesReader:
    """Gives the bytes of blobs, mapped from the files of one rank's folder."""

    def __init__(self, folder: Path, home: Path | None = None) -> None:
        self._folder = folder
        self._home = home or folder  # no file may lead out of it
        self._maps: dict[int, Bytes] = {}

    def read(self, blob: Blob) -> Bytes:
        """The bytes of a tensor, without copying them. Raises RunError when the file does not hold them."""
        if blob.offset < 0 or blob.nbytes < 0:
            raise RunError(f"A row says that its values are {blob.nbytes:,} bytes at {blob.offset:,}: it is damaged.")
        data = self._map(blob.file)
        if blob.offset + blob.nbytes > len(data):
            raise RunError(
                f"{self._path(blob.file)} ends after {len(data):,} bytes, before this tensor's values at "
                f"{blob.offset:,}–{blob.offset + blob.nbytes:,}: the file was cut. Copy the run again."
            )
        return data[blob.offset : blob.offset + blob.nbytes]

    def problems(self, files: Ints, offsets: Ints, sizes: Ints) -> list[str]:
        """What is wrong with the files that rows refer to, without reading their values: a sentence for each.

        The damage of single values is seen when they are read.
        """
        rows = np.flatnonzero((files >= 0) & (sizes > 0) & (offsets >= 0) & (offsets < _END - sizes))
        found = []
        numbers, which = np.unique(files[rows], return_inverse=True)
        ends = np.zeros(len(numbers), np.int64)
        np.maximum.at(ends, which, offsets[rows] + sizes[rows])
        for number, end, count in zip(numbers.tolist(), ends.tolist(), np.bincount(which).tolist(), strict=True):
            why = self._wrong(number, end)
            if why is not None:
                found.append(f"{self._path(number)} {why}. It has the values of {counted(count, 'tensor')}.")
        return found

    def _wrong(self, number: int, end: int) -> str | None:
        """What is wrong with a file whose values reach up to `end`."""
        try:
            with opened(self._path(number), self._home) as file:
                size = os.fstat(file.fileno()).st_size
                header = int.from_bytes(file.read(_LENGTH), "little")
        except FileNotFoundError:
            return "is missing"
        except RunError as error:
            return f"is not read ({error})"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if size < end:
            return f"is cut: it has {size:,} bytes, and values lie in it up to {end:,}"
        if not 0 < header <= size - _LENGTH:
            return "does not begin as a safetensors file does: it was overwritten"
        return None

    def _path(self, number: int) -> Path:
        return self._folder / shard_name(number)

    def _map(self, number: int) -> Bytes:
        if number not in self._maps:
            try:
                with opened(self._path(number), self._home) as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except FileNotFoundError:
                raise RunError(
                    f"{self._path(number)} is missing, so these values cannot be read. Copy it from where the run was "
                    "recorded; statistics and fingerprints can be read without it."
                ) from None
            except (OSError, ValueError) as error:  # an empty file cannot be mapped
                raise RunError(f"{self._path(number)} cannot be read: {error}.") from None
            self._maps[number] = np.frombuffer(mapped, np.uint8)
        return self._maps[number]
