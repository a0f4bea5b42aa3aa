"""The compiled module, and those of its types that the whole adapter uses. Importing this builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astray.capture.paddle.native.build import load

if TYPE_CHECKING:
    from astray.capture.native.core import OpenCall, Site
    from astray.capture.paddle import _paddle
else:
    _paddle = load()
    OpenCall, Site = _paddle.OpenCall, _paddle.Site

__all__ = ["OpenCall", "Site", "_paddle"]
