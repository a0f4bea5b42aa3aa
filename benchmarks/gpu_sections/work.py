"""What the sections share: the program that is recorded, where, with which settings, and where the tables go."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt import SIZES, Training, gpt
from peers.turns import timed
from tables import markdown

import astray
from astray.store.run_info import End

LIKE_PEERS = {"phases": ["forward", "backward"]}
"""The peers record no optimizer."""

BOTH = ["module", "function"]
CASES: dict[str, dict[str, Any]] = {
    "statistics, modules": {"level": "module", **LIKE_PEERS},
    "statistics, functions": {"level": "function", **LIKE_PEERS},
    "statistics, both": {"level": BOTH, **LIKE_PEERS},
    "fingerprints, ops": {"level": "op", "keep": "fingerprint", **LIKE_PEERS},
    "statistics, both, updates too": {"level": BOTH, "optimizer": ["weight", "update"]},
}
"""What is recorded; the last one is more than any peer does."""


class Work(NamedTuple):
    """A training, and how much of it is measured: a `small` one only shows that the benchmark runs."""

    device: torch.device
    folder: Path
    small: bool

    @property
    def size(self) -> str:
        return "tiny" if self.small else "medium"

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    def training(self, size: str | None = None) -> Training:
        return gpt(size or self.size, str(self.device), mixed=True)

    def times(self, full: int, small: int) -> int:
        return small if self.small else full

    def scratch(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def seconds(self, step: Callable[[], object], count: int) -> float:
        """The time of a step: the mean of a block, at whose ends the device is waited for."""
        times = timed(step, count, self.device)
        return sum(times) / len(times)

    def synchronize(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def describe(self) -> str:
        size = SIZES[self.size]
        fused = " (fused)" if self.has_gpu else ""
        return (
            f"A GPT: {size.layers} layers, d = {size.width}, {size.heads} heads, T = {size.length}, B = {size.batch}, "
            f"vocabulary {size.vocabulary}, bfloat16 by autocast, AdamW{fused}, on {self.device.type}."
        )


class Recording:
    """A recorder of a training. `end` is known after it has stopped."""

    def __init__(self, training: Training, recorder: astray.Recorder) -> None:
        self._training, self._recorder = training, recorder
        self.end: End | None = None

    def step(self) -> torch.Tensor:
        loss = self._training.step()
        self._recorder.step()
        return loss

    def stop(self) -> End:
        """Ends it; what it has written is left on the disk until the block ends."""
        self._recorder.stop()
        end = astray.open(self._recorder.path).ranks[0].end
        assert end is not None
        if not end.complete:
            raise RuntimeError(f"The recording is incomplete: {end.failure}")
        for missed in end.missed:
            print(f"not recorded: {missed}", file=sys.stderr)
        self.end = end
        return end


@contextmanager
def recording(work: Work, training: Training, settings: dict[str, Any]) -> Iterator[Recording]:
    """Records what is trained inside, into a folder that is removed at the end."""
    scratch = work.scratch()
    found = Recording(training, astray.Recorder(scratch / "run", training.model, **settings).start())
    try:
        yield found
    finally:
        try:
            if found.end is None:
                found.stop()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class Report:
    """Prints as it goes, so that a run that is cut short has told what it knew; and writes a file beside."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.ratios: dict[str, float] = {}
        """Step over bare step of each case, once the steps have been measured."""
        if file is not None:
            file.write_text("")

    def write(self, text: str) -> None:
        print(text, end="\n\n", flush=True)
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(f"{text}\n\n")

    def table(self, heads: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> None:
        self.write(markdown(heads, rows, words))
