"""What a `StateDict` holds: tensors or numbers by name, there already or made when they are asked for.

A mapping is lazy when it can tell the shape and dtype of a value without having it, by `spec(name)`: tensors of a
checkpoint on disk, and everything computed from them. A lazy value is made anew each time; nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt
import torch

Value: TypeAlias = torch.Tensor | float
"""A tensor, or a number that describes one."""


class ValueSpec(NamedTuple):
    """What is known of a value without having it; a number has no dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@runtime_checkable
class Lazy(Protocol):
    """A mapping whose values are made when they are asked for."""

    def spec(self, name: str) -> Any:
        """The shape and dtype of a value, without making it: as attributes, or as a pair. The dtype may be a name."""
        ...


@runtime_checkable
class InBlocks(Lazy, Protocol):
    """A lazy mapping whose tensors can be read a block at a time, for those too large to have as a whole."""

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def blocks(self, name: str) -> Iterable[npt.NDArray[Any]]:
        """The elements in row-major order, as flat arrays of the dtype's storage type."""
        ...


class Computed(Mapping[str, Value]):
    """Values that a function makes, each time they are asked for."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Value], spec: Callable[[str], ValueSpec]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make
        self._spec = spec

    def __getitem__(self, name: str) -> Value:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without making the value, as Mapping would

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def spec(self, name: str) -> ValueSpec:
        return self._spec(name)


class RenamedBlocks(Computed):
    """Some of the values of a mapping that can be read in blocks, under other names: new → old."""

    def __init__(self, names: Mapping[str, str], values: InBlocks) -> None:
        super().__init__(names, lambda name: values[names[name]], lambda name: spec_of(values, names[name]))
        self._old = names
        self._values = values

    def blocks(self, name: str) -> Iterable[npt.NDArray[Any]]:
        return self._values.blocks(self._old[name])


def spec_of(values: Mapping[str, Value] | Lazy, name: str) -> ValueSpec:
    """The shape and dtype of a value, without making it where it is lazy."""
    if not isinstance(values, dict) and isinstance(values, Lazy):  # a dict first: looking for a method is slow
        found = values.spec(name)
        shape, dtype = (found.shape, found.dtype) if hasattr(found, "shape") else found
        return ValueSpec(tuple(shape), getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    value = values[name]
    if isinstance(value, torch.Tensor):
        return ValueSpec(tuple(value.shape), value.dtype)
    return ValueSpec((), None)


def stand_in(spec: ValueSpec) -> Value:
    """Something of this shape and dtype without numbers, to ask a function what it would make of the real thing."""
    return 1.0 if spec.dtype is None else torch.empty(spec.shape, dtype=spec.dtype, device="meta")


BLOCK = 1 << 19
"""Elements in a block: 4 MB as float64, enough to keep a device busy and little beside a model."""


def blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements in row-major order, as flat blocks; only what is not contiguous is copied, a block at a time."""
    size = tensor.numel()
    if size <= BLOCK:
        if size:
            yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), BLOCK)
    else:
        rows = BLOCK * tensor.shape[0] // size
        for part in torch.split(tensor, max(rows, 1)):
            yield from blocks(part if rows else part[0])
