"""Which code is torch's own machinery, whose functions and ops are no part of the user's program.

FSDP moves parameters in and out of buffers that it fills and frees behind every counter's back; compiled code runs
kernels and buffers of the compiler's own making. Their ops would be other ones in every version of torch, with memory
that nobody has filled. The run says elsewhere what compiled code hides.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType

import torch

# -- files -------------------------------------------------------------------------------------------------------------
# Where torch's own code lies. A folder ends in a separator: torchvision's name begins like torch's, too.


def torch_folder(*names: str) -> str:
    """A folder of torch's, as the names of the files in it begin."""
    return f"{Path(torch.__file__).parent.joinpath(*names)}{os.sep}"


TORCH = torch_folder()


_MACHINERY = tuple(
    torch_folder(*folder.split("/"))
    for folder in ("distributed/fsdp", "_dynamo", "_inductor", "_functorch/_aot_autograd")
)


_BETWEEN = (f"{TORCH}_compile.py", f"{torch_folder('_dynamo')}eval_frame.py")
"""Where torch goes through on its way to a dispatch mode, whoever makes the call."""


def is_machinery(code: CodeType) -> bool | None:
    """Whether code belongs to it; None for code that is only on the way."""
    file = code.co_filename
    if file in _BETWEEN:
        return None
    if file.startswith(_MACHINERY):
        return True
    compiler = sys.modules.get("torch._inductor.runtime.cache_dir_utils")  # it writes its code there before running it
    return compiler is not None and file.startswith(compiler.cache_dir())
