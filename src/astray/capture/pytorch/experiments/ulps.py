"""Changes a tensor by the size of a rounding: each element x becomes x·(1 + ε), x·(1 − ε), or stays.

Which of the three is a hash of the seed, the step, the element's place and its own bits. So no random number is drawn,
every device gives the same, and so does a forward that is computed again for its backward, or on another rank.
Zeros, ±1, infinities and NaN stay: masks are made of them, and `(1 - mask) * -1e9` must not come to life.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from astray.capture.pytorch.shards import arrived, is_awaited, is_distributed

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


def why_not(tensor: Tensor) -> str | None:
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
    """What is hashed of a step, as a signed number of 32 bits. Ranks have no part in it."""
    return _signed(zlib.crc32(b"%d %d" % (seed, step)))


def offset(tensor: Tensor, key: int) -> Tensor:
    """What to add to a tensor that `why_not` has nothing against. The sum is exact, and gradients pass as they are.

    It is −0.0 where nothing changes: of all numbers the one that leaves even the sign of a zero alone.
    """
    with torch.no_grad():
        if is_distributed(tensor):
            return _offset_of_shard(tensor, key)
        value = tensor.detach()
        if value.is_complex():
            real, imaginary = (_offset(part.resolve_neg(), key) for part in (value.real, value.imag))
            return torch.complex(real, imaginary)
        return _offset(value, key)


def aside(tensor: Tensor) -> AbstractContextManager[Any]:
    """Keeps what is computed here from dispatch modes of anybody. Tensors of other classes compute by dispatching."""
    return _DisableTorchDispatch() if type(tensor) is Tensor else _disable_current_modes()


def perturbed(tensor: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """The changed tensor, and what was added."""
    with aside(tensor):
        added = offset(tensor, key)
        return tensor + added, added


def _offset_of_shard(tensor: Any, key: int) -> Tensor:
    local = tensor.to_local()
    local = arrived(local) if is_awaited(local) else local
    made: Tensor = type(tensor).from_local(
        _offset(local.detach(), key),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return made


def _offset(value: Tensor, key: int) -> Tensor:
    factor = 1 + _drawn(value, key).to(value.dtype) * torch.finfo(value.dtype).eps
    moved = value * factor
    stays = (moved == value) | (value.abs() == 1) | ~moved.isfinite()  # the largest numbers would become infinite
    return torch.where(stays, -0.0, moved - value)  # exact, since the two are so close


def _drawn(value: Tensor, key: int) -> Tensor:
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
