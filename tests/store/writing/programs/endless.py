"""Records until it is killed, and says after each flush how far it came. Every value follows from its number.

With `ahead` it behaves as if the disk were far behind: values are written directly, and into several files at once.
With `watched` a listener is shown each step.
"""

import sys

import numpy as np

from astray.records import Call, Frame, Tensor
from astray.store import RunInfo, RunWriter
from astray.store.writing import values_writer
from astray.store.writing.values_writer import WriteModeChooser

SIZES = (3, 1000, 0, 70_000, 16, 400_000)


def main(path: str, way: str) -> None:
    if way == "ahead":
        (
            WriteModeChooser.INITIAL_BYTES,
            WriteModeChooser.PROBE_BYTES,
            values_writer.SHARD_QUEUE_BYTES,
            values_writer.BATCH_BYTES,
        ) = (
            0,
            8 << 20,
            0,
            1 << 20,
        )
    look = (lambda rows: None) if way == "watched" else None
    writer = RunWriter(path, info=RunInfo.of_process(), shard_bytes=8 << 20, on_step=look)
    for seq in range(10**9):
        if seq % 50 == 0:
            writer.stack(seq, [Frame("train.py", seq, "step", "loss.backward()")])
        writer.call(
            Call(seq, seq // 10, 0, "module", f"layers.{seq % 10}", "Linear", 0, "forward", stack=seq // 50 * 50)
        )
        size = SIZES[seq % len(SIZES)]
        values = np.arange(seq, seq + size, dtype=np.int64)
        writer.tensor(Tensor(seq, "output", "0", "int64", (size,), (1,), "cpu", False, fingerprint=seq), values)
        if seq % 10 == 9:
            writer.step_done()
        if seq % 7 == 6 and writer.flush():
            print(f"ack {seq}", flush=True)


main(*sys.argv[1:])
