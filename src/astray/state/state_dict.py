"""`StateDict`: weights, gradients, optimizer states, activations or statistics of a model, to compute with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from astray.errors import StateError
from astray.state.algebra import Algebra
from astray.state.describe import StatisticsTable, described
from astray.state.measuring import is_shared_out
from astray.state.naming import Pattern, matching, unwrapped_names
from astray.state.plots import Plots
from astray.state.reductions import Reductions, flat_tensor
from astray.state.values import Computed, Value, ValueSpec, spec_of

if TYPE_CHECKING:
    from typing_extensions import Self

INDENT = " " * 8


class StateDict(Algebra, Reductions, Plots):
    """Tensors, or numbers that describe them, by the names of a model's parameters.

    >>> weight = astray.state.from_weight(model)
    >>> before = weight.clone()
    >>> optimizer.step()
    >>> update = weight - before
    >>> update.norm2(), update.describe(lw=True, pattern=".*attn.*")

    It is a mapping, in the order of the model. `+ - * / **` work with numbers and with states of the same names and
    shapes, functions of torch on every parameter, and the statistics of `astray.state.reductions` are methods. A state
    made without `clone=True` shares its tensors with the model: it follows the model, and writing to it writes to the
    model.

    A state of any lazy mapping, such as a checkpoint on disk, stays lazy: values are loaded when they are needed, one
    at a time, and what is computed from it is computed then.
    """

    def at(self, index: int) -> Value:
        """The value of the parameter with this number; negative ones count from the end."""
        names = list(self)
        if not -len(names) <= index < len(names):
            raise IndexError(f"{self.name} has {len(names)} parameters; there is no number {index}.")
        return self[names[index]]

    def set_name(self, name: str) -> Self:
        """Call the state by another name in tables; returns it."""
        self.name = name
        return self

    def clone(self, device: Any = None, dtype: torch.dtype | None = None) -> StateDict:
        """A copy of every value, which nothing else changes; where values are lazy, all of them are loaded."""
        copies = {}
        for name in self:
            value = self[name]
            if isinstance(value, torch.Tensor):
                value = value.to(device=device, dtype=dtype, copy=True)
            copies[name] = value
        return StateDict(copies, name=self.name, dtype=dtype or self.dtype)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Move and convert the values of this state, as `Module.to` does; returns it. The model's own stay."""
        values = self._values

        def moved(value: Value) -> Value:
            return value.to(device=device, dtype=dtype) if isinstance(value, torch.Tensor) else value

        def spec(name: str) -> ValueSpec:
            found = spec_of(values, name)
            return found._replace(dtype=found.dtype and (dtype or found.dtype))

        if self.lazy:
            self._values = Computed(values, lambda name: moved(values[name]), spec)
        else:
            self._values = {name: moved(self[name]) for name in self}
        self.dtype = dtype or self.dtype
        return self

    def unwrap(self) -> StateDict:
        """The same values under the model's own names: without `module.`, `_orig_mod.` and the like of wrappers."""
        return self._made(self._picked(unwrapped_names(self)), self.name)

    def flatten(self, pattern: Pattern | None = None) -> torch.Tensor:
        """All elements in one flat tensor: a copy, made anew each time. No statistic needs it."""
        return flat_tensor([self[name] for name in matching(self, pattern)])

    def state_dict(self) -> dict[str, Value]:
        """The values in a plain dict; where they are lazy, all of them are loaded."""
        return {name: self[name] for name in self}

    def is_compatible(self, other: StateDict) -> bool:
        """Whether the other state has the same names and shapes, so that the two can be added."""
        same = set(self) == set(other)
        return same and all(self.spec(name).shape == other.spec(name).shape for name in self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the values to a file: `.safetensors`, or any other name for what `torch.load` reads."""
        from astray.state.files import save

        save(self, path)

    def describe(
        self,
        lw: bool = False,
        pattern: Pattern | None = None,
        include_keys: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        display: bool = True,
        *,
        group: Pattern | None = None,
    ) -> StatisticsTable:
        r"""Print a table of statistics, and return it.

        >>> weight.describe(lw=True, pattern=".*conv.*")
        >>> weight.describe(group=r"h\.(\d+)\.", include_keys=["name", "numel", "std", "abs_max"])

        lw: a row for each parameter instead of one for all.
        pattern: only parameters that this regular expression matches, from the first character on.
        include_keys: the columns: no, name, shape, numel, dtype, value, and any statistic; `norm3` is a norm too.
        exclude_keys: columns to leave out.
        display: whether to print it.
        group: a row for each group that this regular expression captures; "layer" groups by the first number in names.
        """
        table = described(self, lw, pattern, include_keys, exclude_keys, group)
        return table.show() if display else table

    @property
    def device(self) -> torch.device | None:
        """The device of the first value; None for numbers, and where nothing is loaded yet."""
        first = None if self.lazy else next(iter(self._values.values()), None)
        return first.device if isinstance(first, torch.Tensor) else None

    def __repr__(self) -> str:
        width = max(2, len(str(len(self) - 1)))
        if self.is_numbers:
            lines = [f"    {number:0{width}}: {name} = {self[name]}" for number, name in enumerate(self)]
            return "\n".join([self.name, "(", *lines, ")"])
        shapes = {name: str(self.spec(name).shape) for name in self}
        longest, widest = (max(map(len, texts), default=0) for texts in (shapes, shapes.values()))
        lines = [
            f"{INDENT}{number:0{width}}: {name:<{longest}} {shape:>{widest}}"
            for number, (name, shape) in enumerate(shapes.items())
        ]
        return "\n".join([self._heading(), "(", *lines, ")"])

    def _heading(self) -> str:
        norm = "unread"
        # A look costs neither the reading of a whole checkpoint nor an exchange with other processes, and never fails.
        if not self.lazy and not any(map(is_shared_out, self._values.values())):
            with suppress(StateError):
                norm = f"{self.norm2():.4g}"
        return f"{self.name}[L2={norm}, Numel={self.numel():,}, device={self.device}, dtype={self.dtype}]"
