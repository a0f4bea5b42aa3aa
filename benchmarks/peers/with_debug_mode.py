"""The GPT under torch's own DebugMode, with a hash of every tensor that an operation gets and gives.

It keeps its log in memory. The log of a step is dropped when the next begins, and nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils._debug_mode import DebugMode
from torch.utils._pytree import tree_leaves
from turns import Training, take_turns


class Debug:
    def __init__(self, training: Training, _folder: Path, settings: dict[str, Any]) -> None:
        self._training = training
        self._settings = settings

    def open(self) -> None:
        self._steps = 0
        self._mode: DebugMode | None = None

    def step(self) -> None:
        self._steps += 1
        self._mode = None
        with DebugMode() as mode, DebugMode.log_tensor_hashes(**self._settings):
            self._training.step()
        self._mode = mode

    def close(self) -> dict[str, float]:
        assert self._mode is not None
        logs = [call.log for call in self._mode.operators if getattr(call, "log", None)]
        self._mode = None
        hashes = sum(leaf is not None for leaf in tree_leaves(logs))
        return {"tensors": hashes * self._steps, "files": 0, "bytes": 0}


if __name__ == "__main__":
    take_turns(Debug)
