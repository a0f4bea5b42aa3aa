"""Opens a checkpoint, recognising its format by its first bytes or by the names in its folder.

A Hugging Face folder has one file of weights, or an index in JSON and the files that it names. An index only maps
tensors to files, so the header of each file is read too, and both must agree. It may name only files beside it.
Symbolic links are followed wherever they lead, since the hub's cache consists of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from astray.checkpoints import distributed
from astray.checkpoints.checkpoint import Checkpoint
from astray.checkpoints.paddle_files import open_paddle
from astray.checkpoints.safetensors_files import open_safetensors
from astray.checkpoints.stored_tensor import CheckpointContents, Files, Stored, printable
from astray.checkpoints.torch_files import is_legacy, open_legacy, open_zip
from astray.errors import CheckpointError
from astray.wording import counted

ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pdparams")
"""The suffixes of files with weights. In a folder, files with one suffix are preferred to those with the next."""

USUAL = ("model", "pytorch_model", "model_state", "consolidated", "adapter_model", "diffusion_pytorch_model")
"""The usual names of such a file among others."""

INDEX = ".index.json"
INDICES = tuple(f"{ending}{INDEX}" for ending in (".safetensors", ".bin", ".pdparams"))
"""How the names of indices end, those of safetensors before others."""

MOST_INDEX_BYTES = 100_000_000

OpenFile = Callable[[Path, Files], CheckpointContents]

_OTHER_FORMATS = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself. Fetch that with: git lfs pull",
    b"GGUF": "a GGUF file, which astray does not read. Convert it to safetensors",
    b"\x89HDF": "an HDF5 file, which astray does not read. Convert it to safetensors",
    b"\x93NUMPY": "a numpy array, not a checkpoint",
    b"\x1f\x8b": "compressed by gzip. Unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd. Unpack it first",
}


_OTHER_SUFFIXES = dict.fromkeys(
    (".pdiparams", ".pdmodel"),
    "of a program for inference, whose weights have no names there. Load it with paddle.jit.load, and save them: "
    "paddle.save(layer.state_dict(), 'weights.pdparams')",
)


def recognises(path: Path) -> bool:
    """Whether a file or folder looks like a checkpoint. Reads no more than a few bytes."""
    try:
        if path.is_dir():
            return _looks_like_one([entry.name for entry in path.iterdir()])
        with path.open("rb") as file:
            return path.is_file() and _kind(file.read(32)) is not None
    except OSError:
        return False


def _looks_like_one(names: list[str]) -> bool:
    if distributed.METADATA in names or any(name.endswith(distributed.DATA) for name in names):
        return True
    return any(map(_is_index, names)) or bool(_weights(names))


def _is_index(name: str) -> bool:
    return name.endswith(INDICES)


def _weights(names: list[str]) -> list[str]:
    """The files of weights with a usual name and the preferred suffix."""
    for ending in ENDINGS:
        usual = [name for name in names if name.endswith(ending) and name.split(".")[0] in USUAL]
        if usual:
            return usual
    return []


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a file of safetensors, torch or Paddle, or the folder of a Hugging Face or distributed one.

    >>> with astray.checkpoints.open("gpt2/model.safetensors") as weights:
    ...     weights
    <Checkpoint gpt2/model.safetensors: safetensors, 148 tensors, 497.8 MB>

    Reads only the locations of the tensors. Raises CheckpointError when it is not a checkpoint or is damaged.
    """
    path = Path(path)
    files = Files()
    try:
        contents = _open_folder(path, files) if path.is_dir() else open_file(path, files)
        if not contents.tensors:
            raise CheckpointError(_why_no_tensors(path, contents))
    except BaseException:  # an interrupt must not leave a file open either
        files.close()
        raise
    return Checkpoint(path, contents, files)


