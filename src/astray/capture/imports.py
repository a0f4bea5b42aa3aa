"""The frameworks that can be recorded, and the moment at which a program imports one. Imports none itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FRAMEWORKS = {"torch": "Module", "paddle": "Layer"}
"""Their packages, with the class of a model in `nn` of each."""

SHOWN = " or ".join(FRAMEWORKS)


def after_first_call(framework: str, begin: Callable[[tuple[int, int] | None], Any]) -> None:
    """Calls `begin` once, at the first call of a module of a framework, with the rank and the number of ranks.

    It returns a recorder that has been started, or None. The framework has been imported.
    """
    if framework == "paddle":
        from astray.capture.paddle import discovery as paddle_discovery

        paddle_discovery.FirstCall(begin)
    else:
        from astray.capture.pytorch import discovery as torch_discovery

        torch_discovery.FirstCall(begin)


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls `then()` once, after `package` is first imported; at once when it is there already. Does not import it.

    A script may set environment variables before it imports its framework: importing that first would ignore them.
    """

    def __init__(self, package: str, then: Callable[[], Any]) -> None:
        self._package = package
        self._then = then

    def install(self) -> ImportHook:
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

    def __init__(self, real: importlib.abc.Loader, then: Callable[[], Any]) -> None:
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
