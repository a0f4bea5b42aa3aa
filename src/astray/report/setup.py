"""What was set differently in two runs: the first lines of every report, and the table of `astray compare --setup`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from astray.comparison.comparison import ComparisonData
from astray.comparison.select.pairs import natural
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.setup.wording import subject_text
from astray.formatting.page import BOLD, DIM, MARGIN, WIDTH, YELLOW, TextPage, TextTable
from astray.records import ROOT
from astray.store import RunData
from astray.wording import counted

MOST = 5
"""How many differences a report shows before anything else."""

_OF_OPTIMIZERS = ("lr", "betas", "momentum", "eps", "weight_decay")
_EFFECTS = {"changes results": "results", "changes rounding": "rounding", "none known": "none known"}
_LEAST = {"what": 24, "reference": 12, "candidate": 12}
_LEAST_OF_ALL = {"what": 16, "name": 8, "reference": 9, "candidate": 9}


def add_setup(page: TextPage, comparison: ComparisonData) -> None:
    """Adds what was set differently to the page: at most `MOST` lines, those first that change results."""
    relevant = [difference for difference in comparison.setup if difference.expected_effect != "none known"]
    rest = len(comparison.setup) - len(relevant[:MOST])
    if not comparison.setup:
        return
    if relevant:
        first, *others = relevant[:MOST]
        for line in page.folded(f"Set differently: {with_ranks(first, comparison)}", later_indent=" " * MARGIN):
            page.line(page.paint(line, YELLOW))
        page.entry("also", [with_ranks(difference, comparison) for difference in others])
    else:
        page.line(f"Set differently: {counted(rest, 'setting')} with no known effect on numbers; --setup lists them.")
    if relevant and rest:
        page.entry("more", f"{_more(comparison.setup, relevant)}; --setup lists them all.")
    page.line()


def _more(setup: Sequence[SetupDifference], relevant: Sequence[SetupDifference]) -> str:
    """How many differences were left out."""
    harmless = len(setup) - len(relevant)
    parts = [f"{len(relevant) - MOST:,} more"] if len(relevant) > MOST else []
    parts += [f"{harmless:,} with no known effect on numbers"] if harmless else []
    return " and ".join(parts)


def with_ranks(difference: SetupDifference, comparison: ComparisonData) -> str:
    """The sentence of a difference, with the ranks that have it unless all have."""
    rank_count = len(set(comparison.reference.ranks) & set(comparison.candidate.ranks))
    if len(difference.ranks) >= rank_count:
        return difference.sentence
    ranks = ", ".join(map(str, difference.ranks))
    return f"{difference.sentence[:-1]}, on rank{'s' * (len(difference.ranks) > 1)} {ranks}."


def render(
    comparison: ComparisonData, *, width: int = WIDTH, table_width: int | None = None, colour: bool = False
) -> str:
    """Everything that was set differently, as a table."""
    page = TextPage(width, colour, table_width)
    page.line(page.paint(f"{comparison.reference.path}  →  {comparison.candidate.path}", BOLD))
    page.line()
    if comparison.setup:
        several = len(comparison.reference.ranks) > 1
        rows = [_cells(difference, several) for difference in comparison.setup]
        words = ("what", "name", "reference", "candidate", "changes", "from")
        head, *body = TextTable(words, ["from"], _LEAST, _LEAST_OF_ALL).lines(rows, page.table_width)
        page.line(page.paint(head, DIM))
        for line in body:
            page.line(line)
    else:
        page.line("Nothing was set differently, as far as both runs tell.")
    for note in unrecorded(comparison):
        page.line()
        for line in page.folded(note):
            page.line(line)
    return page.text()


def _cells(difference: SetupDifference, several: bool) -> dict[str, str]:
    ranks = {"rank": ",".join(map(str, difference.ranks))} if several else {}
    return {
        **ranks,
        "what": difference.subject,
        "name": difference.name,
        "reference": "–" if difference.reference is None else subject_text(difference.reference),
        "candidate": "–" if difference.candidate is None else subject_text(difference.candidate),
        "changes": _EFFECTS[difference.expected_effect],
        "from": "start" if difference.step is None else f"step {difference.step}",
    }


def summary_of(run: RunData) -> str:
    """What a run was set to at its start, in a few words; empty when it has not recorded it."""
    rank = next(iter(run.ranks.values()), None)
    known: dict[str, dict[str, Any]] = {}
    dtypes: Counter[str] = Counter()
    trained: set[str] = set()
    optimized: set[str] = set()
    seen = set()
    for row in rank.setup if rank is not None else ():
        if (row.subject, row.site) in seen:
            continue
        seen.add((row.subject, row.site))
        known.setdefault(row.subject, row.values)
        if row.subject == "module":
            dtypes.update(str(value) for name, value in row.values.items() if name.endswith(".dtype"))
            prefix = "" if row.site == ROOT else f"{row.site}."
            names = (name.removesuffix(".requires_grad") for name, value in row.values.items() if value is True)
            trained.update(prefix + name for name in names if f"{name}.requires_grad" in row.values)
        elif row.subject == "optimizer":
            optimized.update(row.values.get("parameters") or ())
    left = sorted(trained - optimized, key=natural) if optimized else []
    facts = list(_facts(known, dtypes))
    if left:
        facts.append(f"in no optimizer: {', '.join(left[:3])}{f' and {len(left) - 3:,} more' if len(left) > 3 else ''}")
    return " · ".join(facts)


def _facts(known: dict[str, dict[str, Any]], dtypes: Counter[str]) -> Iterator[str]:
    optimizer, torch = known.get("optimizer", {}), known.get("torch", {})
    if optimizer:
        numbers = ", ".join(f"{name} {subject_text(optimizer[name])}" for name in _OF_OPTIMIZERS if optimizer.get(name))
        yield f"{optimizer.get('class', 'an optimizer')} {numbers}".rstrip()
    if dtypes:
        yield ", ".join(f"{count:,} {dtype}" for dtype, count in dtypes.most_common()) + " parameters and buffers"
    if known.get("autocast", {}).get("autocast", "off") != "off":
        yield f"autocast {known['autocast']['autocast']}"
    if torch.get("float32_matmul_precision", "highest") != "highest":
        yield f"matmul precision {torch['float32_matmul_precision']}"
    if torch.get("threads"):
        yield counted(torch["threads"], "thread")
    if known.get("seed", {}).get("torch") is not None:
        yield f"seed {known['seed']['torch']}"


def unrecorded(comparison: ComparisonData) -> Iterator[str]:
    """Which of the runs have not recorded what they were set to."""
    for side, run in (("reference", comparison.reference), ("candidate", comparison.candidate)):
        if not any(rank.setup for rank in run.ranks.values()):
            yield (
                f"The {side} {run.path} has not recorded what it was set to: only arguments, dtypes and what its "
                "description says are compared."
            )
