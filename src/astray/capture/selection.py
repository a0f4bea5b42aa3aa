"""Which sites, calls and tensors the settings select.

Used by the engine, in the hot path. `RecordingSelection` decides for a site, and the caller keeps the answer; `Scope`
follows the calls between two sites; `Quota` counts towards the limits, and what was left out beyond them. `forecast`
computes, after the first step, how many more steps fit on the disk: keeping all values fills one within minutes.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from astray.capture.settings import Settings
from astray.records import Kind, MissedTensor
from astray.wording import sized

_UNTYPED = ("parameter", "optimizer")  # their class does not describe them


class RecordingSelection:
    """What the settings select. A call of `rec.save` is always recorded: the program makes it on purpose."""

    def __init__(self, settings: Settings) -> None:
        self.phases = settings.phases
        self.roles = settings.roles
        self._match = [re.compile(pattern) for pattern in settings.match]
        self._ignore = [re.compile(pattern) for pattern in settings.ignore]
        self._classes = frozenset(settings.classes)

    def wants_site(self, name: str, type: str, kind: Kind) -> bool:
        """Whether the calls of a site are recorded. Costs a few regex searches, so callers keep the answer."""
        if kind == "custom":
            return True
        if self._match and not any(pattern.search(name) for pattern in self._match):
            return False
        if any(pattern.search(name) for pattern in self._ignore):
            return False
        return not self._classes or kind in _UNTYPED or self._is_listed(type, kind)

    def _is_listed(self, type: str, kind: Kind) -> bool:
        if not self._classes.isdisjoint(_names(type, kind)):
            return True
        # A type that is known only by its last name also matches one that is written in full.
        return "." not in type and any(given.rpartition(".")[2] == type for given in self._classes)


def _names(type: str, kind: Kind) -> set[str]:
    """The names that select a type: `softmax` for torch.nn.functional.softmax, `add` for aten.add.Tensor."""
    parts = re.split(r"\.|::", type)
    if kind != "op":
        return {type, parts[-1]}
    begins = range(max(len(parts) - 1, 1))  # not the last alone: that is the overload
    return {type} | {".".join(parts[begin:end]) for begin in begins for end in range(begin + 1, len(parts) + 1)}


class Scope:
    """Open from the start of one site to the end of another, both included.

    A call belongs to it when it starts while it is open. Each start of `begin` opens it, each end of `end` closes it.
    """

    __slots__ = ("_begin", "_end", "is_open")

    def __init__(self, begin: str, end: str) -> None:
        self._begin = begin
        self._end = end
        self.is_open = False

    def on_call_start(self, site_name: str) -> None:
        """A call of this site starts. Read `is_open` afterwards to know whether it belongs to the scope."""
        if site_name == self._begin:
            self.is_open = True

    def on_call_end(self, site_name: str) -> None:
        """A call of this site has ended, and its outputs have been seen."""
        if site_name == self._end:
            self.is_open = False

    def reset(self) -> None:
        """A step begins: nothing of an earlier one is open."""
        self.is_open = False


class Quota:
    """The limits on rows and on bytes of values. Beyond them tensors are counted, not recorded.

    A tensor whose values no longer fit does not end it: smaller ones that come later may still fit.
    """

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.Lock()
        self._rows = 0
        self._rows_of_step = 0
        self._bytes = 0
        self._left_out: Counter[tuple[str, str]] = Counter()
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Sets other limits. They apply to the whole recording: what was recorded before counts too."""
        self._most_rows = settings.max_tensors
        self._most_rows_of_step = settings.max_tensors_per_step
        self._most_bytes = settings.max_bytes
        self.is_limited = self._most_rows is not None or self._most_rows_of_step is not None

    def row(self) -> bool:
        """Whether one more tensor may be recorded. If so, it is counted."""
        if not self.is_limited:
            self._rows += 1  # a count that a thread may lose is good enough until there is a limit
            return True
        with self._lock:
            if self._most_rows is not None and self._rows >= self._most_rows:
                self._left_out["tensors", f"beyond max_tensors={self._most_rows:,}"] += 1
                return False
            if self._most_rows_of_step is not None and self._rows_of_step >= self._most_rows_of_step:
                self._left_out["tensors", f"beyond max_tensors_per_step={self._most_rows_of_step:,}"] += 1
                return False
            self._rows += 1
            self._rows_of_step += 1
        return True

    def count(self, rows: int) -> None:
        """Adds rows that were recorded natively, while there was no limit."""
        with self._lock:
            self._rows += rows

    def values(self, nbytes: int) -> bool:
        """Whether so many bytes of values may still be kept. If so, they are counted."""
        with self._lock:
            if self._most_bytes is not None and self._bytes + nbytes > self._most_bytes:
                self._left_out["the values of tensors", f"beyond max_bytes={self._most_bytes:,}"] += 1
                return False
            self._bytes += nbytes
        return True

    @property
    def recorded(self) -> RecordedBytes:
        """What was recorded so far."""
        return RecordedBytes(self._bytes, self._rows)

    def next_step(self) -> None:
        self._rows_of_step = 0

    def left_out(self) -> list[MissedTensor]:
        """What was not recorded, which limit it was beyond, and how often; to be written into the run."""
        with self._lock:
            return [MissedTensor(what, why, count) for (what, why), count in self._left_out.items()]


ROW_BYTES = 300
"""Estimate for a row of `tensors` with its share of `calls`, measured on a model of 20 layers."""

FEW_STEPS = 20
"""With room for fewer steps than this, the forecast says what to do about it."""


class RecordedBytes(NamedTuple):
    """What was recorded so far: bytes of values, which are exact, and rows, whose bytes are estimated."""

    values: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.values + ROW_BYTES * self.rows


class DiskForecast(NamedTuple):
    """How many more steps like the first one fit, as a number and as a sentence."""

    steps: int
    sentence: str

    @property
    def is_tight(self) -> bool:
        return self.steps < FEW_STEPS


def forecast(step: RecordedBytes, folder: Path, max_bytes: int | None, ranks: int) -> DiskForecast:
    """How many more steps fit, if each takes as much as `step` on each of so many ranks. Raises OSError of the disk."""
    free = shutil.disk_usage(folder).free
    more, room = free // max(step.nbytes * ranks, 1), f"the {sized(free)} that are free at {folder}"
    if max_bytes is not None and max_bytes // max(step.values, 1) - 1 < more:
        more, room = max(max_bytes // max(step.values, 1) - 1, 0), f"max_bytes={max_bytes:,}"
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    fit = f"{more:,} more {'fits' if more == 1 else 'fit'} into {room}" if more else f"no more fits into {room}"
    advice = " Record fewer steps or sites, a slice or a sample (`astray help recording`)." if more < FEW_STEPS else ""
    return DiskForecast(more, f"a step takes {sized(step.nbytes)} on the disk{each}; {fit}.{advice}")
