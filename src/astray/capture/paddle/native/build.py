"""What `_paddle` is compiled with: C++17 against the headers and the library of the installed Paddle."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import paddle

from astray.capture.native.build import NativePart
from astray.errors import RecordError

_PADDLE = Path(paddle.__file__).parent
_OLDEST = (3, 3)

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
    version = tuple(int(part) for part in paddle.__version__.split(".")[:2] if part.isdecimal())
    if (0, 0) < version < _OLDEST:  # a build from sources may say 0.0.0
        raise RecordError(
            f"Paddle {paddle.__version__} is installed, and programs of Paddle 3.3 and newer can be recorded. Update "
            "it (pip install 'paddlepaddle>=3.3'), or record elsewhere: runs can be read and compared without it."
        )
    if sys.platform != "linux":
        raise RecordError("Programs of Paddle can be recorded on Linux alone. Runs can be read and compared here.")
    return PART.load()


if __name__ == "__main__":
    PART.built()
