"""Paddle's layers, as `hook` needs them. In files they have Paddle's own names: `linear_0`, and `linear_0.w_0`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
from paddle import nn

from astray.capture.adapters import Adapter
from astray.capture.copies import TransparentHook
from astray.capture.engine import Engine
from astray.capture.paddle.adapter import PaddleAdapter
from astray.capture.paddle.calls.wrappers import Chain, can_be_called, chains, type_name
from astray.capture.paddle.native.core import _paddle


class PaddleLayers:
    """Those of Paddle."""

    def chains(self, model: nn.Layer) -> Iterator[Chain]:
        return chains(model)

    def type_name(self, layer: nn.Layer) -> str:
        return type_name(layer)

    def is_leaf(self, chain: Chain) -> bool:
        return can_be_called(chain.inner) and all(child is None for child in chain.inner._sub_layers.values())

    def layer_name(self, layer: nn.Layer) -> str:
        return str(layer.full_name())

    def parameter_name(self, parameter: paddle.Tensor) -> str:
        return str(parameter.name)

    def adapter(self, model: nn.Layer) -> Adapter:
        return _SavingAdapter({"": model})

    def on_forward(self, model: nn.Layer, is_due: Callable[[], bool], work: Callable[[], None]) -> Any:
        """The work is done after the next backward pass: Paddle walks over a layer's hooks while it calls them."""
        return nn.Layer.register_forward_pre_hook(model, _ForwardHook(is_due, work))


class _SavingAdapter(PaddleAdapter):
    """Records gradients as they arrive. Paddle averages those of data parallel ranks before their sums can be read."""

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        engine.reads_call_gradients = False
        super().start(engine, end_step)
        if self._layers is not None:
            self._layers.parameters.sums = False


class _ForwardHook(TransparentHook):
    __slots__ = ("is_due", "work")

    def __init__(self, is_due: Callable[[], bool], work: Callable[[], None]) -> None:
        self.is_due, self.work = is_due, work

    def __call__(self, _model: nn.Layer, _inputs: tuple[Any, ...]) -> None:
        if self.is_due():
            _paddle.after_backward(self.work)
