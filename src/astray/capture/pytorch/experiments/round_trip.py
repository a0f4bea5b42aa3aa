"""Moves the tensors of one call to another device or into another dtype, and its results back (`RoundTrip`).

Moving is differentiable, so gradients come back to where the tensors came from. `mapped` changes the tensors in nested
arguments; `perturbation` uses it too. What is moved, and when, is decided by `destination`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunction, _DisableTorchDispatch
from torch.nn.utils.rnn import PackedSequence

from astray.capture.pytorch.tensors import PLAIN


class _MovedTensor(NamedTuple):
    """A tensor and its copy elsewhere, which may be itself. Held, so that their ids stay their own."""

    original: torch.Tensor
    copy: torch.Tensor
    version: int | None


class RoundTrip:
    """Moves the tensors of one call, and its results back to the device of the first tensor and the dtype of the first
    floating-point one.

    What the call wrote to a copy is written to the original too, and a tensor that it merely passes on comes back as
    the original.
    """

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self._device = device
        self._dtype = dtype
        self._sent: dict[int, _MovedTensor] = {}  # by the id of the original
        self._originals: dict[int, torch.Tensor] = {}  # by the id of the copy, or of a result
        self._results: list[torch.Tensor] = []  # held, for their ids
        self._home_device: torch.device | None = None
        self._home_dtype: torch.dtype | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no tensor was met that could be moved or cast."""
        return (self._home_dtype if self._device is None else self._home_device) is None

    def send(self, values: Any) -> Any:
        """The same arguments with their tensors moved."""
        return mapped(values, self._send)

    def bring_back(self, result: Any) -> Any:
        """The result moved back."""
        return mapped(result, self._bring_back)

    @contextmanager
    def state(self, holder: Any) -> Iterator[None]:
        """Inside the block, an object's tensors are moved: of a module, also those of all modules in it."""
        modules = list(holder.modules()) if isinstance(holder, nn.Module) else []
        weights = {part: part._flat_weights for part in modules if isinstance(part, nn.RNNBase)}
        for tensors_by_name in _tensor_dicts(holder):
            for name, tensor in _tensors(tensors_by_name):
                tensors_by_name[name] = self._send(tensor)
        for part, flat in weights.items():  # these keep a list of their parameters besides
            part.__dict__["_flat_weights"] = [tensor if tensor is None else self._send(tensor) for tensor in flat]
        try:
            yield
        finally:
            for tensors_by_name in _tensor_dicts(holder):
                for name, tensor in _tensors(tensors_by_name):
                    tensors_by_name[name] = self._bring_back(tensor)
            for part, flat in weights.items():
                part.__dict__["_flat_weights"] = flat

    def precision(self) -> Any:
        """Autocast as on the original device; off where a dtype was given, since it would choose another."""
        if self._home_device is None:
            return nullcontext()
        home, target = self._home_device.type, (self._device or self._home_device).type
        if self._dtype is not None:
            return torch.autocast(target, enabled=False)
        if target == home or not torch.is_autocast_enabled(home):
            return nullcontext()
        return torch.autocast(target, dtype=torch.get_autocast_dtype(home))

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._sent.get(id(tensor))
        if known is not None:
            return known.copy
        if self._home_device is None:
            self._home_device = tensor.device
        if self._home_dtype is None and tensor.is_floating_point():
            self._home_dtype = tensor.dtype
        moved = self._moved(tensor)
        self._sent[id(tensor)] = _MovedTensor(tensor, moved, _version(moved))
        self._originals[id(moved)] = tensor
        return moved

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self._device or tensor.device, dtype=dtype)

    def _bring_back(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._originals.get(id(tensor))
        if known is not None:
            return known
        dtype = tensor.dtype
        if dtype == self._dtype and self._home_dtype is not None:
            dtype = self._home_dtype
        device = tensor.device
        if device == self._device and self._home_device is not None:
            device = self._home_device
        brought = tensor.to(device=device, dtype=dtype)
        self._results.append(tensor)
        self._originals[id(tensor)] = brought  # the same result in two places stays one
        return brought

    def write_back(self) -> None:
        """Writes the copies that the call has written to into their originals."""
        for key, (original, moved, version) in list(self._sent.items()):
            if moved is original or not self._was_written(original, moved, version):
                continue
            if original.requires_grad and original.is_leaf:  # a parameter; torch allows no other write to one
                with torch.no_grad():
                    original.copy_(moved)
            else:
                original.copy_(moved)
            self._sent[key] = _MovedTensor(original, moved, _version(moved))

    def _was_written(self, original: torch.Tensor, moved: torch.Tensor, version: int | None) -> bool:
        if version is not None and (moved._version != version or moved.requires_grad):
            return moved._version != version
        # batch_norm writes its running statistics without changing the version counter, and inference tensors have
        # none.
        with _unobserved() if {type(original), type(moved)} <= PLAIN else nullcontext():
            return not _same_numbers(moved, self._moved(original))


@contextmanager
def _unobserved() -> Iterator[None]:
    """What is computed here is not part of the program, nor of what its recordings see."""
    with DisableTorchFunction(), _DisableTorchDispatch():
        yield


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and bool(((first == second) | (first.isnan() & second.isnan())).all())


def _tensor_dicts(holder: Any) -> Iterator[dict[str, Any]]:
    """The dicts that hold the tensors of an object; of a module, also those of all modules in it."""
    if not isinstance(holder, nn.Module):
        yield getattr(holder, "__dict__", {})
        return
    for part in holder.modules():
        yield part._parameters
        yield part._buffers
        yield part.__dict__  # some modules keep tensors as plain attributes


def _tensors(tensors_by_name: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in tensors_by_name.items() if isinstance(value, torch.Tensor)]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with its tensors changed; the same object where nothing in it changes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # whose lengths stay on the CPU, wherever its data is
        return value._replace(data=change(value.data), **_indices(value, change))
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(value, "_make", type(value))  # a named tuple takes its items one by one otherwise
        return make(items)
    if isinstance(value, dict | UserDict):
        entries = {key: mapped(item, change) for key, item in value.items()}
        return value if _same(entries, value) else _with_entries(value, entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        new = {name: mapped(item, change) for name, item in old.items()}
        return value if _same(new, old) else _with_fields(value, new)
    return value


def _indices(value: PackedSequence, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {"sorted_indices": value.sorted_indices, "unsorted_indices": value.unsorted_indices}
    return {name: change(tensor) for name, tensor in named.items() if tensor is not None}


def _same(new: dict[Any, Any], old: Mapping[Any, Any]) -> bool:
    return all(item is old[key] for key, item in new.items())


def _with_entries(value: MutableMapping[Any, Any], entries: dict[Any, Any]) -> MutableMapping[Any, Any]:
    changed = copy.copy(value)  # of its own class, which may have more than entries
    for key, item in entries.items():
        changed[key] = item
    return changed


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(changed, name, item)  # a frozen one too
    return changed
