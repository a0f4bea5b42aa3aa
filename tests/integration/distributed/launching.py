"""Starts programs by torchrun, as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]

PATIENCE = 240
"""Seconds after which ranks that wait for each other are given up."""


TORCH_ABORTS = "terminate called without an active exception"
"""What the threads of a process group say, rarely, that lose a race with the end of the interpreter: bare torch too."""


def torchrun(*command: Any, processes: int = 2, options: tuple[str, ...] = ()) -> str:
    """Runs a command on several processes and returns what they printed. Fails with that when one of them does."""
    failed, output = attempt(*command, processes=processes, options=options)
    if failed and TORCH_ABORTS in output and "astray" not in command:
        failed, output = attempt(*command, processes=processes, options=options)
    assert not failed, output[-8000:]
    return output


def attempt(*command: Any, processes: int, options: tuple[str, ...]) -> tuple[int, str]:
    with start(*command, processes=processes, options=options, stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes before itself
            output, _ = process.communicate()
            raise AssertionError(f"torchrun took more than {PATIENCE} s:\n{output[-8000:]}") from None
    return process.returncode, output


def start(*command: Any, processes: int = 2, options: tuple[str, ...] = (), **streams: Any) -> subprocess.Popen[str]:
    """Starts torchrun and does not wait for it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    places = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]  # the ranks test the tree that the tests do
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.Popen(
        [*launcher, *options, *map(str, command)], env=environment, stdout=subprocess.PIPE, text=True, **streams
    )
