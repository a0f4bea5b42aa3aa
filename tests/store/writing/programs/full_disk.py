"""Goes on computing while the disk it records to fills up; prints what the writer said and how far it came.

With `watched` it waits until each step was looked at, and prints whether some were, one after the other.
"""

import resource
import sys

import numpy as np

from astray.records import Call, Tensor
from astray.store import RunInfo, RunWriter


def main(path: str, limit: int, keep: bool, watched: bool) -> None:
    if limit:  # no file may grow beyond this many bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    seen: list[int] = []
    look = (lambda rows: seen.append(rows.step)) if watched else None
    writer = RunWriter(path, info=RunInfo.of_process(), queue_bytes=4 << 20, on_step=look)
    for seq in range(64):
        writer.call(Call(seq, seq, 0, "module", "fc", "Linear", 0, "forward"))
        values = np.full(seq * 2000 if limit else 1 << 17, seq, np.int64)
        row = Tensor(seq, "output", "0", "int64", values.shape, (1,), "cpu", False, note="x" * 20_000)
        writer.tensor(row, values if keep else None)
        writer.step_done()
        if writer.listener is not None:
            writer.listener.wait_until_shown(seq)
        if seq < 4:
            writer.flush()
    writer.flush()
    writer.close()
    print(seq)
    print(writer.failure)
    if watched:
        print(seen == list(range(len(seen))) and len(seen) > 0)


main(sys.argv[1], int(sys.argv[2]), keep=sys.argv[3] == "values", watched="watched" in sys.argv)
