"""A checkpoint, opened: a mapping from names to tensors that loads one when it is asked for, and keeps none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from astray.checkpoints.as_torch import to_torch
from astray.checkpoints.contents import Contents, Unread
from astray.checkpoints.measuring import measure_blocks
from astray.checkpoints.open_files import Files
from astray.checkpoints.stored_tensor import BLOCK_BYTES, Spec, Stored, read_blocks, read_whole
from astray.stats import Measurement
from astray.wording import counted, did_you_mean, sized

if TYPE_CHECKING:
    from astray.checkpoints.as_torch import Tensor


class Checkpoint(Mapping[str, "Tensor"]):
    """The tensors of a checkpoint by name, in the order of its files. Use it in a `with`, or call `close`.

    >>> with astray.checkpoints.open("checkpoint.pt") as weights:
    ...     weights.names[:2], weights.spec("model.wte.weight"), weights["model.wte.weight"].sum()
    (('model.wte.weight', 'model.wpe.weight'), Spec(dtype='float32', shape=(50257, 768)), tensor(-21.3))

    path: what was opened. format: what it is, in words. files: every file that belongs to it.
    names: the names of its tensors.
    others: what in it is no tensor: plain values as they are, and `Unread` with the reason for the rest.
    """

    def __init__(self, path: Path, contents: Contents, files: Files) -> None:
        self.path = path
        self.format = contents.format
        self.files = contents.files
        self.others = contents.others
        self.names = tuple(contents.tensors)
        self._tensors = contents.tensors
        self._files = files

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together; one that has two names counts once."""
        return sum({stored.place: stored.spec.nbytes for stored in self._tensors.values()}.values())

    @property
    def unread(self) -> dict[str, Unread]:
        """The tensors that are not read, or what they lie in, with the reason."""
        return {name: what for name, what in self.others.items() if isinstance(what, Unread) and what.tensors}

    def spec(self, name: str) -> Spec:
        """The dtype and shape of a tensor, without loading it."""
        return self._stored(name).spec

    def place(self, name: str) -> object:
        """Something that is equal for two names of one tensor, as tied weights have."""
        return self._stored(name).place

    def read(self, name: str) -> tuple[npt.NDArray[Any], str, tuple[int, ...]]:
        """The values of a tensor as a numpy array, its dtype and its shape; needs no framework.

        numpy has no bfloat16 and no 8-bit floats: these come as unsigned integers of their bits, and
        `astray.stats.decode` widens them.
        """
        stored = self._stored(name)
        return read_whole(stored, self._files), stored.spec.dtype, stored.spec.shape

    def blocks(self, name: str, nbytes: int = BLOCK_BYTES) -> Iterator[npt.NDArray[Any]]:
        """The values of a tensor in row-major order, as flat arrays of about so many bytes at most."""
        return read_blocks(self._stored(name), self._files, nbytes)

    def measure(self, name: str) -> Measurement:
        """The statistics and the fingerprint of a tensor, which is never in memory as a whole."""
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
