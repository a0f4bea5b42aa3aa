"""Both backends run every test of this folder that uses `backend`, and raw tensors come from torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from astray.stats import kernels, numpy_kernels
from stats.backends import BACKENDS, native_kernels


@pytest.fixture(params=BACKENDS)
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
