"""Builds the part of astray that records, for the installed framework, and loads it.

It is compiled when something is recorded for the first time, which takes some seconds, and kept in a cache: a file for
each version of its sources, framework, Python and flags. `make` builds it in advance. Only recording needs it.
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
from typing import NamedTuple

from astray.errors import RecordError

_SHARED = Path(__file__).parent
_PACKAGE = Path(__file__).parents[2]
_HEADERS = tuple(  # of the parts it works with
    _PACKAGE / name
    for name in ("device/_launch.h", "store/run_format/_columns.h", "store/run_format/ref.h", "stats/_measure.h")
)
_COMPILERS = ("cl",) if sys.platform == "win32" else ("c++", "g++", "clang++")
_SHOWN = 6  # lines of what a compiler says: the first error, and where it is

logger = logging.getLogger("astray")


class NativePart(NamedTuple):
    """The module of one adapter: its name, its sources, and what it is compiled with.

    `framework` is what it is built for, with its version, as messages say it, and `takes` how long that may take.
    `folder` holds module.cpp and its headers. `includes` and `library_folder` are those of the framework, whose
    `libraries` are linked; `identity` is everything else that the compiled module depends on.
    """

    name: str
    framework: str
    takes: str
    folder: Path
    includes: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    library_folder: Path | None = None
    libraries: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """The compiled module, built if it has to be. Raises a RecordError where it cannot be."""
        known = sys.modules.get(self.name)
        if known is not None:
            return known
        path = self.built()
        try:
            loader = importlib.machinery.ExtensionFileLoader(self.name, str(path))
            spec = importlib.util.spec_from_file_location(self.name, path, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise RecordError(
                f"What astray has built for {self.framework} cannot be loaded: {error}. Delete {path} to have it "
                "built again."
            ) from error
        sys.modules[self.name] = module
        return module

    def built(self) -> Path:
        """The path of the compiled module, which is built if it does not exist."""
        named = self.framework.partition(" ")[0].lower()
        path = cache_folder() / f"{named}-{self._key()}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
        if path.exists():
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".lock")):
                if not path.exists():  # else another process has built it while this one waited
                    self._build(path)
        except OSError as error:
            raise RecordError(
                f"{path.parent} cannot be written ({error.strerror}), where astray keeps what it builds for "
                f"{self.framework}. Set ASTRAY_CACHE to a folder that can."
            ) from error
        return path

    def _build(self, path: Path) -> None:
        compiler = self._compiler()
        logger.warning("building the part of astray that speaks with %s (once, %s)", self.framework, self.takes)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)  # complete before another process sees it under its name
            source = str(self.folder / "module.cpp")
            command = [*compiler, *self._flags(), *self._quoted(), source, *_output(made), *self._libraries()]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode:
                raise RecordError(
                    f"The part of astray that speaks with {self.framework} could not be built by "
                    f"{' '.join(compiler)}:\n{_first_errors(done.stdout + done.stderr)}\nInstall a C++17 compiler and "
                    "the headers of Python (on Debian: g++ and python3-dev), or name another compiler with CXX."
                )
            with contextlib.suppress(PermissionError):  # Windows: another process has built it, and uses it already
                made.replace(path)

    def _compiler(self) -> list[str]:
        named = os.environ.get("CXX")
        for command in [named] if named else _COMPILERS:
            words = shlex.split(command)
            if words and shutil.which(words[0]):
                return words
        looked = f"{named!r}, which CXX names," if named else ", ".join(_COMPILERS)
        raise RecordError(
            f"To record, astray builds a part of itself for {self.framework}, and finds no C++ compiler: {looked} "
            "cannot be run. Install one (on Debian: apt-get install g++), or name it with CXX. Runs that were recorded "
            "elsewhere can be read, compared and shown without it."
        )

    def _flags(self) -> list[str]:
        folders = [*self.includes, Path(sysconfig.get_paths()["include"])]
        if sys.platform == "win32":
            flags = ["/nologo", "/O2", "/std:c++17", "/EHsc", "/MD", "/LD", "/permissive-", *self.flags]
            return [*flags, *(f"/I{folder}" for folder in folders)]
        flags = ["-O2", "-std=c++17", "-fPIC", *self.flags]
        if sys.platform == "darwin":  # where hidden types of exceptions would not be known to torch
            flags += ["-bundle", "-undefined", "dynamic_lookup"]
        else:
            flags += ["-shared", "-fvisibility=hidden"]
        return [*flags, *(part for folder in folders for part in ("-isystem", str(folder)))]

    def _quoted(self) -> list[str]:
        """Where our own headers are found, after all others: on some systems python.h is Python.h too."""
        own = (self.folder, _SHARED, _PACKAGE)
        if sys.platform == "win32":
            return [f"/I{folder}" for folder in own]
        return [part for folder in own for part in ("-iquote", str(folder))]

    def _libraries(self) -> list[str]:
        folder = self.library_folder
        if sys.platform == "win32":
            python = Path(sys.base_prefix, "libs")
            folders = [f"/LIBPATH:{one}" for one in (folder, python) if one is not None]
            return ["/link", *folders, *(f"{name}.lib" for name in self.libraries)]
        return [*([f"-L{folder}"] if folder is not None else []), *(f"-l{name}" for name in self.libraries)]

    def _key(self) -> str:
        """A hash of everything that the compiled module depends on."""
        parts = [self.framework, *self.identity, sys.version, str(sysconfig.get_config_var("SOABI"))]
        parts += [sysconfig.get_platform(), *self._flags()]
        digest = hashlib.sha256("\0".join(parts).encode())
        sources = [path for folder in (self.folder, _SHARED) for path in (*folder.glob("*.h"), *folder.glob("*.cpp"))]
        for source in [*sorted(sources), *_HEADERS]:
            digest.update(source.read_bytes())
        return digest.hexdigest()[:20]


def cache_folder() -> Path:
    """Where compiled modules are kept."""
    named = os.environ.get("ASTRAY_CACHE")
    if named:
        return Path(named)
    around = os.environ.get("XDG_CACHE_HOME")
    return (Path(around) if around else Path.home() / ".cache") / "astray"


def _first_errors(said: str) -> str:
    lines = said.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line), 0)
    return "\n".join(f"    {line[:200]}" for line in lines[first : first + _SHOWN])


def _output(path: Path) -> list[str]:
    return [f"/Fe{path}"] if sys.platform == "win32" else ["-o", str(path)]


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
