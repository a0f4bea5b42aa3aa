"""Arithmetic with states: operators, in-place operators, and functions of torch, parameter by parameter.

    update = weight - weight_before
    -lr * m / (torch.sqrt(v) + 1e-8)

Two states must have the same names, and the two tensors of a name the same shape: nothing is broadcast but numbers and
tensors without dimensions. What is computed from a lazy state is lazy too: it is computed when it is asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from astray.state.base import Base
from astray.state.mapped import mapped, mapped_in_place

if TYPE_CHECKING:
    from typing_extensions import Self

    from astray.state.state_dict import StateDict

_OPERAND = (Real, torch.Tensor, Mapping)


class Algebra(Base):
    """The operators of a state."""

    __array_ufunc__ = None  # numpy numbers leave operators to us

    def __add__(self, other: Any) -> StateDict:
        return self._with(operator.add, other)

    def __sub__(self, other: Any) -> StateDict:
        return self._with(operator.sub, other)

    def __mul__(self, other: Any) -> StateDict:
        return self._with(operator.mul, other)

    def __truediv__(self, other: Any) -> StateDict:
        return self._with(operator.truediv, other)

    def __pow__(self, other: Any) -> StateDict:
        return self._with(operator.pow, other)

    def __radd__(self, other: Any) -> StateDict:
        return self._with(_reflected(operator.add), other)

    def __rsub__(self, other: Any) -> StateDict:
        return self._with(_reflected(operator.sub), other)

    def __rmul__(self, other: Any) -> StateDict:
        return self._with(_reflected(operator.mul), other)

    def __rtruediv__(self, other: Any) -> StateDict:
        return self._with(_reflected(operator.truediv), other)

    def __rpow__(self, other: Any) -> StateDict:
        return self._with(_reflected(operator.pow), other)

    def __iadd__(self, other: Any) -> Self:
        return self._changed_with(operator.iadd, other)

    def __isub__(self, other: Any) -> Self:
        return self._changed_with(operator.isub, other)

    def __imul__(self, other: Any) -> Self:
        return self._changed_with(operator.imul, other)

    def __itruediv__(self, other: Any) -> Self:
        return self._changed_with(operator.itruediv, other)

    def __ipow__(self, other: Any) -> Self:
        return self._changed_with(operator.ipow, other)

    def __lt__(self, other: Any) -> StateDict:
        return self._with(operator.lt, other)

    def __le__(self, other: Any) -> StateDict:
        return self._with(operator.le, other)

    def __gt__(self, other: Any) -> StateDict:
        return self._with(operator.gt, other)

    def __ge__(self, other: Any) -> StateDict:
        return self._with(operator.ge, other)

    def __neg__(self) -> StateDict:
        return self.apply(operator.neg)

    def __pos__(self) -> StateDict:
        return self.apply(operator.pos)

    def __abs__(self) -> StateDict:
        return self.apply(torch.abs)

    def __eq__(self, other: object) -> bool:
        """Whether names and every value are the same. Element by element it is `torch.eq(a, b)`."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(_equal(self[name], other[name]) for name in self)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def apply(self, function: Callable[[Any], Any]) -> StateDict:
        """A state of what a function makes of each value.

        >>> state.apply(lambda tensor: tensor.clamp(min=0).sqrt())
        """
        return mapped(function, (self,), {}, checked=False)  # type: ignore[no-any-return]

    def apply_(self, function: Callable[[Any], Any]) -> Self:
        """Write what a function makes of each value into it: into the model's own, if the values are its own."""
        mapped_in_place(function, self)
        return self

    def sqrt(self) -> StateDict:
        """The square roots of the elements."""
        return self.apply(torch.sqrt)

    def sqrt_(self) -> Self:
        """`sqrt`, in place."""
        return self.apply_(torch.sqrt)

    def abs(self) -> StateDict:
        """The magnitudes of the elements."""
        return self.apply(torch.abs)

    def abs_(self) -> Self:
        """`abs`, in place."""
        return self.apply_(torch.abs)

    def sign(self) -> StateDict:
        """−1, 0 or 1 for every element."""
        return self.apply(torch.sign)

    def sign_(self) -> Self:
        """`sign`, in place."""
        return self.apply_(torch.sign)

    def clip(self, min: float | None = None, max: float | None = None) -> StateDict:
        """The elements, none below `min` and none above `max`."""
        return self.apply(lambda value: torch.clip(value, min, max))

    def clip_(self, min: float | None = None, max: float | None = None) -> Self:
        """`clip`, in place."""
        return self.apply_(lambda value: torch.clip(value, min, max))

    def zeros(self) -> StateDict:
        """Zeros of the same names and shapes."""
        return self.apply(torch.zeros_like)

    def zeros_(self) -> Self:
        """Set every element to 0."""
        return self.apply_(torch.zeros_like)

    def ones(self) -> StateDict:
        """Ones of the same names and shapes."""
        return self.apply(torch.ones_like)

    def ones_(self) -> Self:
        """Set every element to 1."""
        return self.apply_(torch.ones_like)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """A function of torch, applied to the values of each name in turn: `torch.sqrt(v)`, `torch.add(a, b)`."""
        return mapped(function, args, kwargs or {}, checked=True)

    def _with(self, function: Callable[[Any, Any], Any], other: Any) -> StateDict:
        if not isinstance(other, _OPERAND):
            return NotImplemented  # type: ignore[no-any-return]
        return mapped(function, (self, _state(other)), {}, checked=True)  # type: ignore[no-any-return]

    def _changed_with(self, function: Callable[[Any, Any], Any], other: Any) -> Self:
        if not isinstance(other, _OPERAND):
            return NotImplemented  # type: ignore[no-any-return]
        mapped_in_place(function, self, _state(other))
        return self


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same operator with its operands the other way round."""

    def reflected(mine: Any, theirs: Any) -> Any:
        return function(theirs, mine)

    reflected.__name__ = function.__name__
    return reflected


def _state(other: Any) -> Any:
    """Any mapping is taken for a state: `weight - model.state_dict()`."""
    if isinstance(other, Mapping) and not isinstance(other, Base):
        from astray.state.state_dict import StateDict

        return StateDict(other)
    return other


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
