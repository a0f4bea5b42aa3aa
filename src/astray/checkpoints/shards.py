"""Hugging Face folders: one file of weights, or an index in JSON and the files that it names.

An index says only which file has which tensor, so each file is looked into, and both must agree. It may name nothing
but files beside it. Links are followed wherever they lead, since the hub's cache is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from astray.checkpoints.contents import Contents, printable
from astray.checkpoints.open_files import Files
from astray.checkpoints.stored_tensor import Stored
from astray.errors import CheckpointError
from astray.wording import counted

INDEX = ".index.json"
MOST_INDEX_BYTES = 100_000_000

OpenFile = Callable[[Path, Files], Contents]


def find_index(folder: Path, names: list[str]) -> Path | None:
    """The index of a folder, one of safetensors before others. Raises CheckpointError when there are several."""
    for ending in (".safetensors" + INDEX, ".bin" + INDEX):
        found = [name for name in names if name.endswith(ending)]
        plain = [name for name in found if name.split(".")[0] in ("model", "pytorch_model")]
        if len(found) == 1 or len(plain) == 1:
            return folder / (plain or found)[0]
        if found:
            raise CheckpointError(f"{folder} has several indices: {', '.join(found)}. Give one of them.")
    return None


def open_index(path: Path, files: Files, open_file: OpenFile) -> Contents:
    """The tensors of all files that an index names, file by file."""
    weight_map = _weight_map(path, files)
    shards = list(dict.fromkeys(weight_map.values()))
    beside = {entry.name for entry in path.parent.iterdir()}  # a name in an index may be one that no file can have
    missing, there = [], None
    for shard in shards:
        if shard in beside and (path.parent / shard).exists():
            there = there or shard
        else:
            missing.append(shard)
    if missing:
        way = f" What is there can be read file by file, such as {path.parent / there}." if there else ""
        listed = ", ".join(map(printable, missing[:3])) + (" …" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{path} names {counted(len(shards), 'file')}, and not all are there: {len(missing)} missing ({listed}). "
            f"Copy the rest too.{way}"
        )
    opened = {shard: open_file(path.parent / shard, files) for shard in shards}
    tensors: dict[str, Stored] = {}
    for shard, contents in opened.items():
        for name, stored in contents.tensors.items():
            if weight_map.get(name, shard) != shard:
                continue  # an older file of the same name may hold more than the index says
            if name in tensors:
                raise CheckpointError(f"{path.parent} has {name!r} in two files, and {path.name} does not list it.")
            tensors[name] = stored
    others = {name: value for contents in opened.values() for name, value in contents.others.items()}
    lost = [name for name in weight_map if name not in tensors and name not in others]
    if lost:
        more = f", nor are {len(lost) - 1:,} others where they should be" if len(lost) > 1 else ""
        raise CheckpointError(
            f"{path} says that {lost[0]!r} is in {weight_map[lost[0]]}, and it is not{more}. The files are not of one "
            "checkpoint: copy them again."
        )
    kind = next(iter(opened.values())).format if opened else "no"
    return Contents(f"{kind}, {counted(len(shards), 'file')}", tuple(path.parent / s for s in shards), tensors, others)


def _weight_map(path: Path, files: Files) -> dict[str, str]:
    size = files.size(path)
    if size > MOST_INDEX_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, which is no index.")
    try:
        found = json.loads(files.read(path, 0, size).decode())["weight_map"]
        pairs = dict(found.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is no index: it has no whole weight_map. Copy it again.") from None
    for name, shard in pairs.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            place = repr(shard) if isinstance(shard, str) else "no file"
            raise CheckpointError(
                f"{path} says that {name!r} is in {place}. An index may name nothing but files beside it, so that is "
                "not followed."
            )
    return pairs


def _is_plain(name: str) -> bool:
    """Whether it is the name of a file and leads nowhere."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0", ":"}
