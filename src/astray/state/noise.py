"""How noisy gradients are: the batch size at which noise and signal are equally large."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from astray.errors import StateError
from astray.state.naming import Pattern, check_same
from astray.state.state_dict import StateDict


class NoiseScale(NamedTuple):
    """What the gradients of several small batches tell of the gradient itself.

    All are estimates without bias, so that `signal` may come out negative where there is next to none; the scale is
    infinite then.
    """

    scale: float
    """tr(Σ) / |G|²: with batches much smaller than this a step is mostly noise, with much larger ones samples are
    wasted."""
    noise: float
    """tr(Σ), the variance of the gradient of a single example, over all parameters."""
    signal: float
    """|G|², of the true gradient."""
    batches: int


def gradient_noise_scale(gradients: Iterable[StateDict], batch: int, pattern: Pattern | None = None) -> NoiseScale:
    """The simple noise scale, from the gradients of at least two batches of `batch` examples each.

    >>> def gradients():
    ...     for part in parts:
    ...         model.zero_grad()
    ...         loss(model(part)).backward()
    ...         yield astray.from_grad(model)
    >>> astray.gradient_noise_scale(gradients(), batch=len(parts[0])).scale

    Each is the mean gradient over its batch, taken at the same weights. Only a running sum is kept, in float64. More
    batches make the estimate better: its error shrinks as one over the root of their number.
    """
    if batch < 1:
        raise StateError(f"A batch has at least one example; got batch={batch}.")
    total: dict[str, torch.Tensor] = {}
    squares, count = 0.0, 0
    for gradient in gradients:
        chosen = gradient.filter(pattern)
        if count:
            check_same(total, list(chosen), ("the first gradient", f"gradient {count}"))
        squares += chosen.norm2() ** 2
        for name in chosen:
            value = torch.as_tensor(chosen[name]).double()
            total[name] = total[name].add_(value) if count else value.clone()
        count += 1
    if count < 2:
        raise StateError(f"Noise shows between gradients, and there was {count}. Give those of two batches or more.")
    of_mean = (StateDict(total).norm2() / count) ** 2
    of_one = squares / count
    noise = (of_one - of_mean) * batch * count / (count - 1)
    signal = (count * of_mean - of_one) / (count - 1)
    return NoiseScale(noise / signal if signal > 0 else math.inf, noise, signal, count)
