"""Keeps torch on its fast paths for inference, which round differently from the slow ones.

A `TransformerEncoderLayer` in eval mode leaves its fast path when any module inside it has a hook; it, its encoder and
`MultiheadAttention` also leave theirs when a function mode is on. Recording must not change a bit, so there the hooks
are taken off and the mode is suspended, and the run lists what was not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from astray.capture.pytorch.calls.modes import Modes
from astray.capture.pytorch.calls.wrappers import chains
from astray.capture.pytorch.compiled.dynamo import CompileWarningFilter, never_compiled

_WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)


class InferenceFastPaths:
    """Keeps the modules of a recording that have a fast path on it.

    `add_hooks` and `remove_hooks` are for the hooks of one module; `missed` reports what was not seen.
    """

    def __init__(
        self,
        modes: Modes,
        add_hooks: Callable[[nn.Module], None],
        remove_hooks: Callable[[nn.Module], None],
        missed: Callable[[nn.Module], None],
    ) -> None:
        self._modes = modes
        self._add_hooks = add_hooks
        self._remove_hooks = remove_hooks
        self._missed = missed
        self._layers: list[tuple[weakref.ref[nn.Module], bool]] = []  # whether the hooks are in place
        self._handles: list[Any] = []

    def add(self, module: nn.Module) -> None:
        """A module has been attached. Its hooks are in place."""
        if isinstance(module, nn.TransformerEncoderLayer):
            self._layers.append((weakref.ref(module), True))
        if isinstance(module, _WITH_FAST_PATH) and not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, always_call=True),
                CompileWarningFilter(),
            ]

    def check(self) -> None:
        """Removes the hooks of layers that are in eval mode now, and adds them again for training."""
        for index, (reference, hooked) in enumerate(self._layers):
            layer = reference()
            if layer is None or layer.training == hooked:
                continue
            self._layers[index] = (reference, layer.training)
            for module in (link for chain in chains(layer) for link in chain.modules):
                (self._add_hooks if layer.training else self._remove_hooks)(module)
            if not layer.training:
                self._missed(layer)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()

    @never_compiled
    def _before(self, module: nn.Module, _args: Any) -> None:
        if is_compiling() or not isinstance(module, _WITH_FAST_PATH):
            return
        if not module.training and not torch.is_grad_enabled():
            self._modes.suspend(module)

    @never_compiled
    def _after(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if not is_compiling() and isinstance(module, _WITH_FAST_PATH):
            self._modes.resume(module)
