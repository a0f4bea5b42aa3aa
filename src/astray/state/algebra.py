"""Arithmetic with states: operators, in-place operators, and functions of torch, parameter by parameter.

    update = weight - weight_before
    -lr * m / (torch.sqrt(v) + 1e-8)

Two states must have the same names, and the two tensors of a name the same shape: nothing is broadcast but numbers and
tensors without dimensions. What is computed from a lazy state is lazy too: it is computed when it is asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from astray.errors import StateError
from astray.state.mapping import ComputedMapping, StateMapping, Value, ValueSpec, placeholder
from astray.state.naming import check_same

if TYPE_CHECKING:
    from typing_extensions import Self

    from astray.state.state_dict import StateDict


_OPERAND = (Real, torch.Tensor, Mapping)


class Algebra(StateMapping):
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
        return self._update(operator.iadd, other)

    def __isub__(self, other: Any) -> Self:
        return self._update(operator.isub, other)

    def __imul__(self, other: Any) -> Self:
        return self._update(operator.imul, other)

    def __itruediv__(self, other: Any) -> Self:
        return self._update(operator.itruediv, other)

    def __ipow__(self, other: Any) -> Self:
        return self._update(operator.ipow, other)

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
        """A state of the results of a function for each value.

        >>> state.apply(lambda tensor: tensor.clamp(min=0).sqrt())
        """
        return mapped(function, (self,), {}, checked=False)  # type: ignore[no-any-return]

    def apply_(self, function: Callable[[Any], Any]) -> Self:
        """Overwrite each value with a function's result for it; in the model too, if the state shares its values."""
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

    def _update(self, function: Callable[[Any, Any], Any], other: Any) -> Self:
        if not isinstance(other, _OPERAND):
            return NotImplemented  # type: ignore[no-any-return]
        mapped_in_place(function, self, _state(other))
        return self


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same operator with its operands exchanged."""

    def reflected(right: Any, left: Any) -> Any:
        return function(left, right)

    reflected.__name__ = function.__name__
    return reflected


def _state(other: Any) -> Any:
    """Any mapping is accepted as a state: `weight - model.state_dict()`."""
    if isinstance(other, Mapping) and not isinstance(other, StateMapping):
        from astray.state.state_dict import StateDict

        return StateDict(other)
    return other


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


# -- a function over states, name by name, which every operator uses ---------------------------------------------------


ELEMENTWISE = frozenset({
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "floordiv",
    "truediv", "pow", "float_power", "remainder", "mod", "fmod", "maximum", "minimum", "fmax", "fmin", "atan2",
    "arctan2", "hypot", "copysign", "nextafter", "ldexp", "xlogy", "logaddexp", "logaddexp2", "eq", "ne", "lt",
    "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "not_equal", "isclose", "allclose",
    "equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "and",
    "or", "xor", "where", "lerp", "addcmul", "addcdiv", "mse_loss", "l1_loss", "smooth_l1_loss",
})  # fmt: skip
"""Functions of several tensors that would broadcast them: their shapes are checked."""

IN_PLACE = frozenset({"iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "ipow", "imod", "iand", "ior", "ixor"})

_WHOLE = ("allclose", "equal")  # true of a state when they are true of all of its parameters

_EXPECTED = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


def mapped(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, checked: bool) -> Any:
    """A state of the function's results for the values of each name; a tuple of states where it returns tuples.

    Each state in the arguments is replaced by its value of a name. Numbers become float64 tensors without dimensions,
    so that division by 0 gives the same as for tensors, and results that are such tensors become numbers.

    checked: where the function works element by element, shapes must be the same.
    """
    leaves, structure = tree_flatten((args, kwargs))
    states = [leaf for leaf in leaves if isinstance(leaf, StateMapping)]
    first, title = states[0], _title(function)
    for other in states[1:]:
        check_same(first, other, (first.name, other.name))
    if checked and title.rstrip("_") in ELEMENTWISE:
        _check_shapes(leaves, states)
    if title.endswith("_") or title in IN_PLACE:
        return _in_place(function, title, args, kwargs)

    def call(name: str, values: Sequence[Any]) -> Any:
        filled = iter(values)
        called, named = tree_unflatten(
            [next(filled) if isinstance(leaf, StateMapping) else leaf for leaf in leaves], structure
        )
        try:
            return function(*called, **named)
        except _EXPECTED as error:
            raise StateError(f"{title} failed for {name!r} ({_described(first.spec(name))}): {error}") from error

    def make(name: str) -> Any:
        values = [state[name] for state in states]
        numbers = not any(isinstance(value, torch.Tensor) for value in values)
        with torch.no_grad():
            return _as_number_if(numbers, call(name, [_tensor(value) for value in values]))

    if any(state.lazy for state in states) and title not in _WHOLE:

        def spec(name: str) -> ValueSpec:
            result = call(name, [_tensor(placeholder(state.spec(name))) for state in states])
            return ValueSpec(tuple(result.shape), result.dtype)

        return first._with_values(ComputedMapping(first, make, spec))
    return _collected(first, title, {name: make(name) for name in first})


def mapped_in_place(function: Callable[..., Any], state: StateMapping, other: Any = None) -> None:
    """Overwrites each value with the function's result for it and the other operand's value of the same name."""
    operands = [state] if other is None else [state, other]
    values = state._writable("It cannot be changed in place")
    if isinstance(other, StateMapping):
        check_same(state, other, (state.name, other.name))
    _check_shapes(operands, [each for each in operands if isinstance(each, StateMapping)])
    for name in list(values):
        target = state[name]
        arguments = [_tensor(each[name]) if isinstance(each, StateMapping) else each for each in operands]
        try:
            with torch.no_grad():
                result = function(*arguments)
                if isinstance(target, torch.Tensor):
                    if result is not None and result is not arguments[0]:
                        target.copy_(result)
                elif result is not None:
                    values[name] = float(result)
        except _EXPECTED as error:
            raise StateError(
                f"{_title(function)} failed for {name!r} ({_described(state.spec(name))}): {error}"
            ) from error


def _in_place(function: Callable[..., Any], title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StateMapping:
    """`torch.sqrt_(state)` and the like: the state itself, changed."""
    target, *rest = args
    if not isinstance(target, StateMapping):
        raise StateError(f"{title} would write to something that is not a state. Use its form that makes a new one.")
    other = rest.pop(0) if rest and isinstance(rest[0], StateMapping) else None
    if any(isinstance(leaf, StateMapping) for leaf in tree_flatten((rest, kwargs))[0]):
        raise StateError(f"{title} takes one other state, as its second argument. Use its form that makes a new one.")

    def changed(*operands: Any) -> Any:
        return function(*operands, *rest, **kwargs)

    changed.__name__ = title
    mapped_in_place(changed, target, other)
    return target


def _check_shapes(leaves: Sequence[Any], states: Sequence[StateMapping]) -> None:
    """Raise unless the operands have one shape for each name, but for numbers and tensors without dimensions."""
    tensors = [(" of a tensor", leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    for name in states[0]:
        all_shapes = [("", state.spec(name).shape) for state in states] + tensors
        shapes = [(owner, tuple(shape)) for owner, shape in all_shapes if shape]
        if any(shape != shapes[0][1] for _, shape in shapes):
            texts = " and ".join(dict.fromkeys(f"{shape}{owner}" for owner, shape in shapes))
            raise StateError(
                f"The shapes of {name!r} differ: {texts}. Shapes must be equal; only numbers and tensors without "
                "dimensions are taken for all elements."
            )


def _collected(first: StateMapping, title: str, results: dict[str, Any]) -> Any:
    """The results of all names, as a state."""
    values = list(results.values())
    if title in _WHOLE:
        return all(values)
    if values and all(isinstance(value, tuple) for value in values):
        return tuple(
            first._with_values({name: value[i] for name, value in results.items()}) for i in range(len(values[0]))
        )
    for name, value in results.items():
        if not isinstance(value, torch.Tensor | float | int):
            raise StateError(
                f"{title} gives no tensor for {name!r} but a {type(value).__name__}, which no state holds."
            )
    return first._with_values(results)


def _tensor(value: Value) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _as_number_if(numbers: bool, result: Any) -> Any:
    """The result as a number, if all operands were numbers."""
    if numbers and isinstance(result, torch.Tensor) and not result.dim():
        return float(result) if result.dtype != torch.bool else bool(result)
    return result


def _title(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name.strip("_") if name.startswith("__") else name


def _described(spec: ValueSpec) -> str:
    return "a number" if spec.dtype is None else f"{str(spec.dtype).removeprefix('torch.')} {spec.shape}"
