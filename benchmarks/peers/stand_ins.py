"""Empty modules in place of packages that msprobe imports for its plots, spreadsheets and TensorBoard.

A machine with a GPU often has torch and little else, and dumping uses none of them. Only what cannot be imported is
replaced, and what stands in does nothing but be there: whatever used it would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("einops", "matplotlib", "openpyxl", "pandas", "psutil", "pytz", "tensorboard", "tqdm")


class _Module(ModuleType):
    """Has every attribute that is asked of it: an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {})
        setattr(self, name, found)
        return found


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        wanted = any(name == package or name.startswith(f"{package}.") for package in self._names)
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, _module: ModuleType) -> None: ...


def install() -> None:
    """Puts stand-ins in for those of the packages that are not there, and says so on the error stream."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        print(f"not installed, replaced by empty modules: {', '.join(missing)}", file=sys.stderr)
        # torch's own writer looks at TensorBoard's version before it is imported, so it is replaced as a whole.
        writer = ["torch.utils.tensorboard"] if "tensorboard" in missing else []
        sys.meta_path.insert(0, _StandIns(missing + writer))
