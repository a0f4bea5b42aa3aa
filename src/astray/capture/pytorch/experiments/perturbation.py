"""Changes the inputs of a program that is being recorded, each element by at most a rounding: the setting `perturb`.

Inputs are floating-point tensors given to an outermost module, and those that a module computes from integers alone (an
embedding). Global module hooks are called before those on single modules, so the recording's own see what is changed
here. The program's tensors are never written to: a call gets others in their place.

`PerturbedInputs` decides which tensors are changed, `perturbed` changes one: each element x becomes x·(1 + ε), x·(1 −
ε), or stays. Which of the three is a hash of the seed, the step, the element's place and its own bits. So no random
number is drawn, and every device gives the same result, as does a forward that is recomputed for its backward, or
another rank. Zeros, ±1, infinities and NaN stay: masks are made of them, and in `(1 - mask) * -1e9` a changed 1 would
become a large number.
"""

from __future__ import annotations

import sys
import threading
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _current_graph_task_id, _DisableTorchDispatch, _get_tracing_state
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from astray.capture.engine import Engine
from astray.capture.identity_map import IdentitySet
from astray.capture.pytorch.calls.modules import ModuleCapture
from astray.capture.pytorch.compiled.dynamo import CompileWarningFilter, is_compiled_graph, never_compiled
from astray.capture.pytorch.experiments.round_trip import mapped
from astray.capture.pytorch.shards import is_distributed, is_pending, waited_for
from astray.log import logger

NOTHING_CHANGED = "no call was given floating-point tensors that could be changed, or made them of integers"


