"""The parts of reports that differ for checkpoints, which have names of tensors, but no steps and no calls.

Read by the listing of a run, the report of a comparison, and the page's list of runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from astray.checkpoints import Checkpoint
from astray.comparison.divergence import Divergence
from astray.formatting import figures
from astray.formatting.page import DIM, MARGIN, TextPage, TextTable
from astray.store import CheckpointData
from astray.wording import sized

MOST = 10
"""How many tensors that differ are listed beneath the one that is furthest off."""


def describe(checkpoint: Checkpoint) -> str:
    """What a checkpoint is, in a line."""
    elements = sum(checkpoint.spec(name).size for name in checkpoint.names)
    facts = [checkpoint.format, figures.counted(len(checkpoint), "tensor"), figures.counted(elements, "element")]
    return " · ".join([*facts, sized(checkpoint.nbytes)])


def unread_reasons(run: CheckpointData, rows: Sequence[int]) -> list[str]:
    """Why some of these rows have no numbers, each reason once."""
    notes = [run.ranks[0].tensors.row(row)["note"] for row in rows]
    return list(dict.fromkeys(note for note in notes if note is not None))


def without_calls(row: Mapping[str, str], reasons: Sequence[str]) -> dict[str, str]:
    """A row of a listing, without the step and the phase that no tensor of a checkpoint has.

    `reasons` are too long for a row and stand below the table.
    """
    renamed = {"site": "name", "tensor": "role"}
    cells = {
        renamed.get(name, name): cell.strip() for name, cell in row.items() if name not in ("step", "phase", "rank")
    }
    return cells | ({"": "unread"} if cells[""] in reasons else {})


def list_worst(page: TextPage, divergences: Sequence[Divergence], total: int) -> None:
    """The tensors that differ, those that are furthest off first."""
    rows = [_cells(divergence) for divergence in divergences[:MOST]]
    head, *body = TextTable(("name", "verdict", "kind"), ("kind", "cosine"), {"name": 24}, {"name": 12}).lines(
        rows, page.table_width - MARGIN
    )
    page.line(" " * MARGIN + page.paint(head, DIM))
    for line in body:
        page.line(" " * MARGIN + line)
    if total > len(rows):
        page.line(" " * MARGIN + f"… {total - len(rows):,} more: --filter 'not agrees' --sort=-error --top 0")
    page.line()


def _cells(divergence: Divergence) -> dict[str, str]:
    forms = [
        f"{figures.dtype(side.dtype)} {figures.shape(side.shape)}"
        for side in (divergence.reference, divergence.candidate)
    ]
    numbers = {"largest": figures.error, "cosine": "{:.6f}".format}
    values = {
        "largest": divergence.metrics.get("max_abs", math.nan),
        "cosine": divergence.metrics.get("cosine", math.nan),
    }
    return {
        "name": divergence.site,
        "verdict": divergence.verdict,
        "error": "–" if math.isnan(divergence.error) else figures.error(divergence.error),
        **{name: "–" if math.isnan(values[name]) else text(values[name]) for name, text in numbers.items()},
        "kind": forms[0] if forms[0] == forms[1] else " → ".join(forms),
    }
