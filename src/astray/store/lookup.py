"""Finds the row of a tensor by its key, and says what is there instead when there is none."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from astray.errors import RunError
from astray.records import Key
from astray.store.columns import Coded, Column

if TYPE_CHECKING:
    from astray.store.run import RankRun

CALL_FIELDS = ("site", "step", "micro", "phase", "call")
TENSOR_FIELDS = ("role", "path")
SUGGESTIONS = 5


def describe(key: Key) -> str:
    """The key in words."""
    return f"{key.role} {key.path} of {key.site} ({key.phase} call {key.call}, step {key.step}, micro {key.micro})"


def find(rank: RankRun, key: Key, where: str) -> int:
    """The row of `key` in the tensors of `rank`.

    Activation checkpointing makes the same call twice; the first run of it is meant.
    """
    call_rows = rank.call_rows
    rows = np.flatnonzero(call_rows >= 0)
    for field in CALL_FIELDS:
        rows = _narrow(rank.calls[field], rows, call_rows[rows], key, field, where)
    for field in TENSOR_FIELDS:
        rows = _narrow(rank.tensors[field], rows, rows, key, field, where)
    again = rank.calls.numbers("recompute")[call_rows[rows]]
    return int(rows[np.argmin(again)])


def _narrow(
    column: Column, rows: npt.NDArray[Any], at: npt.NDArray[Any], key: Key, field: str, where: str
) -> npt.NDArray[Any]:
    """Keep the rows whose `column`, looked up `at` their places, has the key's value."""
    wanted = getattr(key, field)
    cells = column.codes[at] if isinstance(column, Coded) else column[at]
    kept: npt.NDArray[Any] = rows[cells == (column.code(wanted) if isinstance(column, Coded) else wanted)]
    if len(kept):
        return kept
    present = np.unique(cells).tolist()
    found = [column.values[code] for code in present] if isinstance(column, Coded) else present
    raise RunError(f"{where} has no {describe(key)}: {_instead(field, wanted, found)}")


def _instead(field: str, wanted: Any, found: list[Any]) -> str:
    """What there is in place of a value that is not there."""
    if not found:
        return "no tensors were recorded."
    if isinstance(wanted, str):
        near = difflib.get_close_matches(wanted, found, SUGGESTIONS, cutoff=0.0)
        return f"there is no {field} {wanted!r}. Nearest: {', '.join(map(repr, near))}."
    if found[-1] - found[0] == len(found) - 1:
        span = f"{found[0]}–{found[-1]}" if len(found) > 1 else f"only {found[0]}"
    else:
        span = ", ".join(map(str, found[:SUGGESTIONS])) + (" …" if len(found) > SUGGESTIONS else "")
    return f"there is no {field} {wanted}; recorded: {span}."
