"""Paddle's layers, as `hook` needs them. In files they have Paddle's own names: `linear_0`, and `linear_0.w_0`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import paddle
from paddle import nn

from astray.capture.adapters import Adapter
from astray.capture.copies import TransparentHook
from astray.capture.engine import Engine
from astray.capture.paddle.adapter import PaddleAdapter
from astray.capture.paddle.calls.wrappers import Chain, can_be_called, chains, type_name
from astray.capture.paddle.gradients import in_backward
from astray.capture.paddle.native.core import OpenCall, Site, _paddle
from astray.records import ROOT


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

    def on_forward(self, model: nn.Layer, is_due: Callable[[], bool], work: Callable[[], None]) -> contextlib.ExitStack:
        """The work is done after the next backward pass: Paddle walks over a layer's hooks while it calls them."""
        handles = contextlib.ExitStack()
        first = next((chain.inner for chain in chains(model) if self.is_leaf(chain)), model)  # for pipelines
        for layer in {id(layer): layer for layer in (model, first)}.values():
            handles.callback(nn.Layer.register_forward_pre_hook(layer, _ForwardHook(is_due, work)).remove)
        return handles


class _SavingAdapter(PaddleAdapter):
    """Records gradients as they arrive. Paddle averages those of data parallel ranks before their sums can be read."""

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        engine.reads_call_gradients = False
        super().start(engine, end_step)
        engine.enter = _ForwardCount(engine)  # type: ignore[method-assign]
        if self._layers is not None:
            self._layers.parameters.sums = False


class _ForwardCount:
    """Begins a micro step with each forward of the model: stands before the engine's `enter`.

    Pipelines call `forward` of the model themselves, so that each layer right in it is outermost. Then a layer that
    comes again begins the next forward.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._enter = engine.enter
        self._called: set[str] = set()  # the outermost layers of this forward

    def __call__(self, site: Site, frame: FrameType | None, **named: Any) -> OpenCall:
        engine = self._engine
        if in_backward():
            named["recompute"] = True
        if site.kind != "module" or named.get("recompute") or engine.is_in_module:
            return self._enter(site, frame, **named)
        begins = not self._called or site.name == ROOT or site.name in self._called
        if begins:
            self._called.clear()
        self._called.add(site.name)
        return self._enter(site, frame, **named, micro=None if begins else engine.latest_micro)


class _ForwardHook(TransparentHook):
    __slots__ = ("is_due", "work")

    def __init__(self, is_due: Callable[[], bool], work: Callable[[], None]) -> None:
        self.is_due, self.work = is_due, work

    def __call__(self, _model: nn.Layer, _inputs: tuple[Any, ...]) -> None:
        if self.is_due():
            _paddle.after_backward(self.work)
