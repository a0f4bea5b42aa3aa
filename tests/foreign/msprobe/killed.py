"""A training under msprobe's front door that is killed in the middle of its fourth step."""

from __future__ import annotations

import os
import signal
import sys
import time

from astray.compat.msprobe import PrecisionDebugger
from msprobe_parts import batches, network

debugger = PrecisionDebugger(task="tensor", level="mix", dump_path=sys.argv[1])
model = network()
for number, x in enumerate(batches(4)):
    debugger.start(model)
    loss = model(x).sum()
    if number == 3:
        time.sleep(1.0)  # a moment, after which the files tell of what was recorded
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    debugger.stop()
    debugger.step()
