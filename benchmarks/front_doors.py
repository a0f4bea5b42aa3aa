"""What a program written for msprobe costs with one import changed: a training step on the CPU, both in one run.

The GPT of capture_cpu.py, by the same configuration; both leave msprobe's files. `stop` and `step` wait until they are
there, in both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from capture_cpu import cell
from peers.processes import TurnTaking, tell_missing
from peers.tools import front_door, msprobe
from tables import markdown, provenance

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


if __name__ == "__main__":
    main()
