"""A bell that one thread waits for and any thread rings, also from a signal handler in the middle of ringing it."""

from __future__ import annotations

import contextlib
import threading


class Wake:
    """What `threading.Event` is, for one who waits, and waiting resets it.

    An event has a lock inside: a signal handler that sets it while its own thread is doing just that would wait for
    itself. This is a lock and nothing else, free when somebody has rung.
    """

    __slots__ = ("_bell",)

    def __init__(self) -> None:
        self._bell = threading.Lock()
        self._bell.acquire()

    def set(self) -> None:
        """Ring."""
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # somebody else was faster
                self._bell.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until somebody rings, or has rung since the last time; False when nobody did."""
        return self._bell.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
