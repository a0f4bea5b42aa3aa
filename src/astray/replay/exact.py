"""Executes a rebuilt call in one way: as it was, in float64, or with its inputs rounded otherwise; with its backward.

Before the first of them the call is made without memory (torch's device `meta`), so that one whose result is not of the
recorded size, or needs far more memory than the recorded tensors, is not executed at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from astray.replay.arguments import Rebuilding, rebuild
from astray.replay.calls import MOST_ELEMENTS, CannotReplayError, RebuiltCall, Tensors
from astray.replay.functions import DATA_DEPENDENT, DEFINITIONS, result_size
from astray.replay.modules import first_line

HALVES = (torch.bfloat16, torch.float16)

_WIDENED = {"float", "half", "bfloat16"}
"""Methods that cast; in float64 they cast to that."""


class Way(NamedTuple):
    """How a call is executed.

    dtype: in which all floats are computed; None for their own. cast: to which all float inputs are rounded first, as
    autocast does. noise: by how much of itself each input is changed; `seed` draws signs and sizes, None changes all
    alike.
    bits: to how many bits of the significand inputs are rounded, as a chip's matrix units do. contiguous: whether
    inputs are laid out in one block.
    """

    dtype: torch.dtype | None = None
    cast: torch.dtype | None = None
    noise: float = 0.0
    seed: int | None = None
    bits: int | None = None
    contiguous: bool = False
    device: str = "cpu"
    tuples: bool = True


class Executed(NamedTuple):
    """The results of a call by their paths, and of each backward call the gradients of its inputs.

    drew_alike: whether it has drawn as many random numbers as when it was recorded.
    """

    outputs: Tensors
    gradients: list[Tensors]
    drew_alike: bool = True


_REFUSALS = (
    RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError, AssertionError,
)  # fmt: skip
"""What torch raises for arguments that it does not take."""


def execute(call: RebuiltCall, way: Way, backward: bool = True) -> Executed:
    """The call again. Raises CannotReplayError where torch does not compute it in this way."""
    inputs = _Inputs(call, way, backward)
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(bool(inputs.wanted)), torch.device(way.device):
            warnings.simplefilter("ignore")  # the program has seen torch's warnings when it made the call
            outputs, drew_alike = _call(call, way, inputs)
            gradients = [
                _gradients(outputs, inputs.leaves, each.arrived, each.sent, way) for each in call.backwards if backward
            ]
    except _REFUSALS as error:
        raise CannotReplayError(f"torch does not execute it here ({first_line(error)})") from None
    except MemoryError:
        raise CannotReplayError("not enough memory") from None
    return Executed({path: each.detach() for path, each in outputs.items()}, gradients, drew_alike)


class _Inputs:
    """The inputs of a call in the numbers of a way. `leaves` are those whose gradients may be asked for."""

    def __init__(self, call: RebuiltCall, way: Way, backward: bool) -> None:
        self.leaves: Tensors = {}
        self.wanted = {path for each in call.backwards for path in each.sent} if backward else set[str]()
        self._call = call
        self._way = way
        self._made = 0
        flags = True in (*call.skeleton.args, *call.skeleton.kwargs.values())  # of which one may be `inplace`
        self._may_write = call.in_place or flags

    def tensor(self, path: str) -> torch.Tensor:
        path = self._call.twins.get(path, path)
        if path not in self.leaves:
            leaf = self.changed(self._call.inputs[path])
            if path in self.wanted and (leaf.is_floating_point() or leaf.is_complex()):
                leaf.requires_grad_()
            self.leaves[path] = leaf
        return self._given(self.leaves[path])

    def _given(self, leaf: torch.Tensor) -> torch.Tensor:
        """What the call is given in place of a leaf: a copy where it may write to it, as to running statistics."""
        way = self._way
        if way.dtype is None and way.cast is not None and leaf.is_floating_point() and leaf.dtype != way.cast:
            return leaf.to(way.cast)
        return leaf.clone() if self._may_write or not leaf.requires_grad else leaf

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        self._made += 1
        return _changed(tensor, self._way, self._made)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _replaced(dtype, self._way.dtype)


def _call(call: RebuiltCall, way: Way, inputs: _Inputs) -> tuple[Tensors, bool]:
    """The results of a call, and whether it drew as many random numbers as it did."""
    generator = torch.default_generator
    args, kwargs = rebuild(call.skeleton, Rebuilding(inputs.tensor, inputs.dtype, way.device, way.tuples, generator))
    function = call.callable_of({name: inputs.changed(each).clone() for name, each in call.own.items()})
    if way.dtype is not None:
        function = DEFINITIONS.get(call.name, function)
    if call.drawn is not None:
        generator.set_state(call.drawn.before)
    if way.dtype is not None and call.name in _WIDENED and args:
        result = args[0].to(way.dtype)
    else:
        result = function(*args, **kwargs)
    drew_alike = call.drawn is None or torch.equal(generator.get_state(), call.drawn.after)
    if call.name == "setitem":
        result = args[0]
    elif result is None and args:  # of lists of tensors that are written to
        result = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
    return _flat(result, "out"), drew_alike


def _changed(tensor: torch.Tensor, way: Way, position: int) -> torch.Tensor:
    """A tensor in the numbers of a way, as a new leaf."""
    changed = tensor
    if tensor.is_floating_point() or tensor.is_complex():
        if way.cast is not None and way.dtype is not None and tensor.is_floating_point():
            changed = changed.to(way.cast)
        if way.dtype is not None:
            changed = changed.to(_replaced(tensor.dtype, way.dtype))
        if way.bits is not None and not tensor.is_complex():
            changed = _rounded(changed, way.bits)
        if way.noise:
            changed = changed * (1 + way.noise * _draw(changed, way.seed, position))
    if way.device == "meta":
        return torch.empty_like(changed, device="meta")
    changed = changed.detach()
    return changed.contiguous() if way.contiguous else changed


def _replaced(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of a way in place of another: of floats and of complex numbers, whose parts are floats."""
    if wanted is None:
        return dtype
    if dtype.is_complex:
        return torch.complex128 if wanted == torch.float64 else torch.complex64
    return wanted if dtype.is_floating_point else dtype


