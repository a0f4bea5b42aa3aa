"""One process of a recording benchmark: trains a few steps, bare or recorded, whenever it is asked to.

The process that started it asks by lines on its input (`bare 3`, `recorded 3`, `peak`) and gets lines of JSON, so that
several tools can take turns on one machine. Whatever else a tool prints goes to the error stream. `Side` is what the
scripts beside this one fill in; each runs in the environment of its tool, and this needs torch alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

sys.path.append(str(Path(__file__).parents[1]))  # last, so that nothing there hides a package of the same name

from gpt import Training, gpt

__all__ = ["Training", "size_of", "take_turns", "timed"]

WARM_UP = 2  # steps: the first allocates, and makes the optimizer's state


class Side(Protocol):
    """A tool that records. It opens before a turn and closes after it; both are outside of the step times."""

    def open(self) -> None: ...

    def step(self) -> None:
        """One step of training, recorded, and everything the tool wants done at its end."""

    def close(self) -> dict[str, float]:
        """What this turn has left: `tensors`, `bytes` and `files`; `waited` and `behind`, in seconds. Removes it."""


def take_turns(side: Callable[[Training, Path, dict[str, Any]], Side], package: str = "torch") -> None:
    """Answers until the input ends, at first with versions: of torch, and of the package the tool comes in.

    The arguments of the program: a folder to write into, the tool's settings and what to train, both as JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    training = gpt(**json.loads(sys.argv[3]))
    if training.device.type == "cpu":
        torch.set_num_threads(1)
    timed(training.step, WARM_UP, training.device)
    tool = side(training, Path(sys.argv[1]), json.loads(sys.argv[2]))
    send(answers, {name: version(name) for name in ("torch", package)})
    for line in sys.stdin:
        what, *count = line.split()
        if what == "bare":
            send(answers, {"seconds": timed(training.step, int(count[0]), training.device)})
        elif what == "recorded":
            tool.open()
            seconds = timed(tool.step, int(count[0]), training.device)
            send(answers, {"seconds": seconds, **tool.close()})
        else:
            send(answers, {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})


def timed(step: Callable[[], object], count: int, device: torch.device | None = None) -> list[float]:
    """The seconds of each step. On a device that works on its own, those of all steps together, by their number."""
    if device is not None and device.type != "cpu":
        accelerator = torch.get_device_module(device)
        accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        accelerator.synchronize()
        return [(time.perf_counter() - started) / count]
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return seconds


def send(answers: TextIO, what: dict[str, Any]) -> None:
    print(json.dumps(what), file=answers, flush=True)


def size_of(folder: Path) -> dict[str, float]:
    """How many files there are in a folder, and the bytes they take: a file may have holes, or two names."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {"files": len(files), "bytes": sum({file.st_ino: file.st_blocks * 512 for file in files}.values())}
