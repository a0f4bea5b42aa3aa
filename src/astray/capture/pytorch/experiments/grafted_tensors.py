"""Tensors that take the place of a program's: in its graph, in its arguments, and whether they may.

`grafting` uses these. A tensor is replaced by a new one, and nothing is written to it; its gradient goes on to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

Named = list[tuple[str, Tensor]]
"""Tensors of a call with their paths."""


class CannotGraftError(Exception):
    """A tensor that cannot be replaced; its text says why."""


class ReplacedTensors:
    """Replaces the tensors of one set of arguments or results, each by its path; the same for one remains one.

    by_path: a tensor at two paths may be replaced by two; else the first path counts.
    """

    def __init__(self, named: Named, replace: Callable[[Tensor, str], Tensor], *, by_path: bool = True) -> None:
        self._paths: dict[int, list[str]] = defaultdict(list)
        for path, tensor in named:
            self._paths[id(tensor)].append(path)
        self._replace = replace
        self._by_path = by_path
        self._made: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by the id of the original

    def of(self, tensor: Tensor) -> Tensor:
        paths, made = self._paths.get(id(tensor)), self._made[id(tensor)]
        if made and (not self._by_path or not paths):
            return made[0][1]
        if not paths:
            return tensor
        replaced = self._replace(tensor, paths.pop(0))
        same = next((known for _, known in made if known is replaced or _are_equal(known, replaced)), replaced)
        made.append((tensor, same))
        return same

    def copies(self) -> list[tuple[Tensor, Tensor, int | None]]:
        """The originals with what was given in their place, and its version then."""
        return [
            (original, given, None if given.is_inference() else given._version)
            for made in self._made.values()
            for original, given in made
            if given is not original
        ]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and have_same_bits(first, second)


class _Replacement(torch.autograd.Function):
    """Other values in the place of a tensor, whose gradient goes on to that tensor."""

    @staticmethod
    def forward(_ctx: Any, _tensor: Tensor, values: list[Tensor]) -> Tensor:
        return values[0]  # in a list, since a tensor that is an argument would come back as a view of it

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor, _values: Any) -> Tensor:
        return tangent


class SentGradient(torch.autograd.Function):
    """A copy of a tensor, whose gradient goes on to it as `replace` gives it back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.replace = replace
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.replace(gradient), None

    @staticmethod
    def jvp(_ctx: Any, tangent: Tensor, _replace: Any) -> Tensor:
        return tangent.clone()


def with_gradient(tensor: Tensor, values: Tensor, *, connected: bool = True) -> Tensor:
    """The values, with the gradient of the tensor."""
    if not connected or not tensor.requires_grad or not torch.is_grad_enabled():
        return values
    made: Tensor = _Replacement.apply(tensor, [values])  # type: ignore[no-untyped-call]
    return made


def check_replaceable(tensor: Tensor) -> None:
    """Raises for a tensor whose bits cannot be compared and replaced."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise CannotGraftError(f"it is a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise CannotGraftError(f"its layout is {str(tensor.layout).removeprefix('torch.')}")
    if is_functorch_wrapped_tensor(tensor) or torch._C._are_functorch_transforms_active():
        raise CannotGraftError("it is inside a functorch transform")
    if tensor.is_meta or tensor.is_quantized:
        raise CannotGraftError("it has no memory" if tensor.is_meta else "it is quantized")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CannotGraftError("a CUDA graph is being captured")


def check_fits(values: Tensor, tensor: Tensor) -> None:
    if values.shape != tensor.shape:
        raise CannotGraftError(f"its shape is {list(tensor.shape)}, and that in the run {list(values.shape)}")
    if values.dtype != tensor.dtype and _kind_of(values.dtype) != _kind_of(tensor.dtype):
        raise CannotGraftError(f"it is {dtype_name(tensor.dtype)}, and that in the run {dtype_name(values.dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind_of(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def have_same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # of one element the stride may be any
