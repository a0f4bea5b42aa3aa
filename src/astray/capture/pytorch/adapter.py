"""The PyTorch side of a recording: versions, devices, and putting the hooks in place and removing them.

The recorder calls `PyTorchAdapter`, which puts the other modules of this package in place.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import numpy
import numpy as np
import torch
from torch import nn
from torch._C import DisableTorchFunction

from astray.capture.adapters import TensorReader
from astray.capture.engine import Engine
from astray.capture.pytorch.calls.catalogue import Catalogue
from astray.capture.pytorch.calls.collectives import PendingCollectives, unseen_collectives
from astray.capture.pytorch.calls.functions import FunctionMode
from astray.capture.pytorch.calls.modes import Modes
from astray.capture.pytorch.calls.modules import ModuleCapture
from astray.capture.pytorch.calls.ops import OpMode
from astray.capture.pytorch.calls.sites import FunctionSites
from astray.capture.pytorch.calls.spelling import spelling_of
from astray.capture.pytorch.calls.wrappers import raw_names
from astray.capture.pytorch.discovery import ModelDiscovery, StepDetector
from astray.capture.pytorch.experiments.grafting import Grafts
from astray.capture.pytorch.experiments.perturbation import PerturbedInputs
from astray.capture.pytorch.gradients import InputEdges, LastNodes, LiveGradients, NodeOrigins
from astray.capture.pytorch.native.core import OpenCall, _torch
from astray.capture.pytorch.optimizer_steps import OptimizerCapture
from astray.capture.pytorch.patches import CudaGraphReplays, LossLabels
from astray.capture.pytorch.tensors import TorchReader
from astray.capture.pytorch.torch_code import TORCH
from astray.capture.saved_values import SavedValues
from astray.capture.settings import Settings
from astray.interrupts import pass_interrupt
from astray.process import rank_and_world_size
from astray.records import Spelling


class PyTorchAdapter:
    """Records PyTorch models. Without models, it finds those of the program by itself, and where its steps end.

    `detects_steps`: it finds out where steps end though models are given. `discovers`: it also finds modules in none of
    them. `spelled`: it records how functions were called, and the gradients of their last nodes.
    """

    framework = "torch"
    native: Any = _torch
    internal: tuple[str, ...] = (TORCH,)

    def __init__(
        self,
        models: Mapping[str, nn.Module] | None,
        *,
        detects_steps: bool = False,
        discovers: bool = False,
        spelled: bool = False,
    ) -> None:
        self.reader: TensorReader = TorchReader()
        self._models = models
        self._modules: ModuleCapture | None = None
        self._discovery: ModelDiscovery | None = None
        self._detects_steps = detects_steps
        self._discovers = discovers
        self.spell: Callable[[FrameType], Spelling | None] | None = spelling_of if spelled else None
        self._step_detector: StepDetector | None = None
        self._perturbation: PerturbedInputs | None = None
        self._grafts: Grafts | None = None
        self._unseen_noted = False

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__, "numpy": numpy.__version__}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        return versions

    def devices(self) -> list[str]:
        threads = f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
        # Asking for devices would start CUDA; a program that has not done so yet may still want to fork.
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return [threads]
        return [threads, *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]

    def seed(self) -> int | None:
        """The seed that is set now. A program that has only just imported torch will still set its own."""
        return None if self._models is None else torch.initial_seed()

    def raw_names(self) -> dict[str, str]:
        """The sites of modules in models that are wrapped, with their names in torch: `module.head` for `head`."""
        return raw_names(self._models or {})

    def rank_and_world_size(self) -> tuple[int, int] | None:
        """As torch.distributed knows it; None while it is not set up."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        self._gradients = LiveGradients()
        self._last_nodes = LastNodes(self._gradients)
        self._origins = NodeOrigins()
        self._function_sites = FunctionSites(engine, self._origins)
        self._modes = Modes()
        self._modules = ModuleCapture(engine, self._gradients, self._modes, self._origins)
        self._pending = PendingCollectives(engine)
        self._saved = SavedValues(engine, _torch, torch.Tensor, _tensor, self._watch_saved)
        self._loss_labels = LossLabels(engine)
        self._graph_replays = CudaGraphReplays(engine)
        self._graph_replays.start()
        self._engine = engine
        # Before `ModelDiscovery`, which ends the step in a hook of the same kind: hooks are called in their order.
        everything = self._models is None
        self._optimizers = OptimizerCapture(
            engine, self._modules.parameters, self._modes, self._modules.setup, everything=everything
        )
        seed = engine.settings.perturb
        if (
            seed is not None
        ):  # before `ModelDiscovery` too, which records the first call of a model with what it is given
            self._perturbation = PerturbedInputs(engine, self._modules, seed, everything=everything)
        if engine.settings.graft:
            rank, _ = self.rank_and_world_size() or rank_and_world_size(os.environ)
            self._grafts = Grafts(engine, engine.settings.graft, rank)
            self._modules.graft(self._grafts)
        if self._models is None:
            self._discovery = ModelDiscovery(engine, self._modules, end_step, self.update_hooks)
        else:
            for label, model in self._models.items():
                self._modules.attach(model, label)
            self._step_detector = StepDetector(engine, end_step) if self._detects_steps else None
            if self._discovers:
                self._discovery = ModelDiscovery(engine, self._modules, end_step, self.update_hooks, self._models)
                self._discovery.let_program_end_steps()
        self._modules.setup.start(seeded=not everything)
        engine.on_outermost = self._modules.setup.outermost
        self.apply(engine.settings)

    def apply(self, settings: Settings) -> None:
        """Observes at the levels these settings ask for."""
        modes: list[FunctionMode | OpMode] = []
        if "function" in settings.level:
            catalogue = Catalogue(settings.functions)
            gradients = self._gradients if self.spell is None else self._last_nodes
            modes.append(FunctionMode(self._engine, gradients, self._function_sites, catalogue, self._pending))
        if "op" in settings.level:
            modes.append(OpMode(self._engine, self._function_sites, settings.functions))
        self._origins.wanted = bool(modes)
        for mode in modes:
            mode.graft(self._grafts)
        self._modes.use([*modes])
        self.update_hooks()

    def update_hooks(self) -> None:
        """Puts the hooks and modes in place that the engine needs from now on, and removes the others."""
        has_begun = self._discovery is None or self._discovery.has_found
        self._modes.switch(self._engine.listening and has_begun)
        if self._modules is not None:
            self._modules.set_listening(self._engine.listening)

    def next_step(self) -> None:
        """Ends the step: gradients that are still being summed are written as they are."""
        self._gradients.finish()
        self._last_nodes.finish()
        self._pending.poll()
        self._note_unseen()
        self._origins.clear()
        if self._perturbation is not None:
            self._perturbation.next_step()
        if self._grafts is not None:
            self._grafts.next_step()
        if self._modules is not None:
            self._modules.next_step()

    def _note_unseen(self) -> None:
        """Says once, when there are several processes, which collectives torch makes without calling a mode."""
        if self._unseen_noted or "function" not in self._engine.settings.level or self.rank_and_world_size() is None:
            return
        self._unseen_noted = True
        for name in unseen_collectives():
            why = "this version of torch makes them without telling a mode"
            self._engine.missed(f"calls of torch.distributed.{name}", why)

    def save(self, name: str, value: Any, gradient: bool, frame: FrameType | None) -> None:
        with DisableTorchFunction(), torch._C._DisableTorchDispatch():  # what is done here is not part of the program
            self._saved.save(name, value, gradient, frame)

    def _watch_saved(self, call: OpenCall, outputs: list[tuple[str, torch.Tensor]]) -> None:
        self._gradients.watch(self._engine, call, InputEdges([]), outputs)

    def module_called(self, module: Any, args: Any, frame: FrameType) -> None:
        if self._discovery is not None:
            self._discovery.module_called(module, args, frame)

    def let_program_end_steps(self) -> None:
        """From now on the program says where steps end."""
        for detector in (self._discovery, self._step_detector):
            if detector is not None:
                detector.let_program_end_steps()

    def stop(self) -> None:
        """Removes everything, each part even if a signal handler raises while another is being removed."""
        parts: list[Callable[[], object]] = []
        if self._discovery is not None:
            parts.append(self._discovery.remove)
        if self._step_detector is not None:
            parts.append(self._step_detector.remove)
        if self._perturbation is not None:
            parts.append(self._perturbation.remove)
        if self._grafts is not None:
            parts.append(self._grafts.remove)
        if self._modules is not None:
            parts += [
                self._graph_replays.stop,
                self._loss_labels.remove,
                self._optimizers.remove,
                partial(self._modes.use, []),
            ]
            parts += [self._pending.finish, self._note_unseen, self._modules.detach, self._modules.setup.stop]
            parts += [self._gradients.finish, self._gradients.remove, self._last_nodes.remove]
        with contextlib.ExitStack() as stopping:
            for part in reversed(parts):
                stopping.callback(part)


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def _tensor(value: Any) -> torch.Tensor:
    """A number or an array as a tensor."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))  # a copy: the program may go on writing into its own
    try:
        return torch.tensor(value, dtype=_NUMBERS[type(value)])
    except (OverflowError, RuntimeError, ValueError) as error:  # an integer of more than 64 bits
        pass_interrupt(error)
        return torch.tensor(float(value), dtype=torch.float64)
