"""The settings of Paddle itself that affect numbers. Reading them starts no device and changes nothing."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import paddle
from paddle import distributed
from paddle.base import core, framework

from astray.interrupts import pass_interrupt
from astray.process import processor_name

PACKAGES = ("paddlenlp", "paddleformers", "ppdiffusers", "paddleseg", "paddledet", "ppocr", "paddle_custom_device")
"""Packages whose version is recorded when the program has imported them: they compute something."""

FLAGS = (
    "FLAGS_cudnn_deterministic",
    "FLAGS_cudnn_exhaustive_search",
    "FLAGS_embedding_deterministic",
    "FLAGS_gemm_use_half_precision_compute_type",
    "FLAGS_use_mkldnn",
    "FLAGS_use_stride_kernel",
    "FLAGS_flash_attn_version",
)
"""Paddle's flags that change which kernels run, or how they sum."""


def settings() -> dict[str, Any]:
    """The flags that this version of Paddle has."""
    flags: dict[str, Any] = {"default_dtype": paddle.get_default_dtype()}
    for name in FLAGS:
        try:
            flags[name.removeprefix("FLAGS_")] = paddle.get_flags(name)[name]
        except ValueError as error:  # noqa: PERF203 - another version of Paddle, or one without CUDA
            pass_interrupt(error)
            continue
    return flags


def state() -> tuple[Any, ...]:
    """A cheap summary: when it changes, all flags are read again."""
    return len(sys.modules), paddle.get_default_dtype(), core.default_cpu_generator().initial_seed()


def seeds() -> dict[str, Any]:
    """The seeds that are set now. Python's random and numpy do not expose theirs."""
    return {
        "paddle": core.default_cpu_generator().initial_seed(),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
    }


def versions() -> dict[str, str]:
    """The versions of imported packages that may affect numbers."""
    by_package = {"python": platform.python_version(), "paddle": paddle.__version__}
    if paddle.is_compiled_with_cuda():
        by_package["cuda"] = str(paddle.version.cuda())
        by_package["cudnn"] = str(paddle.version.cudnn())
    for name in ("numpy", *PACKAGES):
        version = vars(sys.modules[name]).get("__version__") if name in sys.modules else None
        if isinstance(version, str):
            by_package[name] = version
    return by_package


def devices() -> dict[str, str]:
    """The processor, and the device that the program computes on."""
    names = {"cpu": processor_name()}
    place = framework._current_expected_place_()
    if not place.is_cpu_place():
        names["device"] = paddle.device.get_device()
    return names


def process() -> dict[str, Any]:
    """The number of ranks, and their communication backend."""
    if not distributed.is_initialized():
        return {"world_size": int(os.environ.get("PADDLE_TRAINERS_NUM", "1") or 1)}
    return {"world_size": distributed.get_world_size(), "backend": str(distributed.get_backend())}


def autocast() -> str:
    """Whether `auto_cast` is on, at which level and to which dtype: `O1 bfloat16`; or `off`."""
    tracer = framework._dygraph_tracer()
    level = getattr(tracer, "_amp_level", core.AmpLevel.O0)
    if tracer is None or level == core.AmpLevel.O0:
        return "off"
    return f"{str(level).rpartition('.')[2]} {tracer._amp_dtype}"
