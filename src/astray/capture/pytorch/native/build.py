"""Builds the part of astray that is compiled against torch's C++ headers, for the installed torch, and loads it.

It is compiled when something is recorded for the first time, which takes ten seconds, and kept in a cache: a file for
each version of its sources, torch, Python and flags. `make` builds it in advance. Only recording needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from astray.errors import RecordError

NAME = "astray.capture.pytorch._torch"

_SOURCES = Path(__file__).parent
_PACKAGE = Path(__file__).parents[3]
_HEADERS = tuple(  # of the parts it works with
    _PACKAGE / name
    for name in ("device/_launch.h", "store/run_format/_columns.h", "store/run_format/ref.h", "stats/_measure.h")
)
_TORCH = Path(torch.__file__).parent
_COMPILERS = ("cl",) if sys.platform == "win32" else ("c++", "g++", "clang++")
_SHOWN = 6  # lines of what a compiler says: the first error, and where it is

logger = logging.getLogger("astray")


def load() -> ModuleType:
    """The compiled module, built if it has to be. Raises a RecordError where it cannot be."""
    known = sys.modules.get(NAME)
    if known is not None:
        return known
    path = built()
    try:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise RecordError(
            f"What astray has built for torch {torch.__version__} cannot be loaded: {error}. Delete {path} to have it "
            "built again."
        ) from error
    sys.modules[NAME] = module
    return module


def built() -> Path:
    """The path of the compiled module, which is built if it does not exist."""
    path = _cache() / f"torch-{_key()}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():  # else another process has built it while this one waited
                _build(path)
    except OSError as error:
        raise RecordError(
            f"{path.parent} cannot be written ({error.strerror}), where astray keeps what it builds for torch "
            f"{torch.__version__}. Set ASTRAY_CACHE to a folder that can."
        ) from error
    return path


def _build(path: Path) -> None:
    compiler = _compiler()
    logger.warning("building the part of astray that speaks with torch %s (once, 10 to 30 s)", torch.__version__)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)  # complete before another process sees it under its name
        command = [*compiler, *_flags(), str(_SOURCES / "module.cpp"), *_output(made), *_libraries()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise RecordError(
                f"The part of astray that speaks with torch {torch.__version__} could not be built by "
                f"{' '.join(compiler)}:\n{_first_errors(done.stdout + done.stderr)}\nInstall a C++17 compiler and the "
                "headers of Python (on Debian: g++ and python3-dev), or name another compiler with CXX."
            )
        with contextlib.suppress(PermissionError):  # Windows: another process has built it, and uses it already
            made.replace(path)


def _first_errors(said: str) -> str:
    lines = said.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line), 0)
    return "\n".join(f"    {line[:200]}" for line in lines[first : first + _SHOWN])


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [named] if named else _COMPILERS:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    looked = f"{named!r}, which CXX names," if named else ", ".join(_COMPILERS)
    raise RecordError(
        f"To record, astray builds a part of itself for torch {torch.__version__}, and finds no C++ compiler: {looked} "
        "cannot be run. Install one (on Debian: apt-get install g++), or name it with CXX. Runs that were recorded "
        "elsewhere can be read, compared and shown without it."
    )


def _flags() -> list[str]:
    folders = [_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include"]
    folders.append(Path(sysconfig.get_paths()["include"]))
    if sys.platform == "win32":
        return [
            "/nologo",
            "/O2",
            "/std:c++17",
            "/EHsc",
            "/MD",
            "/LD",
            "/permissive-",
            *(f"/I{folder}" for folder in folders),
        ]
    flags = ["-O2", "-std=c++17", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    if sys.platform == "darwin":  # where hidden types of exceptions would not be known to torch
        flags += ["-bundle", "-undefined", "dynamic_lookup"]
    else:
        flags += ["-shared", "-fvisibility=hidden"]
    return [*flags, *(part for folder in folders for part in ("-isystem", str(folder)))]


def _output(path: Path) -> list[str]:
    return [f"/Fe{path}"] if sys.platform == "win32" else ["-o", str(path)]


def _libraries() -> list[str]:
    folder, names = _TORCH / "lib", ("torch_python", "torch_cpu", "c10")
    if sys.platform == "win32":
        python = Path(sys.base_prefix, "libs")
        return ["/link", f"/LIBPATH:{folder}", f"/LIBPATH:{python}", *(f"{name}.lib" for name in names)]
    return [f"-L{folder}", *(f"-l{name}" for name in names)]


def _key() -> str:
    """A hash of everything that the compiled module depends on."""
    parts = [torch.__version__, str(torch.version.git_version), sys.version, str(sysconfig.get_config_var("SOABI"))]
    parts += [sysconfig.get_platform(), *_flags()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in [*sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]), *_HEADERS]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _cache() -> Path:
    named = os.environ.get("ASTRAY_CACHE")
    if named:
        return Path(named)
    around = os.environ.get("XDG_CACHE_HOME")
    return (Path(around) if around else Path.home() / ".cache") / "astray"


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds a lock between processes. Without `fcntl` several may build at once, and the last one counts."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    built()
