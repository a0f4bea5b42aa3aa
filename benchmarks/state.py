"""What the table of a model's weights costs, beside a plain loop of torch calls and beside one read of the bytes.

    python benchmarks/state.py [--rounds N] [--small]

The weights are those of a GPT-2 small, on a GPU where there is one. All ways take turns in one process; each ratio is
the median over the rounds. The loop is what one would write by hand for the same columns; its sums are in float32, or,
for a fair comparison with float64, of a copy in float64. "One read" is torch's own sum over every parameter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import torch
from gpt import GPT, Size
from tables import markdown, provenance

import astray

COLUMNS = ("name", "numel", "min", "max", "mean", "std", "norm1", "norm2", "skew", "kurtosis")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default 7)")
    parser.add_argument("--small", action="store_true", help="a tiny model: does the script work?")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    size = Size(32, 2, 2, 16, 1, 64) if options.small else Size(768, 12, 12, 1024, 1, 50304)
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = GPT(size)
    state = astray.state.from_weight(model)
    tensors = [state[name].detach() for name in state]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    device = torch.cuda.get_device_name() if on_gpu else "no GPU"
    print(provenance({"astray": version("astray"), "torch": torch.__version__}, device))
    print(f"{len(tensors)} parameters, {sum(tensor.numel() for tensor in tensors):,} numbers, {nbytes / 1e6:.0f} MB\n")

    ways: dict[str, Callable[[], object]] = {
        "one read of the bytes": lambda: [tensor.sum() for tensor in tensors],
        "describe(lw=True)": lambda: state.describe(lw=True, display=False),
        "describe()": lambda: state.describe(display=False),
        "ten columns, lw=True": lambda: state.describe(lw=True, include_keys=COLUMNS, display=False),
        "loop: norm1, norm2": lambda: [(t.norm(1).item(), t.norm(2).item()) for t in tensors],
        "loop: norm1, norm2 in float64": lambda: [
            (t.double().norm(1).item(), t.double().norm(2).item()) for t in tensors
        ],
        "loop: ten columns": lambda: [by_hand(t) for t in tensors],
        "loop: ten columns in float64": lambda: [by_hand(t.double()) for t in tensors],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            times[name].append(timed(way, on_gpu))
    read = times["one read of the bytes"]
    rows = []
    for name, mine in times.items():
        ratio = median(one / other for one, other in zip(mine[1:], read[1:], strict=True))
        rows.append([name, f"{median(mine[1:]) * 1e3:.2f}", f"{ratio:.2f}"])
    print(markdown(["", "ms", "÷ one read"], rows))


def by_hand(t: torch.Tensor) -> tuple[float, ...]:
    mean, std = t.mean(), t.std()
    away = (t - mean) / std
    found = (t.min(), t.max(), mean, std, t.norm(1), t.norm(2), (away**3).mean(), (away**4).mean() - 3)
    return tuple(one.item() for one in found)


def timed(way: Callable[[], object], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
