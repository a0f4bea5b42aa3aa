"""The report of `astray compare RUN --replicas`: which rank went its own way, and with which tensor."""

from __future__ import annotations

import textwrap

from astray.comparison.problems import span
from astray.comparison.ranks.replicas import Disagreement, Replicas
from astray.wording import counted, printable

WIDTH = 100


def render(replicas: Replicas, *, width: int = WIDTH) -> str:
    """The report as text."""
    ranks = span(sorted(replicas.run.ranks))
    path = printable(str(replicas.run.path))
    lines = [f"{path}        ranks {ranks} · {replicas.compared:,} tensors on more than one rank", ""]
    if replicas.first is None:
        return "\n".join([*lines, "✓ All replicas agree to the bit."])
    lines.append(f"✗ {_headline(replicas.first)}")
    lines += ["", f"    first       {printable(replicas.first.place.full)}"]
    for group in replicas.first.groups:
        lines.append(f"    equal       {_ranks(group)}")
    text = f"{counted(replicas.different, 'tensor')} of {replicas.compared:,} differ. {_alone(replicas)}"
    return "\n".join([*lines, "", *textwrap.wrap(text.strip(), width)])


def _headline(first: Disagreement) -> str:
    if first.odd:
        return f"{_ranks(first.odd)} went astray: what the others hold is equal, and this is not."
    return "The replicas differ, and no value is held by most of them."


def _alone(replicas: Replicas) -> str:
    often = {rank: count for rank, count in replicas.alone.items() if count}
    if not often:
        return ""
    parts = [f"rank {rank} {count:,} times" for rank, count in sorted(often.items(), key=lambda item: -item[1])]
    return f"Not what most hold: {', '.join(parts)}."


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {span(list(ranks))}"
