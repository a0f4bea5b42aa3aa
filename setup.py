"""Builds the native kernels; everything else about the package is in pyproject.toml.

The extension is optional: without a compiler the package installs all the same and computes with numpy. It uses the
stable ABI, so one wheel serves every Python from 3.10 on.
"""

import sys
import sysconfig

from setuptools import Extension, setup

MSVC = sys.platform == "win32"
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has no stable ABI

native = Extension(
    "astray.stats._native",
    sources=["src/astray/stats/_native.cpp"],
    language="c++",
    optional=True,
    py_limited_api=STABLE,
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if STABLE else [],
    # No contraction into fused operations: every processor must give the same bits. GNU vector types are only ever
    # inlined, so the note about how they would be passed is noise.
    extra_compile_args=["/O2", "/std:c++17"]
    if MSVC
    else ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"],
)

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {})
