"""The GPT recorded by astray, with the settings of `astray.record`. A turn is a run of its own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from turns import Training, size_of, take_turns

import astray
from astray.stats import set_threads


class Astray:
    def __init__(self, training: Training, folder: Path, settings: dict[str, Any]) -> None:
        if training.device.type == "cpu":
            set_threads(1)
        self._training = training
        self._run = folder / "run"
        self._settings = settings

    def open(self) -> None:
        self._recorder = astray.Recorder(self._run, self._training.model, **self._settings).start()

    def step(self) -> None:
        self._training.step()
        self._recorder.step()

    def close(self) -> dict[str, float]:
        started = time.perf_counter()
        self._recorder.stop()
        behind = time.perf_counter() - started
        end = astray.open(self._run).ranks[0].end
        assert end is not None
        assert end.complete, end.failure
        found = {"tensors": end.tensors, "waited": end.waited_seconds, "behind": behind, **size_of(self._run)}
        shutil.rmtree(self._run)
        return found


if __name__ == "__main__":
    take_turns(Astray, "astray")
