"""Records, and forks children that try to record too, while another thread keeps the writer busy."""

import multiprocessing
import os
import sys
import threading
import warnings

import numpy as np

from astray.records import Call, Tensor
from astray.store import RunInfo, RunWriter

warnings.simplefilter("ignore", DeprecationWarning)  # Python dislikes forks of threaded programs; users do them


def disturb(writer: RunWriter) -> None:
    """Everything a child might call. None of it may hang, raise or reach the files."""
    record(writer, 10**6)
    writer.missed("a child", "it is one")
    writer.step_done()
    assert not writer.flush()
    writer.close("in a child")


def record(writer: RunWriter, seq: int) -> None:
    writer.call(Call(seq, 0, 0, "module", "fc", "Linear", 0, "forward"))
    writer.tensor(Tensor(seq, "output", "0", "int64", (1000,), (1,), "cpu", False), np.full(1000, seq))


def main(path: str) -> None:
    writer = RunWriter(path, info=RunInfo.of_process(), queue_bytes=1 << 16)
    busy = threading.Event()

    def work() -> None:
        for seq in range(2000):
            record(writer, seq)
            busy.set()

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            disturb(writer)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    worker = multiprocessing.get_context("fork").Process(target=disturb, args=(writer,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs the exit handlers
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    writer.close()
    print("done")


main(sys.argv[1])
