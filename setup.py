"""Builds the native parts and the page, and packs the documentation; everything else is in pyproject.toml.

The native parts are optional: without a compiler the package installs all the same, computes with numpy, writes rows
with Python, and launches its GPU kernels by way of Triton. They use the stable ABI, so one wheel serves every Python
from 3.10 on. So is the page: without Node there is none, and `astray view` says so. What records, and speaks with
torch's C++, is built on first use, for the torch that is there (capture/pytorch/native/build.py).
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

MSVC = sys.platform == "win32"
STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Python has no stable ABI

ABI: dict[str, Any] = {"py_limited_api": True, "define_macros": [("Py_LIMITED_API", "0x030A0000")]} if STABLE else {}

# The flags of Python itself may ask for debugging information; it is kept for who names a compiler with it.
BARE = [] if " -g" in os.environ.get("CXX", "") else ["-g0"]
C = ["/O2"] if MSVC else ["-O2", *BARE, "-std=c11", "-fvisibility=hidden"]
CXX = ["/O2", "/std:c++17", "/EHsc"] if MSVC else ["-O2", *BARE, "-std=c++17", "-fvisibility=hidden"]

kernels = Extension(
    "astray.stats._native",
    sources=["src/astray/stats/native/module.cpp"],  # one unit: everything is inlined below a wrapper per processor
    depends=[path.as_posix() for path in sorted(Path("src/astray/stats").glob("**/*.h"))],
    language="c++",
    optional=True,
    **ABI,
    # No contraction into fused operations: every processor must give the same bits. GNU vector types are only ever
    # inlined, so the note about how they would be passed is noise.
    extra_compile_args=CXX if MSVC else ["-O3", *CXX[1:], "-ffp-contract=off", "-Wno-psabi"],
)

LAUNCHES = "device/_launch.h"  # how native parts launch kernels
ROWS = "store/run_format/_columns.h"  # how native parts append rows


def part(name: str, *sources: str, headers: tuple[str, ...] = (), libraries: tuple[str, ...] = ()) -> Extension:
    """A native part in C: its module, and its files under the package."""
    return Extension(
        f"astray.{name}",
        sources=[f"src/astray/{source}" for source in sources],
        depends=[f"src/astray/{header}" for header in headers],
        libraries=list(libraries),
        optional=True,
        extra_compile_args=C,
        **ABI,
    )


# The CUDA driver is opened at run time: neither its headers nor its library are needed here.
launch = part("device._launch", "device/_launch.c", headers=(LAUNCHES,), libraries=("dl",) * (sys.platform == "linux"))
columns = Extension(
    "astray.store.run_format._columns",
    sources=["src/astray/store/run_format/_columns.cpp"],
    depends=[f"src/astray/{header}" for header in (ROWS, "store/run_format/ref.h", "stats/_measure.h")],
    language="c++",
    optional=True,
    **ABI,
    extra_compile_args=CXX,
)


class BuildPython(build_py):
    """Builds the page before the package's files are gathered, and lays the documentation beside them.

    An editable install needs no copy of docs/: `astray help` reads it where it is written.
    """

    def run(self) -> None:
        script = Path("page/build.py")
        if script.exists() and subprocess.run([sys.executable, str(script)], check=False).returncode:
            self.warn("astray is installed without its page; `astray view` and `compare --html` need it.")
        super().run()
        if not self.editable_mode:
            for source, target in self._pages():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        pages = [] if self.editable_mode else [target for _, target in self._pages()]
        return [*super().get_outputs(include_bytecode), *pages]

    def _pages(self) -> list[tuple[str, str]]:
        """The pages of the documentation with their order, and where each lies in the package."""
        home = Path(self.build_lib) / "astray" / "docs"
        docs = Path("docs")
        return [
            (str(page), str(home / page.relative_to(docs))) for page in sorted([*docs.rglob("*.md"), docs / "nav.yml"])
        ]


setup(
    cmdclass={"build_py": BuildPython},
    ext_modules=[kernels, launch, columns],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if STABLE else {},
)
