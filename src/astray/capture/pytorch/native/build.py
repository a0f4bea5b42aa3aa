"""What `_torch` is compiled with: C++17 against the headers of the installed torch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch

from astray.capture.native.build import NativePart

_TORCH = Path(torch.__file__).parent

PART = NativePart(
    name="astray.capture.pytorch._torch",
    framework=f"torch {torch.__version__}",
    takes="10 to 30 s",
    folder=Path(__file__).parent,
    includes=(_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include"),
    flags=(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",),
    library_folder=_TORCH / "lib",
    libraries=("torch_python", "torch_cpu", "c10"),
    identity=(str(torch.version.git_version),),
)


def load() -> ModuleType:
    """The compiled module, built if it has to be. Raises a RecordError where it cannot be."""
    return PART.load()


if __name__ == "__main__":
    PART.built()
