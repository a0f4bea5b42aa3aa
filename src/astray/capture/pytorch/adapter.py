"""What the recorder asks of PyTorch: versions, devices, and the hooks in and out of place."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch
from torch import nn

from astray.capture.engine import Engine, TensorReader
from astray.capture.pytorch.discovery import Discovery
from astray.capture.pytorch.modules import ModuleCapture
from astray.capture.pytorch.tensors import TorchReader


class PyTorchAdapter:
    """Records PyTorch models. Without models, it finds those of the program by itself."""

    framework = "torch"
    internal: tuple[str, ...] = (str(Path(torch.__file__).parent),)

    def __init__(self, models: Mapping[str, nn.Module] | None) -> None:
        self.reader: TensorReader = TorchReader()
        self._models = models
        self._capture: ModuleCapture | None = None
        self._discovery: Discovery | None = None

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

    def rank_and_world_size(self) -> tuple[int, int] | None:
        """As torch.distributed knows it; None while it is not set up."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def start(self, engine: Engine, end_step: Callable[[], None]) -> None:
        self._capture = ModuleCapture(engine)
        if self._models is None:
            self._discovery = Discovery(engine, self._capture, end_step)
            return
        for label, model in self._models.items():
            self._capture.attach(model, label)

    def next_step(self) -> None:
        if self._capture is not None:
            self._capture.next_step()

    def stop(self) -> None:
        if self._discovery is not None:
            self._discovery.remove()
        if self._capture is not None:
            self._capture.detach()
