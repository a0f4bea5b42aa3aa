"""One rank of several that record into the same folder. As ranks do, it waits for the others."""

import sys
import time
from pathlib import Path

import numpy as np

from astray.records import Call, Tensor
from astray.store import RunInfo, RunWriter


def main(path: str, rank: int, world_size: int) -> None:
    with RunWriter(path, rank, info=RunInfo.of_process(world_size=world_size)) as writer:
        for seq in range(200):
            writer.call(Call(seq, seq // 10, 0, "module", "fc", "Linear", 0, "forward"))
            values = np.full(100, 1000 * rank + seq)
            writer.tensor(Tensor(seq, "output", "0", "int64", (100,), (1,), "cpu", False), values)
        while not all(Path(path, f"rank{other}").is_dir() for other in range(world_size)):
            time.sleep(0.01)


main(sys.argv[1], *map(int, sys.argv[2:]))
