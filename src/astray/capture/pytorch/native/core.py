"""The compiled module, and those of its types that the whole adapter uses. Importing this builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from astray.capture.pytorch.native.build import load

if TYPE_CHECKING:
    from astray.capture.native.core import OpenCall, Site
    from astray.capture.pytorch import _torch
else:
    _torch = load()
    OpenCall, Site = _torch.OpenCall, _torch.Site

__all__ = ["OpenCall", "Site", "_torch"]
