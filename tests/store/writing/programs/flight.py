"""Holds its steps in memory and ends, or goes on, in the way of its arguments."""

import atexit
import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from astray.records import Call, Tensor
from astray.store import FlightRecorder, RunInfo

warnings.simplefilter("ignore", DeprecationWarning)  # Python dislikes forks of threaded programs; users do them


def record(flight: FlightRecorder, steps: range, size: int = 1000) -> None:
    for step in steps:
        flight.call(Call(step, step, 0, "module", "fc", "Linear", 0, "forward"))
        flight.tensor(Tensor(step, "output", "0", "int64", (size,), (1,), "cpu", False), np.full(size, step))
        flight.step_done()


def main(path: Path, way: str) -> None:
    flight = FlightRecorder("unused", info=RunInfo.of_process(), remember=64)

    def dump(why: str) -> None:
        print(flight.dump(path, why).failure)

    if way == "exit handler before":  # so that it runs once the recorder is closed
        atexit.unregister(flight.close)
        atexit.register(dump, "the program ended")
        atexit.register(flight.close, "without closing the recording")
    elif way == "exit handler after":
        atexit.register(dump, "the program ended")
    elif way == "exception hook":
        sys.excepthook = lambda kind, error, trace: dump(f"{kind.__name__}: {error}")
    record(flight, range(4))
    if way == "exception hook":
        with flight:
            raise ValueError("loss is NaN")
    if way == "SIGTERM":

        def stop(number: int, _: Any) -> None:
            dump(signal.Signals(number).name)
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the handler ends it")
    if way == "forks":
        child = os.fork()
        if child == 0:
            record(flight, range(4, 8))
            dump("a child")
            assert not flight.flush()
            assert not flight.listener.wait_until_shown(7)
            flight.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        record(flight, range(4, 5))
        dump("the parent")
    if way == "full disk":
        record(flight, range(4, 64), 100_000)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        dump("the disk is small")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        record(flight, range(64, 65))
        print(flight.dump(f"{path}-again", "it has grown").failure)
    if way == "endless":
        record(flight, range(4, 64), 100_000)
        for attempt in range(10**9):
            print(attempt, flush=True)
            flight.dump(path / str(attempt), "again and again")


main(Path(sys.argv[1]), sys.argv[2])
