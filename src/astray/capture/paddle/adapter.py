"""The Paddle side of a recording: versions, devices, and putting the hooks in place and removing them.

The recorder calls `PaddleAdapter`, which puts the other modules of this package in place.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import paddle
from paddle import distributed, nn
from paddle.base import core

from astray.capture.adapters import TensorReader
from astray.capture.engine import Engine
from astray.capture.paddle.calls.catalogue import Catalogue
from astray.capture.paddle.calls.collectives import CollectiveCapture
from astray.capture.paddle.calls.functions import FunctionCapture, WatchedWriters
from astray.capture.paddle.calls.layers import LayerCapture
from astray.capture.paddle.calls.static_programs import StaticPrograms
from astray.capture.paddle.calls.wrappers import raw_names
from astray.capture.paddle.discovery import ModelDiscovery, StepDetector
from astray.capture.paddle.native.core import OpenCall, _paddle
from astray.capture.paddle.optimizer_steps import OptimizerCapture
from astray.capture.paddle.patches import LossLabels
from astray.capture.paddle.tensors import PaddleReader
from astray.capture.paddle.unobserved import Unobserved
from astray.capture.saved_values import SavedValues
from astray.capture.settings import Settings
from astray.errors import RecordError
from astray.records import Spelling


class PaddleAdapter:
    """Records Paddle models. Without models, it finds those of the program by itself, and where its steps end.

    `detects_steps`: it finds out where steps end though models are given. `discovers`: it also finds layers in none of
    them.
    """

    framework = "paddle"
    native: Any = _paddle
    internal: tuple[str, ...] = (str(Path(paddle.__file__).parent),)

    def __init__(
        self, models: Mapping[str, nn.Layer] | None, *, detects_steps: bool = False, discovers: bool = False
    ) -> None:
        self.reader: TensorReader = PaddleReader()
        self._models = models
        self._layers: LayerCapture | None = None
        self._discovery: ModelDiscovery | None = None
        self._detects_steps = detects_steps or models is None
        self._discovers = discovers or models is None
        self.spell: Callable[[FrameType], Spelling | None] | None = None
        self._step_detector: StepDetector | None = None

    def versions(self) -> dict[str, str]:
        versions = {"paddle": paddle.__version__, "numpy": np.__version__}
        if paddle.is_compiled_with_cuda():
            versions["cuda"] = str(paddle.version.cuda())
        return versions

    def devices(self) -> list[str]:
        threads = f"cpu ({platform.machine()})"
        device = paddle.device.get_device()
        return [threads] if device.startswith("cpu") else [threads, device]

    def seed(self) -> int | None:
        """The seed that is set now. A program that has only just imported Paddle will still set its own."""
        return None if self._models is None else int(core.default_cpu_generator().initial_seed())

    def raw_names(self) -> dict[str, str]:
        """The sites of layers in models that are wrapped, with their names in Paddle: `_layers.head` for `head`."""
        return raw_names(dict(self._models or {}))

    def rank_and_world_size(self) -> tuple[int, int] | None:
        """As paddle.distributed knows it; None while it is not set up."""
        if not distributed.is_initialized():
            return None
        return distributed.get_rank(), distributed.get_world_size()

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        if engine.settings.perturb is not None:  # as a noise run it would say that nothing rounds
            raise RecordError(
                "perturb= works with PyTorch so far, and this is a program of Paddle. Leave it out; a recording with "
                "another number of threads, or from another device, can be the noise run too."
            )
        self._engine = engine
        self._gradients = _paddle.LiveGradients(engine)
        everything = self._models is None
        self._writers = writers = WatchedWriters(engine)
        self._layers = LayerCapture(engine, self._gradients, lambda: writers.writes)
        self._saved = SavedValues(engine, _paddle, paddle.Tensor, _tensor, self._watch_saved)
        self._functions = FunctionCapture(engine, self._gradients)
        self._static_programs = StaticPrograms(engine, self._nothing_replaced)
        self._collectives = CollectiveCapture(engine)
        self._loss_labels = LossLabels(engine)
        self._optimizers = OptimizerCapture(
            engine, self._layers.parameters, self._layers.setup, self._stepped, everything=everything
        )
        if self._detects_steps:
            self._step_detector = StepDetector(engine, end_step, lambda: self._optimizers.steps)
        for label, model in (self._models or {}).items():
            self._layers.attach(model, label)
        if self._discovers:
            self._discovery = ModelDiscovery(engine, self._layers, self.update_hooks, self._models or {})
        self._layers.setup.start(seeded=not everything)
        engine.on_outermost = self._layers.setup.outermost
        self.apply(engine.settings)

    @contextlib.contextmanager
    def _nothing_replaced(self) -> Iterator[None]:
        """Functions and the call of layers are Paddle's own, inside the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._functions.put_back())
            if self._discovery is not None:
                stack.enter_context(self._discovery.put_back())
            yield

    def _stepped(self, optimizer: Any) -> None:
        if self._step_detector is not None:
            self._step_detector.stepped(optimizer)

    def apply(self, settings: Settings) -> None:
        """Observes at the levels these settings ask for."""
        self._functions.use(Catalogue(settings.functions) if "function" in settings.level else None)
        if "op" in settings.level:
            self._engine.missed("calls of ops", 'Paddle\'s functions are its ops: level="function" has them')
        self.update_hooks()

    def update_hooks(self) -> None:
        """Puts the hooks in place that the engine needs from now on, and removes the others."""
        has_begun = self._discovery is None or self._discovery.has_found
        self._functions.switch(self._engine.listening and has_begun)
        self._collectives.records = self._engine.listening and has_begun
        if self._layers is not None:
            self._layers.set_listening(self._engine.listening)

    def next_step(self) -> None:
        """Ends the step: gradients that are still being summed are written as they are."""
        self._gradients.finish()
        self._collectives.poll()
        self._optimizers.patch_new_classes()
        if self._layers is not None:
            self._layers.next_step()

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        with Unobserved():
            self._saved.save(name, value, gradient, frame)

    def _watch_saved(self, call: OpenCall, outputs: list[tuple[str, paddle.Tensor]]) -> None:
        self._gradients.watch(call, self._gradients.edges([]), outputs)

    def module_called(self, module: Any, args: Any, frame: FrameType) -> None:
        if self._discovery is not None:
            self._discovery.layer_called(module, args, {}, frame)

    def let_program_end_steps(self) -> None:
        """From now on the program says where steps end."""
        if self._step_detector is not None:
            self._step_detector.let_program_end_steps()

    def stop(self) -> None:
        """Removes everything, each part even if a signal handler raises while another is being removed."""
        parts: list[Callable[[], object]] = []
        if self._discovery is not None:
            parts.append(self._discovery.remove)
        if self._step_detector is not None:
            parts.append(self._step_detector.remove)
        if self._layers is not None:
            parts += [self._optimizers.remove, self._writers.remove, self._collectives.remove]
            parts += [self._static_programs.remove, self._functions.remove, self._loss_labels.remove]
            parts += [self._layers.setup.stop]
            parts += [self._gradients.finish, self._gradients.remove, self._layers.detach]
        with contextlib.ExitStack() as stopping:
            for part in reversed(parts):
                stopping.callback(part)


def _tensor(value: Any) -> paddle.Tensor:
    """A number or an array as a tensor."""
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        value = float(value)
    return paddle.to_tensor(np.array(value), place=paddle.CPUPlace())  # a copy: the program may write into its own
