"""A reader that measures tensors of the CPU as those of a device: by ticket, with plain torch operations."""

from __future__ import annotations

import torch

from astray.capture.adapters import TensorIdentity, TensorReading
from astray.capture.pytorch.tensors import TorchReader


class SimulatedDeviceReader(TorchReader):
    """Takes the CPU for a device."""

    def read(self, tensor: torch.Tensor, identity: TensorIdentity | None, statistics: bool) -> TensorReading:
        near = super().read(tensor, identity, statistics)
        if near.memory is None:
            return near
        plain = tensor if identity is not None else near.owner
        return self._measured(near, plain, statistics)
