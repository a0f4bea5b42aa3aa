"""The signal by which a scheduler ends a program: it is heard first, and then has its way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class OnTermination:
    """Calls `act` when SIGTERM comes, and then whoever listened before. It can only be put in place by the main thread;
    elsewhere, and where somebody has ignored the signal, it does nothing. Forked children only pass it on.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._before: Any = None
        self._process: int | None = None  # in which it listens
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before not in (signal.SIG_IGN, None):  # None: by something other than Python
                signal.signal(signal.SIGTERM, self._heard)
                self._process = os.getpid()

    def remove(self) -> None:
        """Acts no more. Where the handler cannot be taken away, it passes the signal on."""
        listened, self._process = self._process, None
        if listened is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._heard:  # else somebody has come after, and passes it on
            signal.signal(signal.SIGTERM, self._before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        listened, self._process = self._process, None
        if listened == os.getpid():
            self._act()
        if callable(self._before):
            self._before(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)
