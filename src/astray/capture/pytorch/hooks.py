"""The base of our hooks in torch, and copies of modules without them."""

from __future__ import annotations

from torch import nn

from astray.capture import copies


class TransparentHook(copies.TransparentHook):
    """A hook that copies and pickles as one that does nothing."""

    __slots__ = ()
    __torch_unserializable__ = True  # torch need not warn that a copied tensor loses it


_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
"""Where a module keeps its hooks by their numbers, and the tables in which torch keeps their options."""


class HookFreeCopies(copies.HookFreeCopies):
    """Has copies of modules made without our hooks, until `remove`."""

    def __init__(self) -> None:
        super().__init__(nn.Module, _HOOKS)
