"""No tool at all: its peak memory is what the others' is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turns import Training, take_turns


class Bare:
    def __init__(self, training: Training, _folder: Path, _settings: dict[str, Any]) -> None:
        self.step = training.step

    def open(self) -> None: ...

    def close(self) -> dict[str, float]:
        return {}


if __name__ == "__main__":
    take_turns(Bare)
