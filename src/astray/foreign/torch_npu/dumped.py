"""One tensor of a dump of torch_npu.hooks, whichever of its two forms it has: a line of JSON, or a file of numpy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.foreign.dump_rows import Values
from astray.foreign.torch_npu.names import Name
from astray.records import Statistics

Floats = npt.NDArray[np.float64]

SAMPLE = 10
"""How many values a sampled line begins with: the first of the tensor, in row-major order."""
SUMMARY = 3
"""What follows them: the maximum, the minimum and the mean of the whole tensor."""


class Dumped(NamedTuple):
    """A tensor as the dump has it.

    text: its name as it is written, `name` the same taken apart. place: where it stands, in words.
    numbers: gives what the dump holds of it, in float64, one after another. Raises RunError.
    is_sampled: that is some of its values, and three numbers that say something of all.
    counts_tensors: the path in its name counts the tensors on its side, of which a lone one is number 0.
    """

    name: Name
    text: str
    place: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Callable[[], Floats]
    values: Values | None = None
    statistics: Statistics | None = None
    note: str | None = None
    is_sampled: bool = False
    counts_tensors: bool = False


class Dump(NamedTuple):
    """The tensors of one rank, in order, and what is wrong with it. `is_cut`: its end shows that it was cut short."""

    tensors: list[Dumped]
    problems: list[str]
    is_cut: bool = False


Array = npt.NDArray[Any]
