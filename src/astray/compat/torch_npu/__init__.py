"""For programs written for torch_npu.hooks: change the import, and the rest stays as it is.

    from astray.compat.torch_npu import register_hook, seed_all, set_dump_path, wrap_acc_cmp_hook
    from astray.compat.torch_npu.tools import compare

In `foreign/torch_npu`, `dumping.py` has the recordings behind the hooks and the steps they dump, `overflow.py` the
guard behind `wrap_checkoverflow_hook`. `tools.py` here compares two dumps.

`astray help moving-from-torch-npu` tells what is different, and why.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING

from astray.compat.torch_npu.tools import compare
from astray.errors import UsageError
from astray.experiment import seed_all
from astray.foreign.torch_npu.dumping import DumpRecorder, Schedule, dump_path, schedule, step_schedule
from astray.foreign.torch_npu.overflow import Overflow, OverflowCheck
from astray.process import absolute

if TYPE_CHECKING:
    import torch

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


class HookOptions(Enum):
    """What `register_hook` can do."""

    VALUES = "wrap_acc_cmp_hook"
    ARRAYS = "wrap_async_datadump_hook"
    OVERFLOW = "wrap_checkoverflow_hook"

    @property
    def __name__(self) -> str:
        return self.value


wrap_acc_cmp_hook = HookOptions.VALUES
wrap_async_datadump_hook = HookOptions.ARRAYS
wrap_checkoverflow_hook = HookOptions.OVERFLOW

_values = DumpRecorder()
_arrays = DumpRecorder(arrays=True)
_check = OverflowCheck()


def set_dump_path(fpath: str | os.PathLike[str] | None = None) -> None:
    """The file into which `wrap_acc_cmp_hook` dumps from here on; a dump that is there is replaced.

    May be called again: what follows goes to the new file, numbered from 0. With several ranks each writes a file of
    its own: `npu.pkl` becomes `npu_rank0.pkl`.
    """
    _values.turn_to(dump_path(fpath))


def register_hook(
    model: torch.nn.Module,
    hook: HookOptions,
    *,
    sample: bool = True,
    path: str | os.PathLike[str] = "./",
    schedule: Schedule | None = None,
    seed: int = 1234,
    capacity: int | None = None,  # noqa: ARG001 - the length of a queue on the device, of which there is none here
) -> None:
    """Dump what functions take and give, or check them for overflow, until the program ends or `stop` is called.

    >>> register_hook(model, wrap_acc_cmp_hook)
    >>> register_hook(model, wrap_async_datadump_hook, path="./output", schedule=schedule(1, 2))

    hook: `wrap_acc_cmp_hook`, `wrap_async_datadump_hook` or `wrap_checkoverflow_hook`.
    sample: of `wrap_acc_cmp_hook`: of each tensor its first ten values, maximum, minimum and mean; else every value.
    path: of `wrap_async_datadump_hook`: the folder.
    schedule: which steps, as `step_schedule` counts them; all by default. Any function of a number will do.
    seed: for `seed_all`, which is called here.
    """
    if not isinstance(hook, HookOptions):
        raise UsageError(f"{hook!r} is no hook. Give one of {', '.join(one.value for one in HookOptions)}.")
    seed_all(seed)
    if hook is HookOptions.OVERFLOW:
        _check.add(model)
    elif hook is HookOptions.ARRAYS:
        _arrays.add(model, sample=False, schedule=schedule, path=absolute(path))
    else:
        _values.add(model, sample=sample, schedule=schedule)


def stop() -> None:
    """End every recording and check, and remove every hook. Happens by itself when the program ends."""
    for one in (_values, _arrays, _check):
        one.stop()
