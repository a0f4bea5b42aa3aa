"""Arrays of every dtype and layout, as raw storage, for the tests of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from astray.stats import DTYPES


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round values to a dtype with torch, and give its raw storage as numpy holds it."""
    kind = DTYPES[dtype]
    if kind.kind in ("int", "bool"):
        return values.astype(kind.storage)
    if kind.kind == "complex":
        parts = encode(values, kind.part)
        return np.ascontiguousarray(parts[: parts.size // 2 * 2]).view(kind.storage)
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(getattr(torch, dtype))
    return rounded.view(getattr(torch, f"uint{8 * kind.itemsize}")).numpy().view(kind.storage)


def decoded(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values of raw storage as float64, by torch where numpy does not know the dtype; complex parts come last."""
    kind = DTYPES[dtype]
    raw = np.ascontiguousarray(raw)
    if kind.kind == "complex":
        return decoded(raw.reshape(*raw.shape, 1).view(DTYPES[kind.part].storage), kind.part)
    if kind.kind != "float" or kind.storage.kind == "f":
        return raw.astype(np.float64)
    bits = torch.from_numpy(raw.reshape(-1).view(f"u{kind.itemsize}").copy())
    return bits.view(getattr(torch, dtype)).to(torch.float64).numpy().reshape(raw.shape)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda a: a,
    "flat": lambda a: a.reshape(-1),
    "transposed": lambda a: a.T,
    "permuted": lambda a: a.reshape(20, -1, 10).transpose(2, 0, 1),
    "strided": lambda a: a[::2, 1::3],
    "column": lambda a: a[:, 3],
    "rows": lambda a: a[5:17],
    "block": lambda a: a[3:17, 1:-2],
    "backwards": lambda a: a[::-1, ::-2],
    "expanded": lambda a: np.broadcast_to(a[0], (7, a.shape[1])),
    "expanded column": lambda a: np.broadcast_to(a[:, :1], (a.shape[0], 5)),
    "one": lambda a: a[1:2, 1:2],
    "scalar": lambda a: a[1:2, 1:2].reshape(()),
    "empty": lambda a: a[:, :0],
}


def make(dtype: str, shape: tuple[int, ...], seed: int = 0, *, special: bool = False) -> np.ndarray:
    """Random values that the dtype can hold, some zeros, and on request some that are not finite."""
    rng = np.random.default_rng(seed)
    count = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
    kind = DTYPES[dtype]
    if kind.kind == "bool":
        values = rng.integers(0, 2, count).astype(np.float64)
    elif kind.kind == "int":
        values = rng.integers(0 if dtype[0] == "u" else -100, 100, count).astype(np.float64)
    else:
        values = rng.standard_normal(count) * 3
        values[::7] = 0.0
        values[::11] = -0.0
        if special:
            values[rng.random(count) < 0.1] = np.nan
            values[rng.random(count) < 0.1] = np.inf
            values[rng.random(count) < 0.1] = -np.inf
        if dtype == "float8_e8m0fnu":
            values = np.abs(values)
    return encode(values, dtype).reshape(shape)


def noise(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes: every pattern counts, whatever value it has."""
    kind = DTYPES[dtype]
    count = int(np.prod(shape)) * kind.itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    if kind.kind == "bool":
        data &= 1
    return data.view(kind.storage).reshape(shape)


def random_values(count: int, seed: int, *, special: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 3
    x[rng.random(count) < 0.1] = 0.0
    x[rng.random(count) < 0.05] = -0.0
    if special:
        for value in (np.nan, np.inf, -np.inf):
            x[rng.random(count) < 0.07] = value
    return x


def nearby(x: np.ndarray, seed: int) -> np.ndarray:
    """Most elements the same, some off a little, some a lot."""
    rng = np.random.default_rng(seed)
    y = x * (1 + 10.0 ** rng.uniform(-6, 0, x.size) * rng.choice([0, 0, 1, -1], x.size))
    return np.where(rng.random(x.size) < 0.05, random_values(x.size, seed + 1), y)


def ratio_precision(*names: str) -> float:
    """How right a sum of ratios must be: those of types that float32 can hold may be computed in it."""
    wide = any(DTYPES[DTYPES[name].part].itemsize > (4 if DTYPES[name].kind != "int" else 2) for name in names)
    return 1e-12 if wide else 1e-6
