"""Which swaps there are now, and the recordings that note them in their setup.

`swapping` reports here what is swapped, and what was never called; `setup_capture` listens while a recording runs.
"""

from __future__ import annotations

from typing import Protocol


class SwapListener(Protocol):
    """A recording."""

    def swapped(self, site: str, to: str | None) -> None:
        """A site runs elsewhere from now on; None: it is as the program has it."""

    def swap_unused(self, what: str, why: str) -> None:
        """Something was to be swapped, and was never called."""


_sites: dict[str, list[str]] = {}  # what each is swapped to, the latest last
_listeners: list[SwapListener] = []


def listen(listener: SwapListener) -> None:
    """Tells a recording what is swapped, now and later."""
    _listeners.append(listener)
    for site, targets in _sites.items():
        listener.swapped(site, targets[-1])


def stop_listening(listener: SwapListener) -> None:
    if listener in _listeners:
        _listeners.remove(listener)


def begin(site: str, to: str) -> None:
    _sites.setdefault(site, []).append(to)
    _tell(site)


def end(site: str, to: str) -> None:
    _sites[site].remove(to)
    _tell(site)
    if not _sites[site]:
        del _sites[site]


def unused(what: str, why: str) -> None:
    for listener in _listeners:
        listener.swap_unused(what, why)


def _tell(site: str) -> None:
    targets = _sites[site]
    for listener in _listeners:
        listener.swapped(site, targets[-1] if targets else None)