def open_file(path: Path, files: Files) -> CheckpointContents:
    """The tensors of a file."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.name.endswith(INDEX):
        return open_index(path, files, _open_shard)
    return _open_shard(path, files)


def _open_shard(path: Path, files: Files) -> CheckpointContents:
    size = files.size(path)
    start = files.read(path, 0, min(size, 32))
    kind = _kind(start)
    if kind == "safetensors":
        return open_safetensors(path, files)
    if kind == "zip":
        return open_zip(path, files)
    if kind == "pickle":
        return open_legacy(path, files) if is_legacy(start) else open_paddle(path, files)
    if path.suffix == ".safetensors":  # the error then says what is wrong with it
        return open_safetensors(path, files)
    raise CheckpointError(f"{path} is {_describe(path, start, size)}.")


def _kind(start: bytes) -> str | None:
    """The format of a file by its first bytes."""
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 40:  # the length of its header
        return "safetensors"
    if start[:4] == b"PK\3\4":
        return "zip"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 2:
        return "pickle"
    return None


def _describe(path: Path, start: bytes, size: int) -> str:
    """A file that is not a checkpoint, in words."""
    if not size:
        return "empty"
    known = next((format for magic, format in _OTHER_FORMATS.items() if start.startswith(magic)), None)
    return (
        known
        or _OTHER_SUFFIXES.get(path.suffix)
        or "not a checkpoint: it begins neither like safetensors nor like a file of torch.save or paddle.save"
    )


def _open_folder(folder: Path, files: Files) -> CheckpointContents:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
    if distributed.METADATA in names:
        return distributed.open_distributed(folder, files)
    index = find_index(folder, names)
    if index is not None:
        return open_index(index, files, _open_shard)
    weights = _weights(names) or [name for name in names if name.endswith(ENDINGS)]
    if len(weights) == 1:
        return _open_shard(folder / weights[0], files)
    if weights:
        raise CheckpointError(f"{folder} has several files of weights and no index. Give one: {_listed(weights)}.")
    parts = [name for name in names if name.endswith(distributed.DATA)]
    if parts and any(name.endswith(distributed.METADATA) for name in names):
        raise CheckpointError(
            f"{folder} is a distributed checkpoint of Paddle, whose parts astray does not put together. Give one of "
            f"them: {_listed(parts)}; or load it into the whole model, and save that with paddle.save."
        )
    if parts:
        raise CheckpointError(
            f"{folder} has the parts of a distributed checkpoint, but no {distributed.METADATA}: it was not finished, "
            "or not all of it was copied."
        )
    raise CheckpointError(f"{folder} holds no checkpoint: {f'it has {_listed(names)}' if names else 'it is empty'}.")


def _listed(names: list[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" …" if len(names) > 5 else "")


def _why_no_tensors(path: Path, contents: CheckpointContents) -> str:
    """The error sentence for a checkpoint without readable tensors."""
    for name, other in contents.others.items():
        if getattr(other, "why", ""):
            return (
                f"{path} has no tensor that can be read: {printable(name)} is {other}. Save tensors or a state_dict, "
                "such as torch.save(model.state_dict(), 'weights.pt')."
            )
    what = f"; it has {_listed(list(contents.others))}" if contents.others else ""
    return f"{path} has no tensors{what}."


def find_index(folder: Path, names: list[str]) -> Path | None:
    """The index of a folder, one of safetensors before others. Raises CheckpointError when there are several."""
    for ending in INDICES:
        indices = [name for name in names if name.endswith(ending)]
        plain = [name for name in indices if name.split(".")[0] in ("model", "pytorch_model", "model_state")]
        if len(indices) == 1 or len(plain) == 1:
            return folder / (plain or indices)[0]
        if indices:
            raise CheckpointError(f"{folder} has several indices: {', '.join(indices)}. Give one of them.")
    return None


def open_index(path: Path, files: Files, open_file: OpenFile) -> CheckpointContents:
    """The tensors of all files that an index names, file by file."""
    weight_map = _weight_map(path, files)
    shards = list(dict.fromkeys(weight_map.values()))
    existing = {entry.name for entry in path.parent.iterdir()}  # an index may have names that no file can have
    missing, readable = [], None
    for shard in shards:
        if shard in existing and (path.parent / shard).exists():
            readable = readable or shard
        else:
            missing.append(shard)
    if missing:
        advice = f" What is there can be read file by file, such as {path.parent / readable}." if readable else ""
        listed = ", ".join(map(printable, missing[:3])) + (" …" if len(missing) > 3 else "")
        raise CheckpointError(
            f"{path} names {counted(len(shards), 'file')}, and not all are there: {len(missing)} missing ({listed}). "
            f"Copy the rest too.{advice}"
        )
    opened = {shard: open_file(path.parent / shard, files) for shard in shards}
    tensors: dict[str, Stored] = {}
    for shard, contents in opened.items():
        for name, stored in contents.tensors.items():
            if weight_map.get(name, shard) != shard:
                continue  # a stale file of the same name may have more tensors
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
    return CheckpointContents(
        f"{kind}, {counted(len(shards), 'file')}", tuple(path.parent / s for s in shards), tensors, others
    )


def _weight_map(path: Path, files: Files) -> dict[str, str]:
    size = files.size(path)
    if size > MOST_INDEX_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes, which is not an index.")
    try:
        weight_map = json.loads(files.read(path, 0, size).decode())["weight_map"]
        pairs = dict(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not an index: it has no whole weight_map. Copy it again.") from None
    for name, shard in pairs.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            shown = repr(shard) if isinstance(shard, str) else "no file"
            raise CheckpointError(
                f"{path} says that {name!r} is in {shown}. An index may name nothing but files beside it, so that is "
                "not followed."
            )
    return pairs


def _is_plain(name: str) -> bool:
    """Whether it is the plain name of a file, without directories."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0", ":"}
