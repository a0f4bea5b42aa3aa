"""For programs written for torch_npu.hooks: change the import, and leave the rest as it is.

    from astray.compat.torch_npu import register_hook, seed_all, set_dump_path, wrap_acc_cmp_hook
    from astray.compat.torch_npu.tools import compare

`astray help torch-npu` explains the differences.
"""

from __future__ import annotations

from astray.experiment import seed_all
from astray.foreign.torch_npu.comparing import compare
from astray.foreign.torch_npu.hooks import (
    register_hook,
    schedule,
    set_dump_path,
    step_schedule,
    stop,
    wrap_acc_cmp_hook,
    wrap_async_datadump_hook,
    wrap_checkoverflow_hook,
)
from astray.foreign.torch_npu.overflow import Overflow

__all__ = [
    "Overflow",
    "compare",
    "register_hook",
    "schedule",
    "seed_all",
    "set_dump_path",
    "step_schedule",
    "stop",
    "wrap_acc_cmp_hook",
    "wrap_async_datadump_hook",
    "wrap_checkoverflow_hook",
]
