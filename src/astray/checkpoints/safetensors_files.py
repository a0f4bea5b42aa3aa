"""Safetensors files: a JSON header with the location of each tensor, then their bytes.

Not read by the safetensors library, which maps the file into memory and needs a framework for bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from astray.checkpoints.stored_tensor import CheckpointContents, Files, Stored, TensorSpec, Unread, is_shape, printable
from astray.errors import CheckpointError
from astray.stats.dtypes import DTYPES

MOST_HEADER_BYTES = 100_000_000
"""The limit of the format."""

_METADATA = "__metadata__"
_NAMES = {dtype.safetensors: dtype.name for dtype in DTYPES.values() if dtype.safetensors}
_AGAIN = "Copy it again from where it was made."


def open_safetensors(path: Path, files: Files) -> CheckpointContents:
    """The tensors of one file, in the order of their bytes."""
    size = files.size(path)
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, which is not a safetensors file: it was cut. {_AGAIN}")
    length = int.from_bytes(files.read(path, 0, 8), "little")
    if length > min(MOST_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path} should have a header of {length:,} bytes, and has {size:,} bytes in all: it was cut, or is not a "
            f"safetensors file. {_AGAIN}"
        )
    header = _header(path, files.read(path, 8, length))
    tensors: dict[str, Stored] = {}
    others: dict[str, object] = {f"{_METADATA}.{key}": value for key, value in header.pop(_METADATA, {}).items()}
    placed = [(*_offsets(path, name, entry, size - 8 - length), name) for name, entry in header.items()]
    reached = 0
    for begin, end, name in sorted(placed):
        if begin < reached:
            raise CheckpointError(f"{path} is damaged: {name!r} begins inside of another tensor. {_AGAIN}")
        reached = end
        spec = _tensor(path, name, header[name], end - begin)
        if isinstance(spec, Unread):
            others[name] = spec
        else:
            tensors[name] = Stored.contiguous(spec, path, 8 + length + begin)
    return CheckpointContents("safetensors", (path,), tensors, others)


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {path} is damaged: {error}. {_AGAIN}") from None
    if not isinstance(header, dict) or not isinstance(header.get(_METADATA, {}), dict):
        raise CheckpointError(f"The header of {path} is damaged: it holds no tensors. {_AGAIN}")
    return header


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    header = dict(pairs)
    if len(header) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{printable(twice)!r} is in it twice")
    return header


def _offsets(path: Path, name: str, entry: Any, room: int) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise CheckpointError(f"The header of {path} is damaged: it does not say where {name!r} lies. {_AGAIN}")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise CheckpointError(f"The header of {path} is damaged: {name!r} lies at {begin:,}–{end:,}. {_AGAIN}")
    if end > room:
        raise CheckpointError(
            f"{path} was cut: {name!r} lies at {begin:,}–{end:,} of its values, and {room:,} bytes of them are there. "
            f"{_AGAIN}"
        )
    return begin, end


def _tensor(path: Path, name: str, entry: Any, nbytes: int) -> TensorSpec | Unread:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(shape, list) or not is_shape(shape):
        raise CheckpointError(f"The header of {path} is damaged: {name!r} has an impossible shape. {_AGAIN}")
    if not isinstance(dtype, str) or dtype not in _NAMES:
        kind = printable(dtype) if isinstance(dtype, str) else "something"
        return Unread(f"a tensor of {kind} and shape {shape}", "astray does not know this dtype", 1)
    spec = TensorSpec(_NAMES[dtype], tuple(shape))
    if spec.nbytes != nbytes:
        raise CheckpointError(
            f"The header of {path} is damaged: {name!r} is {spec.dtype} of shape {shape}, which takes {spec.nbytes:,} "
            f"bytes, and it has {nbytes:,}. {_AGAIN}"
        )
    return spec
