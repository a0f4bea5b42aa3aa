"""The mapping that a `StateDict` is: tensors or numbers by name, in memory or made on demand.

A mapping is lazy when it gives the shape and dtype of a value without making it, by `spec(name)`: tensors of a
checkpoint on disk, and everything computed from them. Nothing is cached: a lazy value is made anew at each access.
Values that require gradients are returned detached: a state of a model's own parameters follows the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy.typing as npt
import torch

from astray.errors import StateError
from astray.state.naming import Pattern, matching

if TYPE_CHECKING:
    from astray.state.state_dict import StateDict

UNNAMED = "StateDict"

Value: TypeAlias = torch.Tensor | float
"""A tensor, or a number that describes one."""


class ValueSpec(NamedTuple):
    """What is known of a value without making it; a number has no dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None

    @property
    def numel(self) -> int:
        return prod(self.shape)


@runtime_checkable
class Lazy(Protocol):
    """A mapping whose values are made at each access."""

    def spec(self, name: str) -> Any:
        """The shape and dtype of a value, without making it: as attributes, or as a pair. The dtype may be a name."""
        ...


@runtime_checkable
class InBlocks(Lazy, Protocol):
    """A lazy mapping whose tensors can be read a block at a time, for those too large for memory."""

    def __getitem__(self, name: str) -> torch.Tensor: ...

    def blocks(self, name: str) -> Iterable[npt.NDArray[Any]]:
        """The elements in row-major order, as flat arrays of the dtype's storage type."""
        ...


class ComputedMapping(Mapping[str, Value]):
    """Values that a function makes, at each access."""

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


class RenamedBlocks(ComputedMapping):
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
        spec = values.spec(name)
        shape, dtype = (spec.shape, spec.dtype) if hasattr(spec, "shape") else spec
        return ValueSpec(tuple(shape), getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    value = values[name]
    if isinstance(value, torch.Tensor):
        return ValueSpec(tuple(value.shape), value.dtype)
    return ValueSpec((), None)


def placeholder(spec: ValueSpec) -> Value:
    """A value of this shape and dtype on the meta device, to find out what a function would make of the real one."""
    return 1.0 if spec.dtype is None else torch.empty(spec.shape, dtype=spec.dtype, device="meta")


BLOCK = 1 << 19
"""Elements in a block: 4 MB as float64, enough to keep a device busy and little compared with a model."""


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


# -- the mapping -------------------------------------------------------------------------------------------------------


class StateMapping(MutableMapping[str, Value]):
    """Tensors or numbers by name, in order; lazy where the mapping it was made from is."""

    _values: Mapping[str, Value]

    def __init__(
        self,
        values: Mapping[str, Value] | Iterable[tuple[str, Value]] = (),
        *,
        name: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name = UNNAMED if name is None else name
        self.dtype = dtype
        """The dtype that the values were converted to; None when they were not."""
        if isinstance(values, StateMapping):
            values = values._values
        if isinstance(values, Mapping) and isinstance(values, Lazy):
            self._values = values
        else:
            self._values = {}
            for key, value in values.items() if isinstance(values, Mapping) else values:
                self[key] = value

    def __getitem__(self, name: str) -> Value:
        try:
            value = self._values[name]
        except KeyError:
            from astray.wording import did_you_mean

            raise KeyError(f"{self.name} has no {name!r}.{did_you_mean(name, self._values)}") from None
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.detach()
        return value

    def __setitem__(self, name: str, value: Value) -> None:
        if not isinstance(value, torch.Tensor | float | int):
            raise TypeError(f"A state holds tensors or numbers; {name!r} would be a {type(value).__name__}.")
        self._writable(f"{name!r} cannot be set")[name] = value

    def __delitem__(self, name: str) -> None:
        del self._writable(f"{name!r} cannot be deleted")[name]

    def __contains__(self, name: object) -> bool:
        if type(self._values).__contains__ is Mapping.__contains__:  # which would make the lazy value
            return any(name == each for each in self._values)
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __copy__(self) -> StateDict:
        return self._with_values(self._values, self.name)

    def clear(self) -> None:
        self._writable("It cannot be cleared").clear()

    @property
    def lazy(self) -> bool:
        """Whether values are loaded or computed at each access. `clone()` has them all."""
        return not isinstance(self._values, dict)

    @property
    def is_numbers(self) -> bool:
        """Whether every value is a number and none a tensor, as layer-wise statistics are."""
        return bool(self._values) and all(self.spec(name).dtype is None for name in self)

    @property
    def source(self) -> Mapping[str, Value]:
        """The mapping that the state was made from, where it is lazy, and the state itself otherwise."""
        return self._values if self.lazy else self

    def spec(self, name: str) -> ValueSpec:
        """The shape and dtype of a value; nothing is loaded for it."""
        return spec_of(self._values, name)

    def filter(self, pattern: Pattern | None) -> StateDict:
        """The values whose names a regular expression matches, from their first character on. Nothing is copied."""
        names = matching(self, pattern)
        return self._with_values(self._renamed({name: name for name in names}), self.name)

    def _renamed(self, names: Mapping[str, str]) -> Mapping[str, Value]:
        """Some of the values, under new names: new → old."""
        if not self.lazy:
            return {new: self._values[old] for new, old in names.items()}
        values = self._values
        if isinstance(values, InBlocks):
            return RenamedBlocks(names, values)
        return ComputedMapping(names, lambda name: values[names[name]], lambda name: spec_of(values, names[name]))

    def _with_values(self, values: Mapping[str, Value], name: str | None = None) -> StateDict:
        """A state of other values, with the same `dtype`."""
        from astray.state.state_dict import StateDict

        return StateDict(values, name=name, dtype=self.dtype)

    def _writable(self, what: str) -> dict[str, Value]:
        """The values, to be written to. Raises a StateError that begins with `what` where they are lazy."""
        if not isinstance(self._values, dict):
            raise StateError(f"{what}: the values of {self.name} are loaded or computed on demand. clone() it first.")
        return self._values
