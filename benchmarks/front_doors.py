"""What a program written for msprobe costs with one import changed: a training step on the CPU, both in one run.

The GPT of capture_cpu.py, by the same configuration; both leave msprobe's files. `stop` and `step` wait until they are
there, in both. And how long its comparison takes for 30,000 rows, of statistics and of values in files of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from capture_cpu import cell
from peers.processes import TurnTaking, tell_missing
from peers.tools import front_door, msprobe
from tables import markdown, provenance

from astray.compat.msprobe import compare
from astray.foreign import array_files

CASES = {
    "L0 statistics": ("L0", "statistics"),
    "L1 statistics": ("L1", "statistics"),
    "mix statistics": ("mix", "statistics"),
    "mix tensor": ("mix", "tensor"),
}
COLUMNS = {
    "ratio": "{ratio:.2f}",
    "recorded ms": "{recorded:.0f}",
    "tensors a step": "{tensors:,.0f}",
    "MB a step": "{megabytes:,.1f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--rows", type=int, default=30_000, help="tensors of the dumps that are compared")
    parser.add_argument("--steps", type=int, default=3, help="bare and recorded steps in a turn")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        turns = TurnTaking(Path(scratch), options.steps)
        for name, (level, task) in CASES.items():
            print(f"{name} …", file=sys.stderr, flush=True)
            own, peer = turns.run([front_door(level, task), msprobe(level, task)], options.rounds)
            lines.append([name, *(cell(side, text) for text in COLUMNS.values() for side in (own, peer))])
    print(f"{provenance(turns.versions)}\n")
    print("Step time over bare step time, by the best of each, and what a step leaves.\n")
    print(markdown(["dumped", *(head for name in COLUMNS for head in (f"astray: {name}", "msprobe"))], lines, words=1))
    tell_missing(turns.missing)
    print("\nComparing two dumps of one step, the best of three, start-up left out.\n")
    print(markdown(["dumps", "rows", "s", "s of a core"], compared(options.rows), words=1))


def compared(count: int) -> Iterator[list[str]]:
    """The comparison of two dumps of so many tensors."""
    for task in ("statistics", "tensor"):
        with tempfile.TemporaryDirectory() as folder:
            for side in ("npu", "bench"):
                write_dump(Path(folder) / side, count, task)
            taken = []
            for number in range(3):
                wall, cpu = time.perf_counter(), time.process_time()
                paths = {"npu_path": Path(folder) / "npu", "bench_path": Path(folder) / "bench"}
                table = compare(paths, Path(folder) / f"out{number}")[0]
                taken.append((time.perf_counter() - wall, time.process_time() - cpu))
            rows = len(table.read_text().splitlines()) - 1
        wall, cpu = min(wall for wall, _ in taken), min(cpu for _, cpu in taken)
        yield [task, f"{rows:,}", f"{wall:.1f}", f"{cpu:.1f}"]


def write_dump(folder: Path, count: int, task: str) -> None:
    """A dump of functions of six tensors each, with the stacks that they were called from."""
    place = folder / "step0" / "rank"
    data = place / "dump_tensor_data"
    data.mkdir(parents=True)
    values = np.random.default_rng(0).standard_normal((count, 32)).astype(np.float32)

    def leaf(number: int, name: str) -> dict[str, object]:
        one = values[number]
        found: dict[str, object] = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 8]}
        found |= {"Max": float(one.max()), "Min": float(one.min()), "Mean": float(one.mean())}
        found |= {"Norm": float(np.linalg.norm(one)), "requires_grad": True}
        if task == "tensor":
            array_files.write(data / f"{name}.pt", array_files.TorchTensor(one.reshape(4, 8), "float32"))
            found["data_name"] = f"{name}.pt"
        return found

    entries: dict[str, object] = {}
    stacks: dict[str, tuple[list[str], list[str]]] = {}
    for number in range(0, count, 6):
        name = f"Functional.linear.{number // 6}.forward"
        inputs = [leaf(number + place, f"{name}.input.{place}") for place in range(5)]
        entries[name] = {"input_args": inputs, "input_kwargs": {}, "output": [leaf(number + 5, f"{name}.output.0")]}
        line = number % 100
        called = stacks.setdefault(str(line), ([], [f"File train.py, line {line}, in forward, \n y = self.fc(x)"]))
        called[0].append(name)
    head = {"task": task, "level": "L1", "framework": "pytorch", "dump_data_dir": str(data), "data": entries}
    (place / "dump.json").write_text(json.dumps(head))
    (place / "stack.json").write_text(json.dumps(stacks))
    (place / "construct.json").write_text("{}")


if __name__ == "__main__":
    main()
