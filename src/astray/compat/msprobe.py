"""For programs written for msprobe: `from astray.compat.msprobe import PrecisionDebugger`, and leave the rest as it is.

    debugger = PrecisionDebugger("config.json")
    debugger.start(model) … debugger.stop(); debugger.step()
    compare({"npu_path": "a/step0/rank/dump.json", "bench_path": "b/step0/rank/dump.json"}, "output")

Files, names and columns are msprobe's; `astray help msprobe` explains the differences.
"""

from __future__ import annotations

from astray.foreign.msprobe.comparing import compare, compare_distributed
from astray.foreign.msprobe.debugger import PrecisionDebugger, seed_all

__all__ = ["PrecisionDebugger", "compare", "compare_distributed", "seed_all"]

if __name__ == "__main__":
    import sys

    from astray.foreign.msprobe.comparing import main

    sys.exit(main())
