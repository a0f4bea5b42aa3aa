"""Opens a checkpoint, telling by its first bytes or by the names in its folder what it is."""

from __future__ import annotations

import os
from pathlib import Path

from astray.checkpoints import distributed, shards
from astray.checkpoints.checkpoint import Checkpoint
from astray.checkpoints.contents import Contents, printable
from astray.checkpoints.open_files import Files
from astray.checkpoints.safetensors_files import open_safetensors
from astray.checkpoints.torch_files import open_legacy, open_zip
from astray.errors import CheckpointError

ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""How the names of files with weights end. In a folder, files of one ending come before those of the next."""

USUAL = ("model", "pytorch_model", "consolidated", "adapter_model", "diffusion_pytorch_model")
"""What such a file is called where it lies among others."""

_OTHER_FORMATS = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself. Fetch that with: git lfs pull",
    b"GGUF": "a GGUF file, which astray does not read. Convert it to safetensors",
    b"\x89HDF": "an HDF5 file, which astray does not read. Convert it to safetensors",
    b"\x93NUMPY": "a numpy array and no checkpoint",
    b"\x1f\x8b": "compressed by gzip. Unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd. Unpack it first",
}


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
    return name.endswith((".safetensors" + shards.INDEX, ".bin" + shards.INDEX))


def _weights(names: list[str]) -> list[str]:
    """The files of weights with a usual name; those of safetensors alone where there are such."""
    for ending in ENDINGS:
        found = [name for name in names if name.endswith(ending) and name.split(".")[0] in USUAL]
        if found:
            return found
    return []


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a file of safetensors or torch, a Hugging Face folder, a distributed checkpoint's folder.

    >>> with astray.checkpoints.open("gpt2/model.safetensors") as weights:
    ...     weights
    <Checkpoint gpt2/model.safetensors: safetensors, 148 tensors, 497.8 MB>

    Only what says where the tensors are is read. Raises CheckpointError when it is no checkpoint or is damaged.
    """
    place = Path(path)
    files = Files()
    try:
        contents = _open_folder(place, files) if place.is_dir() else open_file(place, files)
        if not contents.tensors:
            raise CheckpointError(_without_tensors(place, contents))
    except BaseException:  # an interrupt too must leave no file open; it goes on its way below
        files.close()
        raise
    return Checkpoint(place, contents, files)


def open_file(path: Path, files: Files) -> Contents:
    """The tensors of a file."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.name.endswith(shards.INDEX):
        return shards.open_index(path, files, _open_shard)
    return _open_shard(path, files)


def _open_shard(path: Path, files: Files) -> Contents:
    size = files.size(path)
    start = files.read(path, 0, min(size, 32))
    kind = _kind(start)
    if kind == "safetensors":
        return open_safetensors(path, files)
    if kind == "zip":
        return open_zip(path, files)
    if kind == "pickle":
        return open_legacy(path, files)
    if path.suffix == ".safetensors":  # it should be one: say what is wrong with it
        return open_safetensors(path, files)
    raise CheckpointError(f"{path} is {_described(start, size)}.")


def _kind(start: bytes) -> str | None:
    """What a file is by its first bytes."""
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 40:  # the length of its header
        return "safetensors"
    if start[:4] == b"PK\3\4":
        return "zip"
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 2:
        return "pickle"
    return None


def _described(start: bytes, size: int) -> str:
    """What a file is that is no checkpoint."""
    if not size:
        return "empty"
    known = next((what for mark, what in _OTHER_FORMATS.items() if start.startswith(mark)), None)
    return known or "no checkpoint: it begins neither like safetensors nor like a file of torch.save"


def _open_folder(folder: Path, files: Files) -> Contents:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.") from None
    if distributed.METADATA in names:
        return distributed.open_distributed(folder, files)
    index = shards.find_index(folder, names)
    if index is not None:
        return shards.open_index(index, files, _open_shard)
    found = _weights(names)
    found = found or [name for name in names if name.endswith(ENDINGS)]
    if len(found) == 1:
        return _open_shard(folder / found[0], files)
    if found:
        raise CheckpointError(f"{folder} has several files of weights and no index. Give one: {_listed(found)}.")
    if any(name.endswith(distributed.DATA) for name in names):
        raise CheckpointError(
            f"{folder} has the parts of a distributed checkpoint, but no {distributed.METADATA}: it was not finished, "
            "or not all of it was copied."
        )
    raise CheckpointError(f"{folder} holds no checkpoint: {f'it has {_listed(names)}' if names else 'it is empty'}.")


def _listed(names: list[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" …" if len(names) > 5 else "")


def _without_tensors(path: Path, contents: Contents) -> str:
    """Why there is nothing to show, and what to do about it."""
    for name, other in contents.others.items():
        if getattr(other, "why", ""):
            return (
                f"{path} has no tensor that can be read: {printable(name)} is {other}. Save tensors or a state_dict, "
                "such as torch.save(model.state_dict(), 'weights.pt')."
            )
    what = f"; it has {_listed(list(contents.others))}" if contents.others else ""
    return f"{path} has no tensors{what}."
