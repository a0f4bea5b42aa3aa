"""What `_paddle` is compiled with: C++17 against the headers and the library of the installed Paddle."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import paddle

from astray.capture.native.build import NativePart

_PADDLE = Path(paddle.__file__).parent

PART = NativePart(
    name="astray.capture.paddle._paddle",
    framework=f"Paddle {paddle.__version__}",
    takes="a few seconds",
    folder=Path(__file__).parent,
    includes=(_PADDLE / "include", _PADDLE / "include" / "third_party"),
    library_folder=_PADDLE / "base",
    libraries=(":libpaddle.so",),
    identity=(str(paddle.version.commit),),
)


def load() -> ModuleType:
    """The compiled module, built if it has to be. Raises a RecordError where it cannot be."""
    return PART.load()


if __name__ == "__main__":
    PART.built()