class PerturbedInputs:
    """Changes the inputs of every call until `remove`, also in steps that are not recorded, since they change weights.

    everything: all modules are watched; else those that `capture` knows.
    """

    def __init__(self, engine: Engine, capture: ModuleCapture, seed: int, *, everything: bool) -> None:
        self._engine = engine
        self._capture = capture
        self._seed = seed
        self._everything = everything
        self._local = threading.local()
        self._perturbed_modules: IdentitySet[nn.Module] = IdentitySet()  # whose inputs were changed in this step
        self._changed = False  # whether any bit was
        self._handles: list[Any] = [
            register_module_forward_pre_hook(self._before),  # type: ignore[arg-type]
            register_module_forward_hook(self._after, always_call=True),
            CompileWarningFilter(),
        ]

    def next_step(self) -> None:
        self._perturbed_modules.clear()

    def remove(self) -> None:
        """Removes the hooks, and reports when there was nothing to change."""
        for handle in self._handles:
            handle.remove()
        if not self._changed:
            self._engine.missed("any perturbation", NOTHING_CHANGED)
            logger.warning(
                "astray perturbed nothing: %s. As --noise this run shows no more than a second recording of the same.",
                NOTHING_CHANGED,
            )

    # -- hooks ---------------------------------------------------------------------------------------------------

    @never_compiled
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if is_compiling() or not self._watches(module):
            return None
        try:
            frame = sys._getframe(1)
            if is_compiled_graph(module, frame):
                return None
            # A global hook is not given the keyword arguments. Torch's function that calls it has them, in a dict of
            # this call's own, which it goes on to use.
            with DisableTorchFunction():  # what is done here is not part of the program
                return self._enter(module, args, frame.f_locals.get("kwargs") or {})
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the perturbation of what {type(module).__name__} is given", error)
            return None

    @never_compiled
    def _after(self, module: nn.Module, _args: Any, result: Any) -> Any:
        if is_compiling() or not any(call.module is module for call in self._open):
            return None
        try:
            with DisableTorchFunction():
                return self._leave(module, result)
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            self._engine.failed(f"the perturbation of what {type(module).__name__} gives", error)
            return None

    def _watches(self, module: nn.Module) -> bool:
        if _get_tracing_state() is not None or not self._engine.in_own_process:
            return False
        return self._everything or self._capture.site(module) is not None

    # -- what is an input ----------------------------------------------------------------------------------------

    @property
    def _open(self) -> list[_PerturbedCall]:
        """The calls that this thread is in, outermost first."""
        calls: list[_PerturbedCall] = self._local.__dict__.setdefault("calls", [])
        return calls

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        outer = self._open[-1] if self._open else None
        given = [_is_floating(tensor) for tensor in _tensors((args, kwargs))]
        call = _PerturbedCall(
            module, any(given) or (outer is not None and outer.given_floats), bool(given) and not any(given)
        )
        self._open.append(call)
        if not any(given) or not self._is_first_given_floats(module, outer):
            return None
        changes = _Changes(self, call)
        new_args, new_kwargs = mapped(args, changes.of), mapped(kwargs, changes.of)
        if changes:
            self._perturbed_modules.add(module)
            kwargs.update(new_kwargs)
            self._mark_open_calls()
        return new_args if new_args is not args else None

    def _is_first_given_floats(self, module: nn.Module, outer: _PerturbedCall | None) -> bool:
        """Whether floating-point tensors enter here: at an outermost call, or inside calls that were given none, when
        code outside of every module has made them.
        """
        if outer is not None:
            return not outer.given_floats and not outer.perturbed
        # A forward that is recomputed for its backward starts at an inner module, and must get the same inputs as
        # before.
        return _current_graph_task_id() < 0 or module in self._perturbed_modules

    def _leave(self, module: nn.Module, result: Any) -> Any:
        call = self._open.pop()
        while call.module is not module:  # one whose end was not seen
            call = self._open.pop()
        _write_back(call)
        if not call.integers_only or call.perturbed:
            return None
        changes = _Changes(self, call=None)
        changed = mapped(result, changes.of)
        if not changes:
            return None
        self._mark_open_calls()
        return changed

    def _mark_open_calls(self) -> None:
        for call in self._open:
            call.perturbed = True

    def change(self, tensor: Tensor) -> Tensor:
        """The changed tensor; the same one when it is not an input, or cannot be changed."""
        if not _is_floating(tensor) or isinstance(tensor, nn.Parameter) or not tensor.numel():
            return tensor
        why = why_unchanged(tensor)
        if why is not None:
            self._engine.missed("the perturbation of an input", why)
            return tensor
        changed, added = perturbed(tensor, key(self._seed, self._engine.step))
        if not self._changed and not _is_being_captured(tensor):  # this waits for a device, once
            with torch.no_grad(), without_modes(tensor):
                self._changed = bool((added != 0).any())
        return changed


@dataclass(slots=True, eq=False)
class _PerturbedCall:
    """A running call."""

    module: nn.Module
    given_floats: bool  # it, or one around it, was given floating-point tensors
    integers_only: bool  # it was given tensors, and all of integers
    perturbed: bool = False  # something inside it was
    copies: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)  # original, copy, its version


class _Changes:
    """The tensors that were changed in one set of arguments or one result.

    The same tensor in two places stays one tensor.
    """

    def __init__(self, inputs: PerturbedInputs, call: _PerturbedCall | None) -> None:
        self._inputs = inputs
        self._call = call
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the original, which is held

    def __bool__(self) -> bool:
        return any(changed is not original for original, changed in self._made.values())

    def of(self, tensor: Tensor) -> Tensor:
        known = self._made.get(id(tensor))
        if known is None:
            known = self._made[id(tensor)] = tensor, self._inputs.change(tensor)
            if self._call is not None and known[1] is not tensor and not known[1].is_inference():
                self._call.copies.append((*known, known[1]._version))
        return known[1]


def _write_back(call: _PerturbedCall) -> None:
    """Copies what the call wrote to its inputs, which were our copies, back into the program's tensors."""
    for original, copy, version in call.copies:
        if copy._version != version:
            differentiably = torch.is_grad_enabled() and not (original.is_leaf and original.requires_grad)
            with torch.set_grad_enabled(differentiably), without_modes(original):
                original.copy_(copy)


