"""The settings of torch itself that affect numbers. Reading them starts no device and changes nothing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from astray.interrupts import pass_interrupt
from astray.process import processor_name

PACKAGES = (
    "transformers", "accelerate", "peft", "diffusers", "timm", "flash_attn", "xformers", "triton", "deepspeed",
    "transformer_engine", "megatron.core", "apex", "bitsandbytes", "lightning", "torch_npu", "torchvision",
)  # fmt: skip
"""Packages whose version is recorded when the program has imported them: they compute something."""

_READERS: dict[str, Callable[[], Any]] = {
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "float32_matmul_precision": lambda: torch.get_float32_matmul_precision(),
    "cuda.matmul.fp32_precision": lambda: _precision("cuda", "matmul"),
    "cudnn.conv.fp32_precision": lambda: _precision("cuda", "conv"),
    "cudnn.rnn.fp32_precision": lambda: _precision("cuda", "rnn"),
    "mkldnn.matmul.fp32_precision": lambda: _precision("mkldnn", "matmul"),
    "mkldnn.conv.fp32_precision": lambda: _precision("mkldnn", "conv"),
    "fp16_reduced_precision_reduction": lambda: _allowed("_get_cublas_allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_precision_reduction": lambda: _allowed("_get_cublas_allow_bf16_reduced_precision_reduction"),
    "fp16_accumulation": lambda: torch._C._get_cublas_allow_fp16_accumulation(),
    "deterministic_algorithms": lambda: torch.are_deterministic_algorithms_enabled(),
    "cudnn.enabled": lambda: torch._C._get_cudnn_enabled(),
    "cudnn.benchmark": lambda: torch._C._get_cudnn_benchmark(),
    "cudnn.deterministic": lambda: torch._C._get_cudnn_deterministic(),
    "mkldnn.enabled": lambda: torch._C._get_mkldnn_enabled(),
    "sdpa.flash": lambda: torch._C._get_flash_sdp_enabled(),
    "sdpa.mem_efficient": lambda: torch._C._get_mem_efficient_sdp_enabled(),
    "sdpa.math": lambda: torch._C._get_math_sdp_enabled(),
    "sdpa.cudnn": lambda: torch._C._get_cudnn_sdp_enabled(),
    "threads": lambda: torch.get_num_threads(),
    "interop_threads": lambda: torch.get_num_interop_threads(),
}


def _precision(backend: str, operation: str) -> str:
    """In which precision float32 is multiplied: `ieee`, `tf32` or `bf16`."""
    precision = str(torch._C._get_fp32_precision_getter(backend, operation))
    return "ieee" if precision == "none" else precision


def _allowed(name: str) -> bool:
    flag = getattr(torch._C, name)()
    return bool(flag[0] if isinstance(flag, tuple) else flag)


def settings() -> dict[str, Any]:
    """The flags that this version of torch has. Each costs a tenth of a microsecond to read."""
    flags = {}
    for name, read in list(_READERS.items()):
        try:
            flags[name] = read()
        except AttributeError as error:  # noqa: PERF203 - another version of torch: it will not come
            pass_interrupt(error)
            del _READERS[name]
        except RuntimeError as error:  # it was set by its newer name, and the older one raises
            pass_interrupt(error)
            continue
    return flags


_POLLED: tuple[Callable[[], Any], ...] = (
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul"),
    torch._C._get_deterministic_algorithms,
    torch._C._get_cudnn_benchmark,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch.get_num_threads,
    torch.get_default_dtype,
    torch.default_generator.initial_seed,
)
"""Flags that a program is likely to change while it runs. Read once a step, so there are few."""


def state() -> tuple[Any, ...]:
    """A cheap summary: when it changes, all flags are read again."""
    return (len(sys.modules), getattr(torch.cuda, "_initialized", None), *[read() for read in _POLLED])


def seeds() -> dict[str, Any]:
    """The seeds that are set now. Python's random and numpy do not expose theirs."""
    values: dict[str, Any] = {"torch": torch.initial_seed(), "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        values["cuda"] = generator.initial_seed()
    return values


def versions() -> dict[str, str]:
    """The versions of imported packages that may affect numbers."""
    by_package = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        by_package["cuda"] = torch.version.cuda
        if torch.cuda.is_initialized() and torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            by_package["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if torch.version.hip:
        by_package["rocm"] = torch.version.hip
    for name in ("numpy", *PACKAGES):
        version = vars(sys.modules[name]).get("__version__") if name in sys.modules else None
        if isinstance(version, str):
            by_package[name] = version
    return by_package


def devices() -> dict[str, str]:
    """The processor, and the devices that the program has started to use."""
    names = {"cpu": processor_name()}
    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    if capability is not None:
        names["cpu.instructions"] = capability()
    # Asking for devices would start CUDA; a program that has not done so yet may still want to fork.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        names["cuda"] = torch.cuda.get_device_name(device)
        names["cuda.capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return names


def process() -> dict[str, Any]:
    """The number of ranks, and their communication backend."""
    if not (dist.is_available() and dist.is_initialized()):
        return {"world_size": int(os.environ.get("WORLD_SIZE", "1") or 1)}
    return {"world_size": dist.get_world_size(), "backend": str(dist.get_backend())}


_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", torch._C._get_privateuse1_backend_name())


def autocast() -> str:
    """For which devices autocast is on, and to which dtype: `cuda bfloat16`; or `off`."""
    if not torch._C._is_any_autocast_enabled():
        return "off"
    enabled = []
    for device in _AUTOCAST_DEVICES:
        try:
            if torch.is_autocast_enabled(device):
                enabled.append(f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}")
        except (RuntimeError, TypeError) as error:  # noqa: PERF203 - a device that this torch does not know
            pass_interrupt(error)
            continue
    return ", ".join(enabled) or "off"