def _draw(like: torch.Tensor, seed: int | None, position: int) -> torch.Tensor | float:
    """Changes between −1 and 1, of a seed and the place of a tensor among the arguments."""
    if seed is None:
        return 1.0
    generator = torch.Generator().manual_seed(seed * 1009 + position)
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """A tensor whose significands have so many bits."""
    significand, exponent = torch.frexp(tensor)
    return torch.ldexp((significand * 2**bits).round() / 2**bits, exponent).to(tensor.dtype)


def _flat(value: Any, path: str) -> Tensors:
    """The tensors of a result by their paths, as the recorder names them."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    if isinstance(value, list | tuple):
        return {name: each for index, item in enumerate(value) for name, each in _flat(item, f"{path}.{index}").items()}
    return {}


def _gradients(
    outputs: Mapping[str, torch.Tensor], leaves: Tensors, arrived: Tensors, sent: Tensors, way: Way
) -> Tensors:
    """The gradients of a call's inputs, of those that arrived at its results."""
    roots = [path for path in arrived if path in outputs and outputs[path].requires_grad]
    wanted = [path for path in sent if path in leaves and leaves[path].requires_grad]
    if not roots or not wanted or way.device == "meta":
        return {}
    for path in roots:
        if arrived[path].shape != outputs[path].shape:
            raise CannotReplayError("a gradient that arrived in another shape than the result has")
    arriving = [_changed(arrived[path], way, 1000 + index).to(outputs[path].dtype) for index, path in enumerate(roots)]
    found = torch.autograd.grad(
        [outputs[path] for path in roots],
        [leaves[path] for path in wanted],
        arriving,
        retain_graph=True,
        allow_unused=True,
    )
    return {path: gradient for path, gradient in zip(wanted, found, strict=True) if gradient is not None}


# -- what may be executed ----------------------------------------------------------------------------------------------


class _SizeLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a call with a result, of its own or inside, that is larger than `MOST_ELEMENTS`."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.numel() > MOST_ELEMENTS:
                raise CannotReplayError(f"results of more than {MOST_ELEMENTS:,} elements")
        return result


def plans(call: RebuiltCall) -> list[Way]:
    """How the call may have been made: how its indices are read, and whether its inputs were cast. Nothing is computed.

    The first that this processor executes is how it was made: without memory, torch checks dtypes less. Raises
    CannotReplayError where none would give what was recorded.
    """
    found: list[Way] = []
    failure: CannotReplayError | None = None
    for way in _plans(call):
        try:
            with _SizeLimit():  # type: ignore[no-untyped-call]
                shapes = execute(call, way._replace(device="meta"), backward=False).outputs
        except CannotReplayError as error:
            if "elements" in str(error):
                raise
            failure = failure or error
            continue
        if call.kept.items() and not all(
            path in shapes and shapes[path].shape == each.shape and shapes[path].dtype == each.dtype
            for path, each in call.kept.items()
        ):
            failure = CannotReplayError("arguments that give a result of another shape or dtype than was recorded")
            continue
        found.append(way)
    if not found and call.name in DATA_DEPENDENT:
        if result_size(call.name, list(call.inputs.values())) > MOST_ELEMENTS:
            raise CannotReplayError(f"results of more than {MOST_ELEMENTS:,} elements")
        return [Way()]
    if not found:
        assert failure is not None
        raise failure
    return found


def _plans(call: RebuiltCall) -> list[Way]:
    """The ways that a call can have been made in, the plain one first."""
    cast = next((each.dtype for each in call.kept.values() if each.is_floating_point()), None)
    plans = [Way()]
    if call.name in ("getitem", "setitem"):
        plans.append(Way(tuples=False))
    if cast is not None and any(
        each.is_floating_point() and each.dtype != cast for each in (*call.inputs.values(), *call.own.values())
    ):
        plans.append(Way(cast=cast))
    return plans
