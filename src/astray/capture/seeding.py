"""Gives every source of random numbers the same seed: Python's, numpy's, and those of the frameworks in use.

Two programs can only be compared tensor by tensor when they draw the same numbers. Knows no framework: one is asked for
when the program has imported it, through its own module beside its adapter.
"""

from __future__ import annotations

import operator
import os
import random
import sys
import warnings

from astray.errors import UsageError

LARGEST = 2**32 - 1
"""numpy's global generator takes no larger seed, and Python's hash none either."""


def seed_all(seed: int = 1234, deterministic: bool = False) -> None:
    """Seeds `random`, numpy's global generator, and torch on every device; call it before anything draws a number.

    >>> import torch, astray
    >>> astray.seed_all(7)
    >>> torch.rand(2)
    tensor([0.5349, 0.1988])

    Child processes get it as PYTHONHASHSEED; the order of sets and dicts in this one was settled when it started. torch
    is only touched when the program has imported it already, so call this after the imports. Devices that are not
    in use yet are seeded when they are. Generators that the program has made itself keep their own seeds.

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
    if "torch" in sys.modules:
        from astray.capture.pytorch.experiments import seeding

        seeding.seed(number)
        if deterministic:
            seeding.make_deterministic()
    elif deterministic:
        warnings.warn(
            "torch has not been imported yet, so deterministic=True asks nobody. Call it after.", stacklevel=2
        )


def _checked(seed: int) -> int:
    try:
        number = operator.index(seed)  # numpy's whole numbers too
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number <= LARGEST:
        raise UsageError(f"seed={seed!r} is no seed. It is a whole number from 0 to {LARGEST:,}.")
    return number
