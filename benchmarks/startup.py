"""How long astray takes to start: `import astray` and `astray --help`, beside a bare interpreter.

Each is the best of several fresh processes, taken in turns so that all see the same machine.
"""

from __future__ import annotations

import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import astray": ["-c", "import astray"],
    "import numpy": ["-c", "import numpy"],
    "astray --help": ["-m", "astray", "--help"],
    "astray compare (of nothing)": ["-m", "astray", "compare", "/nowhere", "/nowhere"],
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=False, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(10):
        for name, arguments in COMMANDS.items():
            best[name] = min(best[name], seconds(arguments))
    print("| command | seconds |\n|---|---|")
    for name, taken in best.items():
        print(f"| {name} | {taken:.3f} |")


if __name__ == "__main__":
    main()
