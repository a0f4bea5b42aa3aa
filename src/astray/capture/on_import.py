"""Does something right after a package has been imported, without importing it any earlier.

`astray run` needs this: a script may set environment variables before it imports its framework, and importing the
framework first would change what the script computes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class OnImport(importlib.abc.MetaPathFinder):
    """Calls `then()` once, after `package` is first imported; at once when it is there already."""

    def __init__(self, package: str, then: Callable[[], None]) -> None:
        self._package = package
        self._then = then

    def install(self) -> OnImport:
        if self._package in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)
        return self

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._package:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, then gives the module its real loader back."""

    def __init__(self, real: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._then()
