"""A tensor → numbers: statistics, fingerprints and element-wise comparison, accumulated in float64.

`kernels` is the front. It needs no framework: a tensor comes as an address, a dtype name, a shape and strides.
"""

from astray.stats.dtypes import DTYPES, DType, decode
from astray.stats.kernels import (
    BACKEND,
    Contrast,
    Measurement,
    Measurements,
    ShardPosition,
    Strided,
    contrast,
    factorize,
    gather,
    measure,
    merge_fingerprints,
    pack,
    sample_positions,
    set_threads,
)

__all__ = [
    "BACKEND",
    "DTYPES",
    "Contrast",
    "DType",
    "Measurement",
    "Measurements",
    "ShardPosition",
    "Strided",
    "contrast",
    "decode",
    "factorize",
    "gather",
    "measure",
    "merge_fingerprints",
    "pack",
    "sample_positions",
    "set_threads",
]
