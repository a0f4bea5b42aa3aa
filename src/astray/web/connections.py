"""The connections of the local server: a client that sends nothing, or too slowly, does not keep others out.

A connection waits while its request is not complete, or while its client does not read the answer. Those that wait for
long are closed; and where there are many, the one that has waited the longest is dropped for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_TO_ASK = 20.0
"""From the first byte to the last of a request. A browser on the same machine, or behind a tunnel, takes a few."""

SECONDS_TO_BEGIN = 1.0
"""From the connection to the first byte: a younger one is not dropped for a new one."""

MOST_OPEN = 256
"""Connections at a time, or half of the files that the process may open if that is less. A browser opens six. While all
of them have only just begun, there may be half as many more."""


def most_open() -> int:
    """How many connections there may be at a time."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            return max(8, min(MOST_OPEN, files // 2))
    return MOST_OPEN


class Connection(H11Protocol):
    """One connection. `most` is how many there may be of them."""

    most = MOST_OPEN
    _heard = 0.0  # when something last came or was answered
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._heard = self.loop.time()
        self._await_request()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._heard = self.loop.time()
        if not self.is_waiting:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._heard = self.loop.time()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for its client."""
        asked = self.cycle is not None and not self.cycle.response_complete
        return not asked or self.cycle.more_body or self.flow.write_paused

    def _make_room(self) -> None:
        """Drop the connection that has waited the longest, unless all have only just begun to and there is room."""
        waiting = [
            one for one in self.connections if isinstance(one, Connection) and one.is_waiting and one is not self
        ]
        if len(self.connections) <= self.most + self.most // 2:
            waiting = [one for one in waiting if self.loop.time() - one._heard > SECONDS_TO_BEGIN]
        if waiting:
            min(waiting, key=lambda one: one._heard).drop()

    def drop(self) -> None:
        """Close it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(SECONDS_TO_ASK, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        if self.is_waiting:
            self.drop()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
