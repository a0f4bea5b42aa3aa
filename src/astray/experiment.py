"""`astray.experiment`: run the program again with one thing changed, and see whether the error goes away.

    astray.experiment.seed_all()                               the same random numbers each time
    with astray.experiment.without_dropout(): ...              no random numbers at all
    with astray.experiment.elsewhere(model, site, ...): ...    one module on another device, or in another dtype

`astray help experiments` has more. What a `with` block changes is as before when it ends. The work is done in
`capture/pytorch/experiments/` and `capture/paddle/experiments.py`, which are imported on use; no framework is imported
here.
"""

from __future__ import annotations

import operator
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from astray.capture.settings import LARGEST_SEED
from astray.errors import UsageError

__all__ = [
    "elsewhere",
    "seed_all",
    "without_dropout",
]


@contextmanager
def without_dropout() -> Iterator[None]:
    """Inside the block, every dropout is the identity, as in eval mode, and draws no random number.

    >>> with astray.experiment.without_dropout():
    ...     loss = model(batch)
    ...     loss.backward()

    So programs that would draw different numbers (on another device, in another order) can be compared. Everything else
    stays in training mode. It covers nn.Dropout and its variants, the functions behind them, attention, and recurrent
    layers, however they were imported; it does not cover dropout that a program computes from random numbers itself, or
    kernels outside of torch. Also decorates a function.
    """
    with ExitStack() as off:
        for determinism in _of_frameworks():
            off.enter_context(determinism.WithoutDropout())
        yield


@contextmanager
def elsewhere(
    model: Any,
    site: str | re.Pattern[str] | Sequence[str | re.Pattern[str]],
    *,
    device: Any = None,
    dtype: Any = None,
    function: str | Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Inside the block, one module runs on another device or in another dtype, within the same program.

    >>> with astray.experiment.elsewhere(model, "h.2.attn", device="cpu"):
    ...     loss = model(batch)        # h.2.attn on the CPU, the rest where it was
    ...     loss.backward()
    >>> with astray.experiment.elsewhere(model, r"h\\..*\\.attn", dtype="float64", function="softmax"):
    ...     loss = model(batch)        # the softmax of every attention in double precision

    Its inputs, parameters and buffers are moved there for the call, and its results are moved back; gradients flow to
    the original parameters, and buffers that it changes are changed in the original. If the error goes away, this
    module causes it. Keep the backward inside the block.

    model: a module, or a dict of modules by name, as for `record`.
    site: the name of the module as `record` writes it (`<root>` for the model itself), a regular expression that fits
        whole names, or several of either.
    device, dtype: where to, and in what precision; only floating point tensors change their dtype. One of them is
        needed.
    function: run only this function inside the module elsewhere, by its name in torch: "softmax", "matmul".
    """
    from astray.capture.pytorch.experiments.elsewhere import substituted

    with substituted(model, site, device=device, dtype=dtype, function=function):
        yield


def seed_all(seed: int = 1234, deterministic: bool = False) -> None:
    """Seeds `random`, numpy's global generator, torch and Paddle on every device; call it before anything is drawn.

    Two programs can only be compared tensor by tensor when they draw the same numbers.

    >>> import torch, astray
    >>> astray.experiment.seed_all(7)
    >>> torch.rand(2)
    tensor([0.5349, 0.1988])

    Child processes get it as PYTHONHASHSEED; the order of sets and dicts in this one was settled when it started. A
    framework is only touched when the program has imported it already, so call this after the imports. Devices that are
    not in use yet are seeded when they are. Generators that the program has made itself keep their own seeds.

    seed: a whole number from 0 to 2³² − 1.
    deterministic: also ask torch for the same bits each time: deterministic algorithms (an operation that has none
        raises an error), cuDNN without its search for the fastest, and a fixed workspace for cuBLAS. Slower. False
        leaves these settings as they are.
    """
    number = _checked(seed)
    os.environ["PYTHONHASHSEED"] = str(number)
    random.seed(number)

    import numpy

    numpy.random.seed(number)  # the old global generator, which is what other people's code draws from
    frameworks = _of_frameworks()
    for framework in frameworks:
        framework.seed(number)
        if deterministic:
            framework.make_deterministic()
    if deterministic and not frameworks:
        warnings.warn(
            "Neither torch nor Paddle has been imported yet, so deterministic=True has no effect. Call it after the "
            "import.",
            stacklevel=2,
        )


def _of_frameworks() -> list[ModuleType]:
    """What turns off dropout and seeds, of each framework that the program has imported."""
    found: list[ModuleType] = []
    if "torch" in sys.modules:
        from astray.capture.pytorch.experiments import determinism

        found.append(determinism)
    if "paddle" in sys.modules:
        from astray.capture.paddle import experiments

        found.append(experiments)
    return found


def _checked(seed: int) -> int:
    try:
        number = operator.index(seed)  # numpy's whole numbers too
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= LARGEST_SEED:
        raise UsageError(f"seed={seed!r} is not a seed. It is a whole number from 0 to {LARGEST_SEED:,}.")
    return number
