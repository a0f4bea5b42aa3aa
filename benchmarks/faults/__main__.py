"""How many planted faults does `astray compare` name, and does it keep quiet when nothing is wrong?

    python benchmarks/faults [--only NAME,…] [--setting NAME,…] [--json FILE]
    python benchmarks/faults --prove [--only NAME,…]

Trains a small GPT with each fault in it, compares it with the program without, and prints markdown tables: at each
setting of the recording, for each fault the declared culprit, what was found, and the score; totals; and for each
control whether there was an alarm. `scoring.py` explains the scores, `declared.py` lists the settings. It takes two
minutes on 2 cores. With `--prove`, for each fault whether `astray locate` finds and proves it (`proving.py`).

`python benchmarks/faults grid --help`: more models, beside honest differences of dtype, kernels and device.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # run as a folder: this package's own name must be found
    if sys.argv[1:2] == ["grid"]:
        from faults.grid.command import main as grid

        grid(sys.argv[2:])
    else:
        from faults.command import main

        main(description=__doc__)
