"""Which micro step an entry belongs to, where construct.json does not say: by the order of forward and backward.

A dump counts calls through the whole step. Where the model's first module runs again after a backward, another forward
of the model has begun, which is what astray calls a micro step. Forwards that no backward lies between stay one: they
might be two calls in one forward. Forwards that activation checkpointing makes again begin with another module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from astray.foreign.msprobe.names import Entry


def micro_steps(
    names: Iterable[str], entries: Mapping[str, Entry], parents: Mapping[str, str | None]
) -> dict[str, int]:
    """The micro steps of entries in the order of dump.json; empty where there is but one.

    Backward calls are those of their forward calls, and are not in it.
    """
    known = [name for name in names if name in entries]
    blocks = [
        (backward, list(block)) for backward, block in groupby(known, lambda name: entries[name].phase == "backward")
    ]
    outermost = {name: _outermost(name, entries, parents) for name in known}
    first = next((entry.path for entry in outermost.values() if entry is not None), None)
    found: dict[str, int] = {}
    micro, after_backward, last = 0, False, -1
    for backward, block in blocks:
        numbers = [entry.number for name in block if (entry := outermost[name]) is not None and entry.path == first]
        if after_backward and -1 < last < max(numbers, default=-1):
            micro += 1
        last = max([last, *numbers])
        after_backward |= backward
        found |= {name: micro for name in block if not backward or entries[name].what == "gradient"}
    return found if micro else {}


def _outermost(name: str, entries: Mapping[str, Entry], parents: Mapping[str, str | None]) -> Entry | None:
    """The outermost module around a forward entry; None of others."""
    seen = set()
    while name not in seen and (parent := parents.get(name)) is not None and parent in entries:
        seen.add(name)
        name = parent
    entry = entries[name]
    return entry if entry.what == "module" and entry.phase == "forward" else None
