"""The mapping that a `StateDict` is, before anything is computed with it.

Nothing is cached: what a state says of its values is read from them each time. Values that require gradients are handed
out detached, and as they are now: a state of a model's own parameters follows the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch

from astray.errors import StateError
from astray.state.naming import Pattern, matching
from astray.state.values import Computed, InBlocks, Lazy, RenamedBlocks, Value, ValueSpec, spec_of

if TYPE_CHECKING:
    from astray.state.state_dict import StateDict

UNNAMED = "StateDict"


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
        """What the values were converted to; None when they are as they were."""
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
        self._own(f"{name!r} cannot be set")[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own(f"{name!r} cannot be deleted")[name]

    def __contains__(self, name: object) -> bool:
        if type(self._values).__contains__ is Mapping.__contains__:  # which would make a lazy value to see if it can
            return any(name == each for each in self._values)
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __copy__(self) -> StateDict:
        return self._made(self._values, self.name)

    def clear(self) -> None:
        self._own("It cannot be cleared").clear()

    @property
    def lazy(self) -> bool:
        """Whether values are loaded or computed each time they are asked for. `clone()` has them all."""
        return not isinstance(self._values, dict)

    @property
    def is_numbers(self) -> bool:
        """Whether every value is a number and none a tensor, as layer-wise statistics are."""
        return bool(self._values) and all(self.spec(name).dtype is None for name in self)

    @property
    def source(self) -> Mapping[str, Value]:
        """Where the values come from: the mapping that was given, where it is lazy, and this state otherwise."""
        return self._values if self.lazy else self

    def spec(self, name: str) -> ValueSpec:
        """The shape and dtype of a value; nothing is loaded for it."""
        return spec_of(self._values, name)

    def filter(self, pattern: Pattern | None) -> StateDict:
        """The values whose names a regular expression matches, from their first character on. Nothing is copied."""
        names = matching(self, pattern)
        return self._made(self._picked({name: name for name in names}), self.name)

    def _picked(self, names: Mapping[str, str]) -> Mapping[str, Value]:
        """Some of the values, under new names: new → old."""
        if not self.lazy:
            return {new: self._values[old] for new, old in names.items()}
        values = self._values
        if isinstance(values, InBlocks):
            return RenamedBlocks(names, values)
        return Computed(names, lambda name: values[names[name]], lambda name: spec_of(values, names[name]))

    def _made(self, values: Mapping[str, Value], name: str | None = None) -> StateDict:
        """A state of other values; what was converted stays so."""
        from astray.state.state_dict import StateDict

        return StateDict(values, name=name, dtype=self.dtype)

    def _own(self, what: str) -> dict[str, Value]:
        """The values to write to."""
        if not isinstance(self._values, dict):
            raise StateError(f"{what}: the values of {self.name} are loaded or computed on demand. clone() it first.")
        return self._values
