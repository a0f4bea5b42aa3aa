"""For programs written for hooktools: `from astray.compat.hooktools import Tracer`, and leave the rest as it is.

    trace = Tracer("tracer_demo.yaml", model)
    trace.trace(epoch=0, step=0)
    loss = model(batch)
    loss.backward()
    trace.untrace()

A `Tracer` is a `Recorder` that writes hooktools' files; a `Comparer` is `astray.compare` with hooktools' options and
metrics. `astray help hooktools` explains the differences.
"""

from __future__ import annotations

from astray.foreign.hooktools.comparer import Comparer, ComparerResult
from astray.foreign.hooktools.tracer import Tracer

__all__ = ["Comparer", "ComparerResult", "Tracer"]

if __name__ == "__main__":
    import sys

    from astray.foreign.hooktools.comparer import main

    sys.exit(main())
