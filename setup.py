"""Builds the native parts; everything else about the package is in pyproject.toml.

They are optional: without a compiler the package installs all the same, computes with numpy, observes tensors and
writes rows with Python, and launches its GPU kernels by way of Triton. They use the stable ABI, so one wheel serves
every Python from 3.10 on.
"""

import sys
import sysconfig
from typing import Any

from setuptools import Extension, setup

MSVC = sys.platform == "win32"
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has no stable ABI

ABI: dict[str, Any] = {"py_limited_api": True, "define_macros": [("Py_LIMITED_API", "0x030A0000")]} if STABLE else {}

kernels = Extension(
    "astray.stats._native",
    sources=["src/astray/stats/_native.cpp"],
    language="c++",
    optional=True,
    **ABI,
    # No contraction into fused operations: every processor must give the same bits. GNU vector types are only ever
    # inlined, so the note about how they would be passed is noise.
    extra_compile_args=["/O2", "/std:c++17"]
    if MSVC
    else ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"],
)

LAUNCHES = ["src/astray/device/_launch.h"]  # how native parts launch kernels

launch = Extension(
    "astray.device._launch",
    sources=["src/astray/device/_launch.c"],
    depends=LAUNCHES,
    optional=True,
    **ABI,
    # The CUDA driver is opened at run time: neither its headers nor its library are needed here.
    extra_compile_args=["/O2"] if MSVC else ["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
    libraries=["dl"] if sys.platform == "linux" else [],
)

ROWS = ["src/astray/store/native/_columns.h"]  # how native parts append rows

columns = Extension(
    "astray.store.native._columns",
    sources=["src/astray/store/native/_columns.c"],
    depends=ROWS,
    optional=True,
    **ABI,
    extra_compile_args=["/O2"] if MSVC else ["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
)

tensors = Extension(
    "astray.capture.pytorch._tensors",
    sources=["src/astray/capture/pytorch/_tensors.c"],
    depends=[*ROWS, *LAUNCHES],
    optional=True,
    **ABI,
    extra_compile_args=["/O2"] if MSVC else ["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
)

HOOKS = ["src/astray/capture/native/hooks.h"]  # how torch calls native hooks

gradients = Extension(
    "astray.capture.pytorch.backward._gradients",
    sources=["src/astray/capture/pytorch/backward/_gradients.c"],
    depends=HOOKS,
    optional=True,
    **ABI,
    extra_compile_args=["/O2"] if MSVC else ["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
)

TAPS = ("module", "calls", "stacks", "structure", "taking", "modules")

taps = Extension(
    "astray.capture._calls",
    sources=[f"src/astray/capture/native/{name}.c" for name in TAPS],
    depends=["src/astray/capture/native/calls.h", *HOOKS, *ROWS],
    optional=True,
    **ABI,
    extra_compile_args=["/O2"] if MSVC else ["-O2", "-g0", "-std=c11", "-fvisibility=hidden"],
)

setup(
    ext_modules=[kernels, launch, columns, tensors, gradients, taps],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
