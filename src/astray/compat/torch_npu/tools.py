"""`from astray.compat.torch_npu.tools import compare` in place of torch_npu.hooks.tools."""

from __future__ import annotations

from astray.foreign.torch_npu.comparing import compare

__all__ = ["compare"]
