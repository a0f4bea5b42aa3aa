"""Folders of torch.distributed.checkpoint: tensors in chunks over the files of all ranks, and `.metadata` about them.

The metadata is a pickle of torch's classes, read as data like every other. Each chunk is a small file of `torch.save`
inside a larger one, which is looked into when the tensor is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from astray.checkpoints.pickles import Made, read_pickle
from astray.checkpoints.stored_tensor import (
    CheckpointContents,
    Files,
    Stored,
    StoredBox,
    TensorSpec,
    Unread,
    is_shape,
    printable,
)
from astray.checkpoints.torch_files import ByteRange, open_embedded
from astray.checkpoints.torch_objects import dtype_name, is_size, sizes
from astray.errors import CheckpointError
from astray.stats.dtypes import DTYPES
from astray.wording import counted

METADATA = ".metadata"
DATA = ".distcp"
MOST_METADATA_BYTES = 1 << 30
MOST_COMPARED = 50_000_000
"""Pairs of chunks that are looked at to see that none lies over another: those of thousands of ranks take fewer."""

MOST_SHARED = 16
"""How often the bytes of a file may be said to be those of a tensor; torch writes each once."""

MOST_EMPTY = 1_000_000
"""Parts without elements, which ranks beyond the end of a tensor have, may share a place."""

_AGAIN = "Copy the folder again from where it was made."
_BAD = (TypeError, ValueError, KeyError, IndexError, AttributeError)


class Chunk(NamedTuple):
    """A box of a tensor, and where its little file lies in which of the large ones."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    where: ByteRange


def open_distributed(folder: Path, files: Files) -> CheckpointContents:
    """The tensors that the metadata of a folder lists, in its order."""
    path = folder / METADATA
    size = files.size(path)
    if size > MOST_METADATA_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, so it is not read.")
    root, _ = read_pickle(files.read(path, 0, size), str(path))
    try:
        listed, stored = _fields(root, "Metadata", "state_dict_metadata", "storage_data")
        places = _places(folder, stored)
    except _BAD:
        raise CheckpointError(f"{path} is not what torch.distributed.checkpoint writes. {_AGAIN}") from None
    tensors: dict[str, Stored] = {}
    others: dict[str, object] = {}
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"{path} lists no tensors. {_AGAIN}")
    room = 2 * len(places) + MOST_EMPTY
    for name, entry in listed.items():
        try:
            room -= _count_chunks(entry)
            if room < 0:
                raise ValueError
            found = _tensor(name, entry, places, files)
        except _BAD:
            raise CheckpointError(f"{path} says something of {name!r} that makes no sense. {_AGAIN}") from None
        if isinstance(found, Unread):
            others[name] = found
        else:
            tensors[name] = found
    data = sorted({place.file for place in places.values()})
    return CheckpointContents(f"distributed, {counted(len(data), 'file')}", (path, *data), tensors, others)


Places = dict[tuple[str, tuple[int, ...] | None], Chunk]


def _places(folder: Path, stored: Any) -> Places:
    """Where each chunk lies, by the name of its tensor and its offset there."""
    found: Places = {}
    for index, info in stored.items():
        name, offset = _fields(index, "MetadataIndex", "fqn", "offset")
        relative, start, nbytes = _fields(info, "_StorageInfo", "relative_path", "offset", "length")
        if not isinstance(name, str):
            raise ValueError
        if _field(info, "transform_descriptors"):
            raise CheckpointError(
                f"{folder} holds {name!r} in a form that an extension gave it, which astray does not read. Save it "
                "without extensions."
            )
        if not is_size(start) or not is_size(nbytes):
            raise ValueError
        at = None if offset is None else sizes(offset)
        if not isinstance(relative, str):
            raise ValueError
        found[name, at] = Chunk(at or (), (), _inside(folder, relative), ByteRange(start, nbytes))
    _check_apart(found)
    return found


def _check_apart(places: Places) -> None:
    """Refuse many little files that lie over each other: each would be gone through again for all that share it."""
    total: Counter[Path] = Counter()
    ends: Counter[Path] = Counter()
    for place in places.values():
        total[place.file] += place.where.nbytes
        ends[place.file] = max(ends[place.file], place.where.start + place.where.nbytes)
    for file, nbytes in total.items():
        if nbytes > MOST_SHARED * ends[file]:
            raise CheckpointError(
                f"{file.parent / METADATA} says that {nbytes:,} bytes of tensors lie in the first {ends[file]:,} of "
                f"{file}, over each other. {_AGAIN}"
            )


