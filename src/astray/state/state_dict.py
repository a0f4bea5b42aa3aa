"""`StateDict`: weights, gradients, optimizer states, activations or statistics of a model, to compute with.

Also its files: what `save` writes and `load_state` reads. No pickle is ever executed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from astray.errors import CheckpointError, StateError
from astray.state.algebra import Algebra
from astray.state.describe import StatisticsTable, described
from astray.state.mapping import ComputedMapping, StateMapping, Value, ValueSpec, spec_of
from astray.state.measuring import is_sharded
from astray.state.naming import Pattern, matching, unwrapped_names, warn
from astray.state.plots import Plots
from astray.state.reductions import Reductions, flat_tensor

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
            own = spec_of(values, name)
            return own._replace(dtype=own.dtype and (dtype or own.dtype))

        if self.lazy:
            self._values = ComputedMapping(values, lambda name: moved(values[name]), spec)
        else:
            self._values = {name: moved(self[name]) for name in self}
        self.dtype = dtype or self.dtype
        return self

    def unwrap(self) -> StateDict:
        """The same values under the model's own names: without `module.`, `_orig_mod.` and the like of wrappers."""
        return self._with_values(self._renamed(unwrapped_names(self)), self.name)

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
        _save(self, Path(path))

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
        # A repr reads no checkpoint, communicates with no process, and never fails.
        if not self.lazy and not any(map(is_sharded, self._values.values())):
            with suppress(StateError):
                norm = f"{self.norm2():.4g}"
        return f"{self.name}[L2={norm}, Numel={self.numel():,}, device={self.device}, dtype={self.dtype}]"


# -- files -------------------------------------------------------------------------------------------------------------


def _save(state: StateMapping, target: Path) -> None:
    """Writes a state: the complete file or none."""
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
    """A copy of a part of a larger tensor, which would be saved with all of the larger one."""
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
        checkpoint = checkpoints.open(path)
    except CheckpointError:  # a file without tensors is not a checkpoint
        numbers = _numbers(Path(path))
        if numbers is None:
            raise
        return StateDict(numbers, name=name)
    for key, what in checkpoint.unread.items():
        warn(f"{path} has {key!r}, which is not read: {what}.")
    return StateDict(checkpoint, name=name)


def _numbers(path: Path) -> dict[str, float] | None:
    """A saved state of numbers, as layer-wise statistics are; None if the file is anything else."""
    if not path.is_file():
        return None
    try:
        values = torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 - a broken file may raise anything, and the first error says more
        return None
    if not isinstance(values, dict) or not all(map(_is_number, values.values())):
        return None
    return values


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold: an integer in a file has no upper limit."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
