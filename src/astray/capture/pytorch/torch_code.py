"""The folders of torch's own code, and which of it is machinery whose functions and ops are not part of the user's
program.

FSDP moves parameters in and out of buffers that it fills and frees without changing version counters; compiled code
runs kernels and buffers that the compiler has generated. Their ops would differ in every version of torch, with memory
that has not been filled. `compiled/dynamo.py` reports what compiled code hides.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType

import torch


def torch_folder(*names: str) -> str:
    """A folder of torch with a separator at its end, since torchvision's folder has torch's as a prefix."""
    return f"{Path(torch.__file__).parent.joinpath(*names)}{os.sep}"


TORCH = torch_folder()

_MACHINERY = tuple(
    torch_folder(*folder.split("/"))
    for folder in ("distributed/fsdp", "_dynamo", "_inductor", "_functorch/_aot_autograd")
)

_BETWEEN = (f"{TORCH}_compile.py", f"{torch_folder('_dynamo')}eval_frame.py")
"""Code that every call passes through on its way to a dispatch mode, also the program's own calls."""


def is_machinery(code: CodeType) -> bool | None:
    """Whether code belongs to torch's machinery; None for code that is only on the way to a mode."""
    file = code.co_filename
    if file in _BETWEEN:
        return None
    if file.startswith(_MACHINERY):
        return True
    compiler = sys.modules.get("torch._inductor.runtime.cache_dir_utils")  # it writes its code there before running it
    return compiler is not None and file.startswith(compiler.cache_dir())
