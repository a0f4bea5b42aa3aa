"""What all our hooks on modules and parameters have in common."""

from __future__ import annotations

import contextlib
from typing import Any


class Hook:
    """A hook that copies and pickles as one that does nothing, in words of the standard library alone.

    So a model that is deep-copied or saved whole while it is being recorded takes nothing of astray along.
    """

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn that a copied tensor loses it

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
