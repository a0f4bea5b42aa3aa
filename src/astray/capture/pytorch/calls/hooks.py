"""What all our hooks on modules and parameters have in common."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._C._dynamo import eval_frame as dynamo


class Hook:
    """A hook that copies and pickles as one that does nothing, in words of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn that a copied tensor loses it

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def watch_compilers(native: Any) -> None:
    """Tells a native part how to ask whether a compiler is at work.

    Its hooks need not go through Python then where there is none. They always do where torch has other names for it.
    """
    callback = getattr(dynamo, "get_eval_frame_callback", None)
    if callback is not None and hasattr(torch.compiler, "_is_compiling_flag"):
        native.beside_compilers(vars(torch.compiler), callback)
