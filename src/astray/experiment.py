"""`astray.experiment`: run the program again with one thing changed, and see whether the error goes away.

    astray.experiment.seed_all()                               the same random numbers each time
    with astray.experiment.without_dropout(): ...              no random numbers at all
    with astray.experiment.swap(model, what, to=...): ...      one part of it elsewhere, or another in its place

`astray help experiments` has more. What a `with` block changes is as before when it ends. The work is done in
`capture/pytorch/experiments/` and `capture/paddle/experiments.py`, which are imported on use; no framework is imported
here.
"""

from __future__ import annotations

import operator
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from astray.capture.settings import LARGEST_SEED
from astray.errors import UsageError

__all__ = [
    "seed_all",
    "swap",
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
def swap(model: Any, what: Any, *, to: Any) -> Iterator[None]:
    """Inside the block, a module, function or callable runs elsewhere, or is another, within the same program.

    >>> with astray.experiment.swap(model, "h.2.attn", to="cpu"):
    ...     loss = model(batch)        # h.2.attn on the CPU, the rest where it was
    ...     loss.backward()
    >>> with astray.experiment.swap(model, r"h\\..*\\.attn/softmax", to="float64"):
    ...     loss = model(batch)        # the softmax of every attention in double precision
    >>> with astray.experiment.swap(None, "mypkg.sampling.TopK.__call__", to="cpu"):
    ...     generate(model, prompt)    # a callable outside of every module

    Inputs, and of a module also its parameters and buffers, are moved there for the call, and results are moved back;
    gradients flow to the originals, and what the call writes into its inputs is written in these. If the error goes
    away, this is what causes it. Keep the backward inside the block, at whose end a warning says what had no effect.
    Also decorates a function.

    model: a module, or a dict of modules by name, as for `record`; None where `what` needs none.
    what: the site of a module as `record` writes it (`<root>` for the model itself), a regular expression that fits
        whole sites, or a module; a function or op in a module, "h.2.attn/softmax", "h.2/aten.mm", or outside of all,
        "/softmax"; the dotted name of a callable of the program, or the callable itself; or a list of these.
    to: a device ("cpu", "cuda:1"), a floating point dtype ("float64", torch.bfloat16), a pair of both, "eager" (code
        that torch.compile has compiled runs uncompiled there), or a callable that is called instead, with the same
        arguments: of a module with those of `forward`; and with the original, if it has a parameter `original`.
    """
    _refuse_paddle(model, what)
    from astray.capture.pytorch.experiments.swapping import swapped

    with swapped(model, what, to):
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


def _refuse_paddle(model: Any, what: Any) -> None:
    layer = getattr(getattr(sys.modules.get("paddle"), "nn", None), "Layer", None)
    given = [*(model.values() if isinstance(model, Mapping) else [model])]
    given += what if isinstance(what, list | tuple) else [what]
    if layer is not None and any(isinstance(each, layer) for each in given):
        raise UsageError("swap works with PyTorch so far, and this is a layer of Paddle: compute it there by hand.")


def __getattr__(name: str) -> object:
    if name == "elsewhere":
        raise AttributeError(
            "astray.experiment has no 'elsewhere' any more. It is swap(model, site, to='cpu'), with a function as "
            "'h.2.attn/softmax'."
        )
    raise AttributeError(f"astray.experiment has no {name!r}. It offers {', '.join(__all__)}.")


def _checked(seed: int) -> int:
    try:
        number = operator.index(seed)  # numpy's whole numbers too
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= LARGEST_SEED:
        raise UsageError(f"seed={seed!r} is not a seed. It is a whole number from 0 to {LARGEST_SEED:,}.")
    return number
