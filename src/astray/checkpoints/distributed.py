"""Folders of torch.distributed.checkpoint: tensors in chunks across the files of all ranks, described by `.metadata`.

The metadata is a pickle of torch's classes, read as data like every other. Each chunk is a small file of `torch.save`
embedded in a larger one, and is parsed when its tensor is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from astray.checkpoints.pickles import PickledObject, read_pickle
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
"""The most pairs of chunks that are checked for overlap: the chunks of thousands of ranks take fewer."""

MOST_SHARED = 16
"""How often the chunks may cover the bytes of a file; torch writes each byte once."""

MOST_EMPTY = 1_000_000
"""How many chunks without elements, which ranks beyond the end of a tensor have, may share a location."""

_AGAIN = "Copy the folder again from where it was made."
_MALFORMED = (TypeError, ValueError, KeyError, IndexError, AttributeError)


class TensorChunk(NamedTuple):
    """A box of a tensor, and the byte range of its embedded file in a larger one."""

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
        locations = _locations(folder, stored)
    except _MALFORMED:
        raise CheckpointError(f"{path} is not what torch.distributed.checkpoint writes. {_AGAIN}") from None
    tensors: dict[str, Stored] = {}
    others: dict[str, object] = {}
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed):
        raise CheckpointError(f"{path} lists no tensors. {_AGAIN}")
    remaining = 2 * len(locations) + MOST_EMPTY
    for name, entry in listed.items():
        try:
            remaining -= _count_chunks(entry)
            if remaining < 0:
                raise ValueError
            tensor = _tensor(name, entry, locations, files)
        except _MALFORMED:
            raise CheckpointError(f"{path} says something of {name!r} that makes no sense. {_AGAIN}") from None
        if isinstance(tensor, Unread):
            others[name] = tensor
        else:
            tensors[name] = tensor
    data = sorted({chunk.file for chunk in locations.values()})
    return CheckpointContents(f"distributed, {counted(len(data), 'file')}", (path, *data), tensors, others)


ChunkLocations = dict[tuple[str, tuple[int, ...] | None], TensorChunk]


def _locations(folder: Path, stored: Any) -> ChunkLocations:
    """The chunks by the name of their tensor and their offset in it."""
    locations: ChunkLocations = {}
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
        locations[name, at] = TensorChunk(at or (), (), _inside(folder, relative), ByteRange(start, nbytes))
    _check_overlap(locations)
    return locations


def _check_overlap(locations: ChunkLocations) -> None:
    """Refuse embedded files that overlap many times: their bytes would be read again for each."""
    total: Counter[Path] = Counter()
    ends: Counter[Path] = Counter()
    for chunk in locations.values():
        total[chunk.file] += chunk.where.nbytes
        ends[chunk.file] = max(ends[chunk.file], chunk.where.start + chunk.where.nbytes)
    for file, nbytes in total.items():
        if nbytes > MOST_SHARED * ends[file]:
            raise CheckpointError(
                f"{file.parent / METADATA} says that {nbytes:,} bytes of tensors lie in the first {ends[file]:,} of "
                f"{file}, over each other. {_AGAIN}"
            )


def _inside(folder: Path, relative: str) -> Path:
    """A file in the folder; a path that leads out of it is refused."""
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or "\0" in relative or "\\" in relative:
        raise CheckpointError(
            f"{folder / METADATA} leads to {relative!r}, outside of its folder. That is not followed."
        )
    return folder / path


def _tensor(name: str, entry: Any, locations: ChunkLocations, files: Files) -> Stored | Unread:
    if _class(entry) == "BytesStorageMetadata":
        return Unread("a pickled object")
    properties, size, listed = _fields(entry, "TensorStorageMetadata", "properties", "size", "chunks")
    dtype, shape = _dtype(properties), sizes(size)
    if not is_shape(shape):
        raise ValueError
    if dtype not in DTYPES:
        return Unread(f"a tensor of {printable(dtype)} and shape {list(shape)}", "astray does not know this dtype", 1)
    chunks: list[TensorChunk] = []
    for box in listed:
        offsets, lengths = (sizes(value) for value in _fields(box, "ChunkStorageMetadata", "offsets", "sizes"))
        location = locations.get((name, offsets))
        if location is None:
            return Unread(f"a tensor of {dtype} and shape {list(shape)}", "no file is known to hold a part of it", 1)
        chunks.append(TensorChunk(offsets, lengths, location.file, location.where))
    if not _cover(shape, chunks):
        return Unread(f"a tensor of {dtype} and shape {list(shape)}", "its parts do not make up the whole of it", 1)
    spec = TensorSpec(dtype, shape)
    if spec.nbytes > sum(chunk.where.nbytes for chunk in chunks):
        return Unread(f"a tensor of {dtype} and shape {list(shape)}", "its files are too small to hold it", 1)
    return Stored(spec, partial(_locate, name, spec, tuple(chunks), files), tuple(chunks))


def _count_chunks(entry: Any) -> int:
    """How many chunks an entry lists: in all not many more than there are locations."""
    return 0 if _class(entry) == "BytesStorageMetadata" else len(_fields(entry, "TensorStorageMetadata", "chunks")[0])


def _cover(shape: tuple[int, ...], chunks: Sequence[TensorChunk]) -> bool:
    """Whether boxes fill a shape without overlapping."""
    for chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape):
            return False
        if any(at + size > full for at, size, full in zip(chunk.offset, chunk.shape, shape, strict=True)):
            return False
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return False
    corners = [chunk.offset for chunk in chunks if 0 not in chunk.shape]
    return len(set(corners)) == len(corners) and not _overlap([chunk for chunk in chunks if 0 not in chunk.shape])


def _overlap(chunks: list[TensorChunk]) -> bool:
    """Whether two boxes share an element. Only boxes that share indices of the first dimension are compared."""
    if not chunks or not chunks[0].shape:
        return len(chunks) > 1
    active: list[TensorChunk] = []
    compared = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        compared += len(active)
        if compared > MOST_COMPARED:
            raise ValueError("too many parts")
        active = [other for other in active if other.offset[0] + other.shape[0] > chunk.offset[0]]
        if any(_intersect(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _intersect(a: TensorChunk, b: TensorChunk) -> bool:
    return all(
        begin_a < begin_b + size_b and begin_b < begin_a + size_a
        for begin_a, size_a, begin_b, size_b in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


def _locate(name: str, spec: TensorSpec, chunks: tuple[TensorChunk, ...], files: Files) -> list[StoredBox]:
    """The boxes of a tensor, from its embedded files."""
    boxes: list[StoredBox] = []
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
            content = "no tensor" if stored is None else f"{stored.spec.dtype} of shape {list(stored.spec.shape)}"
            raise CheckpointError(
                f"{chunk.file} should hold a part of {name!r} at {chunk.where.start:,}, {spec.dtype} of shape "
                f"{list(chunk.shape)}, and holds {content}. {_AGAIN}"
            )
        boxes += [box._replace(offset=chunk.offset) for box in stored.locate()]
    return boxes


# -- torch's records -------------------------------------------------------------------------------------------------


def _class(made: Any) -> str:
    """The class of a record. Torch has moved some from module to module, never renamed them."""
    if not isinstance(made, PickledObject) or not made.called.startswith("torch.distributed."):
        raise ValueError
    return made.called.rpartition(".")[2]


def _fields(made: Any, cls: str, *names: str) -> list[Any]:
    if _class(made) != cls:
        raise ValueError
    return [_field(made, name) for name in names]


def _field(made: PickledObject, name: str) -> Any:
    """A field of a record; None when it is missing."""
    return made.state.get(name)


def _dtype(properties: Any) -> str:
    """The dtype in the properties of a tensor: their state is a dict, or a tuple that begins with it."""
    if _class(properties) != "TensorProperties":
        raise ValueError
    state = properties.state
    return dtype_name(state["dtype"] if isinstance(state, dict) else state[0])
