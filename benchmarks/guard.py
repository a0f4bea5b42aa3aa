"""What a guard costs, beside torch's anomaly mode and transformers' DebugUnderflowOverflow, which look for the same.

    python benchmarks/guard.py [--rounds N] [--small]

Trains a GPT, on a GPU where there is one. Blocks of bare and of watched steps take turns in one process; the ratio is
the median over pairs of blocks. Nothing goes wrong in these steps: it is the price of leaving it on.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import Training, gpt
from peers.turns import timed
from tables import markdown, provenance

import astray

Watch = Callable[[Training], AbstractContextManager[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of blocks (default 5)")
    parser.add_argument("--small", action="store_true", help="a tiny model: does the script work?")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    size = "tiny" if options.small else "medium" if on_gpu else "small"
    training = gpt(size, "cuda" if on_gpu else "cpu", mixed=on_gpu)
    steps = 2 if options.small else 10 if on_gpu else 3
    gpu = torch.cuda.get_device_name() if on_gpu else "no GPU"
    print(provenance({"astray": version("astray"), "torch": torch.__version__}, gpu), end="\n\n")
    timed(training.step, 3, training.device)
    rows = []
    for name, watch in watches().items():
        ratio, bare, watched = take_turns(training, watch, options.rounds, steps)
        rows.append([name, f"**{ratio:.2f}**", f"{bare * 1e3:.1f}", f"{watched * 1e3:.1f}"])
        print(f"{name}: {ratio:.2f}", flush=True)
    print()
    print(markdown(["watched by", "step ÷ bare step", "bare ms", "watched ms"], rows))


def watches() -> dict[str, Watch]:
    found: dict[str, Watch] = {
        "astray.guard, modules": lambda training: guard(training, level="module"),
        "astray.guard, modules, all gradients": lambda training: guard(training, level="module", gradients="all"),
        "astray.guard, modules, forward": lambda training: guard(training, level="module", phases=["forward"]),
        "astray.guard, functions": lambda training: guard(training, level="function"),
        "torch.autograd.detect_anomaly": lambda _: anomaly(),
    }
    with contextlib.suppress(ImportError):
        from transformers.debug_utils import DebugUnderflowOverflow

        found["DebugUnderflowOverflow"] = lambda training: hooked(training, DebugUnderflowOverflow)
    return found


def guard(training: Training, **settings: Any) -> AbstractContextManager[Any]:
    """With the flight recorder, as it is by default."""
    folder = Path(tempfile.mkdtemp(), "found")  # which is only made when something is wrong
    return astray.guard(training.model, path=folder, **settings)


@contextlib.contextmanager
def anomaly() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():  # type: ignore[no-untyped-call]
            yield


@contextlib.contextmanager
def hooked(training: Training, tool: Any) -> Any:
    before = {module: dict(module._forward_hooks) for module in training.model.modules()}
    tool(training.model)
    try:
        yield
    finally:
        for module, hooks in before.items():
            for key in [key for key in module._forward_hooks if key not in hooks]:
                del module._forward_hooks[key]


def take_turns(training: Training, watch: Watch, rounds: int, steps: int) -> tuple[float, float, float]:
    """The median ratio of paired blocks, and the median times. The first watched step of a block is not timed."""
    bare, watched = [], []
    for _ in range(rounds):
        times = timed(training.step, steps, training.device)
        bare.append(sum(times) / len(times))
        with watch(training):
            training.step()
            times = timed(training.step, steps, training.device)
        watched.append(sum(times) / len(times))
    return median(b / a for a, b in zip(bare, watched, strict=True)), median(bare), median(watched)


if __name__ == "__main__":
    main()
