"""States on disk: what `StateDict.save` writes and `load_state` reads. No pickle is ever executed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from astray.errors import CheckpointError, StateError
from astray.state.naming import warn
from astray.state.state_dict import StateDict

if TYPE_CHECKING:
    from astray.state.base import StateMapping


def save(state: StateMapping, path: str | os.PathLike[str]) -> None:
    """Write a state: whole or not at all."""
    target = Path(path)
    values = {name: _compact(value) if isinstance(value := state[name], torch.Tensor) else value for name in state}
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.suffix == ".safetensors":
            _save_safetensors(values, draft)
        else:
            torch.save(values, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _save_safetensors(values: dict[str, torch.Tensor | float], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise StateError("A .safetensors file needs the package safetensors. Save as .pt instead.") from None
    numbers = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    if numbers:
        raise StateError(f"A .safetensors file holds tensors only; {numbers[0]!r} is a number. Save as .pt instead.")
    # Names that share memory, such as tied weights, are refused there: every tensor gets its own.
    own = {name: value.contiguous().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    try:
        save_file(own, path)
    except KeyError as error:  # which dtypes it knows depends on its version
        raise StateError(f"A .safetensors file cannot hold tensors of {error}. Save as .pt instead.") from None


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A part of a larger tensor would be saved with all of it."""
    whole = tensor.untyped_storage().nbytes()
    return tensor.clone() if whole > tensor.numel() * tensor.element_size() else tensor


def load_state(path: str | os.PathLike[str], name: str | None = None) -> StateDict:
    """Read a state, or any checkpoint, tensor by tensor as it is needed.

    >>> before = astray.state.load_state("step1000.pt")
    >>> (astray.state.from_weight(model) - before).describe(lw=True)

    A file of `StateDict.save`, a `.pt` with a flat dict of tensors, safetensors, a folder of a distributed or Hugging
    Face checkpoint. `clone()` loads all of it.
    """
    from astray import checkpoints

    name = name or Path(path).stem
    try:
        found = checkpoints.open(path)
    except CheckpointError:  # a file without tensors is not a checkpoint
        numbers = _numbers(Path(path))
        if numbers is None:
            raise
        return StateDict(numbers, name=name)
    for key, what in found.unread.items():
        warn(f"{path} has {key!r}, which is not read: {what}.")
    return StateDict(found, name=name)


def _numbers(path: Path) -> dict[str, float] | None:
    """A saved state of numbers, as layer-wise statistics are; None if the file is anything else."""
    if not path.is_file():
        return None
    try:
        found = torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 - a broken file may raise anything, and the first error tells more
        return None
    if not isinstance(found, dict) or not all(map(_is_number, found.values())):
        return None
    return found


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold. A file may say whole numbers without end."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
