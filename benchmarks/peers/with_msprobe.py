"""The GPT recorded by msprobe's PrecisionDebugger. It takes its settings from a file and keeps the first it sees, so
there is one process for each.

The whole step lies between `start` and `stop`, the optimizer included, as it does for astray. Between turns msprobe
leaves its wrappers in place; without `start` they cost this model less than one percent.

What it imports for its plots and spreadsheets and never uses while it dumps may be missing (see stand_ins.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import stand_ins
from turns import Training, size_of, take_turns

TENSOR = "torch.Tensor"


class Msprobe:
    def __init__(self, training: Training, folder: Path, settings: dict[str, Any]) -> None:
        self._training = training
        self._folder = folder / "dump"
        self._folder.mkdir()
        config = {"rank": [], "step": [], "dump_path": str(self._folder), **settings}
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        self._debugger = self.debugger(str(file))

    def debugger(self, config: str) -> Any:
        stand_ins.install()
        from msprobe.pytorch import PrecisionDebugger

        return PrecisionDebugger(config_path=config)

    def open(self) -> None: ...

    def step(self) -> None:
        self._debugger.start(self._training.model)
        self._training.step()
        self._debugger.stop()
        self._debugger.step()

    def close(self) -> dict[str, float]:
        tensors = sum(count_tensors(json.loads(file.read_text())["data"]) for file in self._folder.rglob("dump.json"))
        found = {"tensors": tensors, **size_of(self._folder)}
        for step in self._folder.iterdir():
            shutil.rmtree(step)
        return found


def count_tensors(value: Any) -> int:
    """The entries of a dump that stand for a tensor."""
    if isinstance(value, dict):
        return int(value.get("type") == TENSOR) + sum(map(count_tensors, value.values()))
    return sum(map(count_tensors, value)) if isinstance(value, list) else 0


if __name__ == "__main__":
    take_turns(Msprobe, "mindstudio-probe")
