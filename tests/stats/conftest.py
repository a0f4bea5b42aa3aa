"""Both backends run every test of this folder that asks for `backend`, and raw tensors come from torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from astray.stats import DTYPES, kernels, numpy_kernels

try:
    from astray.stats import native_kernels
except ImportError:
    native_kernels = None  # type: ignore[assignment]


@pytest.fixture(params=["native", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test once with each backend."""
    if request.param == "native" and native_kernels is None:
        pytest.skip("the native kernels are not built")
    monkeypatch.setattr(kernels, "_backend", native_kernels if request.param == "native" else numpy_kernels)
    return str(request.param)


@pytest.fixture
def native() -> Iterator[object]:
    """The extension itself, put back to its defaults afterwards."""
    module = pytest.importorskip(
        "astray.stats._native", reason="the native kernels are not built", exc_type=ImportError
    )
    yield module
    module.set_isa(module.isas()[-1])
    kernels.set_threads(None)


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
