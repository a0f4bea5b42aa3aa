"""The numbers of a state → its moments, by the means of the place where they lie.

CPU tensors are read once by the kernels of `astray.stats`; those on a device by `on_device`, which waits for it only
once, however many there are; of distributed ones every process measures its part (`sharded`). Nothing is copied as a
whole: a tensor that is made on demand is let go before the next one is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from astray.capture.pytorch.shards import arrived, is_awaited
from astray.errors import StateError
from astray.state.blocks import blocks
from astray.state.measurement import Measurement, Power, unit_for
from astray.state.on_device import Queue
from astray.state.sharded import Shards, is_shared_out, local_part
from astray.state.values import InBlocks, Value
from astray.stats import DTYPES, Strided
from astray.stats.moments import merge, moments, powers

NAMES = {dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
"""The dtypes that can be measured, by their torch object."""


def measure(
    values: Mapping[str, Value],
    names: Iterable[str],
    exponents: Collection[float] = (),
    look: Callable[[str, Value], None] | None = None,
) -> dict[str, Measurement]:
    """Measure the values of these names, each read once. `look` is shown every value while it is there."""
    found: dict[str, Measurement] = {}
    queue, shards = Queue(), Shards()

    def take(name: str) -> None:  # a function, so that each value is let go before the next one is made
        value = values[name]
        if look is not None:
            look(name, value)
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value), dtype=torch.float64)
        elif is_shared_out(value):
            shards.expect(name, value)
            value = local_part(value)
        tensor = readable(name, value)
        if tensor.is_cpu or not tensor.numel():
            found[name] = _measured(tensor, exponents)
        else:
            queue.add(name, tensor, exponents)

    in_blocks = values if isinstance(values, InBlocks) and look is None and not exponents else None
    for name in names:
        if in_blocks is not None:
            found[name] = _measured_in_blocks(in_blocks, name)
        else:
            take(name)
    found |= queue.fetch()
    return found | shards.gather(found)


def _measured_in_blocks(values: InBlocks, name: str) -> Measurement:
    """Of a tensor that is read from disk a block at a time."""
    dtype = str(values.spec(name).dtype).removeprefix("torch.")
    if DTYPES[dtype].kind == "complex":
        return _measured(values[name], ())
    parts = [moments(Strided.from_numpy(block, dtype)) for block in values.blocks(name)]
    return Measurement(merge(parts), {})


def _measured(tensor: torch.Tensor, exponents: Collection[float]) -> Measurement:
    """Of a tensor in CPU memory."""
    pieces = [tensor]
    if tensor.is_complex():
        pieces = [block.abs() for block in blocks(tensor)]
    memory = [Strided(piece.data_ptr(), NAMES[piece.dtype], tuple(piece.shape), piece.stride()) for piece in pieces]
    found = merge([moments(each) for each in memory]) if len(memory) != 1 else moments(memory[0])
    sums = {}
    for p in exponents:
        unit = unit_for(found, p)
        sums[p] = Power(unit, math.fsum(powers(each, p, unit) for each in memory))
    return Measurement(found, sums, tensor.is_complex())


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds the numbers; an error says why there is none."""
    if is_awaited(tensor):
        tensor = arrived(tensor)
    reason = None
    if tensor.is_nested:
        reason = "it is a nested tensor"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {str(tensor.layout).removeprefix('torch.')}; convert it with to_dense()"
    elif tensor.device.type == "meta":
        reason = "it is on the meta device, where there are none"
    elif tensor.is_quantized:
        reason = "it is quantized; convert it with dequantize()"
    elif is_traceable_wrapper_subclass(tensor):
        reason = f"a {type(tensor).__name__} wraps other tensors"
    elif tensor.dtype not in NAMES:
        reason = f"its dtype is {str(tensor.dtype).removeprefix('torch.')}"
    if reason is None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not tensor.numel() or tensor.data_ptr():
            return tensor
        reason = "it has no memory (freed, or never filled)"
    raise StateError(f"The numbers of {name!r} cannot be read: {reason}. Leave it out with filter(pattern).")
