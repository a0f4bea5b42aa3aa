"""The backends that the tests of kernels run with; the native one is missing where it could not be built."""

from __future__ import annotations

try:
    from astray.stats import native_kernels
except ImportError:
    native_kernels = None  # type: ignore[assignment]

BACKENDS = ("native", "numpy")