def _inside(folder: Path, relative: str) -> Path:
    """A file of the folder; one that lies elsewhere is refused."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or "\0" in relative or "\\" in relative:
        raise CheckpointError(
            f"{folder / METADATA} leads to {relative!r}, outside of its folder. That is not followed."
        )
    return folder / path


def _tensor(name: str, entry: Any, places: Places, files: Files) -> Stored | Unread:
    if _class(entry) == "BytesStorageMetadata":
        return Unread("a pickled object")
    properties, size, listed = _fields(entry, "TensorStorageMetadata", "properties", "size", "chunks")
    dtype, shape = _dtype(properties), sizes(size)
    if not is_shape(shape):
        raise ValueError
    if dtype not in DTYPES:
        return Unread(f"a tensor of {printable(dtype)} and shape {list(shape)}", "astray does not know this dtype", 1)
    chunks: list[Chunk] = []
    for one in listed:
        offsets, lengths = (sizes(value) for value in _fields(one, "ChunkStorageMetadata", "offsets", "sizes"))
        place = places.get((name, offsets))
        if place is None:
            return Unread(f"a tensor of {dtype} and shape {list(shape)}", "no file is known to hold a part of it", 1)
        chunks.append(Chunk(offsets, lengths, place.file, place.where))
    if not _cover(shape, chunks):
        return Unread(f"a tensor of {dtype} and shape {list(shape)}", "its parts do not make up the whole of it", 1)
    spec = TensorSpec(dtype, shape)
    if spec.nbytes > sum(chunk.where.nbytes for chunk in chunks):
        return Unread(f"a tensor of {dtype} and shape {list(shape)}", "its files are too small to hold it", 1)
    return Stored(spec, partial(_locate, name, spec, tuple(chunks), files), tuple(chunks))


def _count_chunks(entry: Any) -> int:
    """How many parts something is said to have: not many more in all than there are places of such."""
    return 0 if _class(entry) == "BytesStorageMetadata" else len(_fields(entry, "TensorStorageMetadata", "chunks")[0])


def _cover(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether boxes lie in a shape and fill it without laying over each other."""
    for chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape):
            return False
        if any(at + size > full for at, size, full in zip(chunk.offset, chunk.shape, shape, strict=True)):
            return False
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return False
    corners = [chunk.offset for chunk in chunks if 0 not in chunk.shape]
    return len(set(corners)) == len(corners) and not _overlap([chunk for chunk in chunks if 0 not in chunk.shape])


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two boxes share an element: among those that share indices of the first dimension, which are few."""
    if not chunks or not chunks[0].shape:
        return len(chunks) > 1
    active: list[Chunk] = []
    compared = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        compared += len(active)
        if compared > MOST_COMPARED:
            raise ValueError("too many parts")
        active = [other for other in active if other.offset[0] + other.shape[0] > chunk.offset[0]]
        if any(_share(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _share(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + length and b < a + size
        for a, size, b, length in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


def _locate(name: str, spec: TensorSpec, chunks: tuple[Chunk, ...], files: Files) -> list[StoredBox]:
    """The pieces of a tensor, from the little files in which they lie."""
    found: list[StoredBox] = []
    for chunk in chunks:
        if not math.prod(chunk.shape):
            continue
        size = files.size(chunk.file)
        if chunk.where.start + chunk.where.nbytes > size:
            raise CheckpointError(
                f"{chunk.file} ends after {size:,} bytes, before a part of {name!r} at {chunk.where.start:,}: the file "
                f"was cut. {_AGAIN}"
            )
        contents = open_embedded(chunk.file, files, chunk.where)
        stored = next(iter(contents.tensors.values()), None)
        if stored is None or stored.spec != TensorSpec(spec.dtype, chunk.shape):
            there = "no tensor" if stored is None else f"{stored.spec.dtype} of shape {list(stored.spec.shape)}"
            raise CheckpointError(
                f"{chunk.file} should hold a part of {name!r} at {chunk.where.start:,}, {spec.dtype} of shape "
                f"{list(chunk.shape)}, and holds {there}. {_AGAIN}"
            )
        found += [piece._replace(offset=chunk.offset) for piece in stored.locate()]
    return found


# -- torch's records -------------------------------------------------------------------------------------------------


def _class(made: Any) -> str:
    """The class of a record. Torch has moved some from module to module, never renamed them."""
    if not isinstance(made, Made) or not made.called.startswith("torch.distributed."):
        raise ValueError
    return made.called.rpartition(".")[2]


def _fields(made: Any, cls: str, *names: str) -> list[Any]:
    if _class(made) != cls:
        raise ValueError
    return [_field(made, name) for name in names]


def _field(made: Made, name: str) -> Any:
    """A field of a record; None when it is not said."""
    return made.state.get(name)


def _dtype(properties: Any) -> str:
    """Of the properties of a tensor, whose state is a tuple that begins with its dtype."""
    if _class(properties) != "TensorProperties":
        raise ValueError
    state = properties.state
    return dtype_name(state["dtype"] if isinstance(state, dict) else state[0])
