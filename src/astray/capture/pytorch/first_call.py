"""Waits for the first call of a module in a process that may be a rank, which shows only then.

A launcher passes the rank as an argument, and torch.distributed knows it once the program has set it up. Workers of a
DataLoader are none, whatever they have inherited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook

from astray.capture.pytorch.compiled.code import NoWarning, is_compiled_graph, never_compiled
from astray.interrupts import pass_interrupt
from astray.log import logger
from astray.ranks import rank_and_world_size


class FirstCall:
    """Calls `begin` with the rank and the number of ranks, or None, once; it gives a recorder that has been started."""

    def __init__(self, begin: Callable[[tuple[int, int] | None], Any]) -> None:
        self._begin = begin
        self._process = os.getpid()
        self._no_warning = NoWarning()
        self._handle = register_module_forward_pre_hook(self._before_any_module)

    @never_compiled
    def _before_any_module(self, module: nn.Module, args: Any) -> None:
        if is_compiling() or os.getpid() != self._process or torch.utils.data.get_worker_info() is not None:
            return
        frame = sys._getframe(1)
        if is_compiled_graph(module, frame):
            return
        self._handle.remove()
        self._no_warning.remove()
        try:
            recorder = self._begin(_ranks())
            if recorder is not None:
                recorder.meet(module, args, frame)
        except Exception as error:  # noqa: BLE001 - the program must not fail because we did
            pass_interrupt(error)
            logger.warning("This process is not recorded (%s: %s).", type(error).__name__, error)


def _ranks() -> tuple[int, int] | None:
    """Which rank this process is, and of how many; None when it is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return rank_and_world_size(os.environ) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
