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
    elsewhere, and where somebody has ignored the signal, it does nothing.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._before: Any = None
        self._on = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before not in (signal.SIG_IGN, None):  # None: by something other than Python
                signal.signal(signal.SIGTERM, self._heard)
                self._on = True

    def remove(self) -> None:
        if self._on and threading.current_thread() is threading.main_thread():
            self._on = False
            if signal.getsignal(signal.SIGTERM) == self._heard:  # else somebody has come after, and passes it on
                signal.signal(signal.SIGTERM, self._before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._on:
            self._on = False
            self._act()
        if callable(self._before):
            self._before(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)