def _tensors(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(values, note)
    return tensors


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_being_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which waiting for the device is an error."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""The dtypes that are changed, and the integers that show their bits. In fp8 the next number is far away."""

_COMPLEX = {torch.complex128, torch.complex64, torch.complex32}
_GOLDEN = 0x9E3779B9  # 2³² over the golden ratio, the usual step between keys
_MIXERS = ((16, 0x7FEB352D), (15, 0x846CA68B))  # shift and factor of each round of a well-tested hash of 32 bits


def why_unchanged(tensor: Tensor) -> str | None:
    """Why a floating-point tensor cannot be changed; None when it can."""
    if tensor.dtype not in _BITS and tensor.dtype not in _COMPLEX:
        return f"{str(tensor.dtype).removeprefix('torch.')} is too coarse"
    if tensor.layout != torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    if is_distributed(tensor):
        partial = any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]
        return "its parts have yet to be added up" if partial else None
    if is_functorch_wrapped_tensor(tensor):
        return "it is inside a functorch transform"
    if type(tensor) is not Tensor:
        return f"it is a {type(tensor).__name__}"
    return "it has no memory" if tensor.is_meta else None


def key(seed: int, step: int) -> int:
    """The hash key of a step, as a signed 32-bit number. The same on all ranks."""
    return _signed(zlib.crc32(b"%d %d" % (seed, step)))


def perturbation(tensor: Tensor, key: int) -> Tensor:
    """What to add to a tensor that `why_unchanged` returns None for. The sum is exact, and gradients pass as they are.

    It is −0.0 where nothing changes: of all numbers the one that leaves even the sign of a zero alone.
    """
    with torch.no_grad():
        if is_distributed(tensor):
            return _perturbation_of_shard(tensor, key)
        value = tensor.detach()
        if value.is_complex():
            real, imaginary = (_perturbation(part.resolve_neg(), key) for part in (value.real, value.imag))
            return torch.complex(real, imaginary)
        return _perturbation(value, key)


def without_modes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Turns every dispatch mode off for our own computations. Tensors of other classes compute by dispatching."""
    return _DisableTorchDispatch() if type(tensor) is Tensor else _disable_current_modes()


def perturbed(tensor: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """The changed tensor, and what was added."""
    with without_modes(tensor):
        added = perturbation(tensor, key)
        return tensor + added, added


def _perturbation_of_shard(tensor: Any, key: int) -> Tensor:
    local = tensor.to_local()
    local = waited_for(local) if is_pending(local) else local
    made: Tensor = type(tensor).from_local(
        _perturbation(local.detach(), key),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made


def _perturbation(value: Tensor, key: int) -> Tensor:
    factor = 1 + _signs(value, key).to(value.dtype) * torch.finfo(value.dtype).eps
    moved = value * factor
    stays = (moved == value) | (value.abs() == 1) | ~moved.isfinite()  # the largest numbers would become infinite
    return torch.where(stays, -0.0, moved - value)  # exact, since the two are so close


def _signs(value: Tensor, key: int) -> Tensor:
    """−1, 0 or +1 for each element, in 32-bit arithmetic that wraps around."""
    bits = value.view(_BITS[value.dtype])
    if bits.dtype == torch.int64:
        bits = bits ^ (bits >> 32)
    mixed = bits.to(torch.int32) ^ key
    step = 1
    for dim, size in enumerate(value.shape):
        step = step * _GOLDEN % 2**32  # another odd number for each dimension
        place = torch.arange(size, dtype=torch.int32, device=value.device) * _signed(step)
        mixed += place.view(-1, *(1,) * (value.dim() - dim - 1))
    for shift, factor in _MIXERS:
        mixed ^= mixed >> shift & (1 << 32 - shift) - 1  # without the sign, which `>>` would repeat
        mixed *= _signed(factor)
    return (mixed >> 16 & 0xFFFF) % 3 - 1


def _signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number
