"""A large state is described where it lies."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch, astray
from astray.state.measuring import DeviceMeasurements

def peak():  # not ru_maxrss: a new process begins with that of the one that has started it
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

torch.set_num_threads(1)
state = astray.state.StateDict({"a": torch.ones(8000, 8000), "b": torch.ones(4000, 8000).bfloat16().t()})
astray.state.StateDict({"warm": torch.ones(3)}).describe(lw=True, display=False)
before = peak()
state.describe(lw=True, include_keys=["name", "std", "norm2", "norm3", "kurtosis"], display=False)
state.describe(display=False)
measurements = DeviceMeasurements()
measurements.add("a", state["a"], ())
measurements.fetch()
print(peak() - before)
"""


@pytest.mark.slow
def test_describing_takes_no_memory_of_the_size_of_the_state() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150_000  # kB; the state has 320 MB, and a block on its way through torch about 100
