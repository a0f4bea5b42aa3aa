"""Ranks of one run that should hold the same, compared and reported: `astray compare RUN --replicas`.

Data-parallel ranks see different data, but keep the same weights: their parameters, and everything an optimizer reads
and writes, agree to the bit, step for step. The first tensor that does not shows when a rank diverged from its
replicas, and what most ranks hold says which rank that is. A sharded tensor is not a replica, and is left out.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from astray.comparison.divergence import TensorPlace
from astray.comparison.problems import span
from astray.comparison.rows import Bools, Ints, Rows, StringTable, Vocabularies, read_rows
from astray.errors import CompareError
from astray.graph.keys import number_repeats, one_key
from astray.steps import StepSelection
from astray.store import RunData, open_run
from astray.wording import counted, printable

Groups = tuple[tuple[int, ...], ...]
"""Ranks that hold the same, the largest group first."""

KEY = ("step", "micro", "site", "call", "phase", "again", "role", "path")


WIDTH = 100


@dataclass(frozen=True)
class Disagreement:
    """A tensor that is not the same on all ranks that have it. `groups` has equal ranks together, the most first."""

    place: TensorPlace
    groups: Groups

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that do not hold what most hold; none when there is no majority."""
        return odd_ones(self.groups)


@dataclass(frozen=True)
class Replicas:
    """What came of comparing the ranks of one run.

    compared: how many tensors are on more than one rank. different: how many of those disagree. alone: how often each
    rank does not hold what most hold.
    """

    run: RunData
    compared: int
    different: int
    first: Disagreement | None
    alone: dict[int, int]

    @property
    def same(self) -> bool:
        return not self.different

    @property
    def exit_code(self) -> int:
        """What the command line ends with: 0 all the same, 1 different."""
        return 0 if self.same else 1

    def __str__(self) -> str:
        return render(self)


def compare_replicas(
    run: str | RunData, *, steps: str | Sequence[int] | None = None, sites: str | None = None
) -> Replicas:
    """Compare the ranks of one run with each other. Raises CompareError when there is nothing that two ranks have."""
    from astray.comparison.pair.matching import Matching

    opened = run if isinstance(run, RunData) else open_run(run)
    if len(opened.ranks) < 2:
        raise CompareError(f"{opened.path} has one rank, {min(opened.ranks, default=0)}; replicas take two.")
    matching = Matching.check(steps=steps, sites=sites, by="key")
    vocabularies: Vocabularies = defaultdict(StringTable)
    ranks = {
        rank: _shared(read_rows(one, vocabularies, matching.of_reference()), vocabularies)
        for rank, one in sorted(opened.ranks.items())
    }
    found = _SharedRows.of(ranks)
    if not len(found.key):
        raise CompareError(
            f"No two ranks of {opened.path} have the same parameter or optimizer tensor"
            f"{_among(matching.steps)}, so there is nothing to compare. Record parameters, or the update phase."
        )
    return _judged(opened, found, ranks, vocabularies)


def odd_ones(groups: Groups) -> tuple[int, ...]:
    """The ranks that do not hold what most hold; none when there is no majority.

    >>> odd_ones(((0, 1, 3), (2,))), odd_ones(((0, 1), (2, 3)))
    ((2,), ())
    """
    if len(groups[0]) == len(groups[1]):
        return ()
    return tuple(sorted(rank for group in groups[1:] for rank in group))


class _SharedRows:
    """Rows that more than one rank has, sorted by key: which key, which rank, which row there, which bits."""

    def __init__(self, key: Ints, rank: Ints, row: Ints, bits: Ints) -> None:
        self.key, self.rank, self.row, self.bits = key, rank, row, bits

    @classmethod
    def of(cls, ranks: dict[int, Rows]) -> _SharedRows:
        key = one_key([np.concatenate([rows.columns[name] for rows in ranks.values()]) for name in KEY])
        ends = np.cumsum([len(rows) for rows in ranks.values()])[:-1]
        key = one_key([key, np.concatenate([number_repeats(part) for part in np.split(key, ends)])])
        rank = np.concatenate([np.full(len(rows), number) for number, rows in ranks.items()])
        row = np.concatenate([np.arange(len(rows)) for rows in ranks.values()])
        bits = np.concatenate([_bits(rows) for rows in ranks.values()])
        order = np.lexsort((rank, key))
        key, rank, row, bits = key[order], rank[order], row[order], bits[order]
        _, number, counts = np.unique(key, return_inverse=True, return_counts=True)
        several = counts[number] > 1
        return cls(number[several], rank[several], row[several], bits[several])

    def different(self) -> Ints:
        """The keys whose ranks disagree."""
        keys, first = np.unique(self.key, return_index=True)
        least = np.minimum.reduceat(self.bits, first)
        most = np.maximum.reduceat(self.bits, first)
        return np.asarray(keys[least != most])


def _shared(rows: Rows, vocabularies: Vocabularies) -> Rows:
    """The rows that replicas have in common: parameters and what belongs to an optimizer, unless they are shards."""
    assert rows.run is not None, "it is a rank of the run"
    parameter = rows.columns["role"] == _code(vocabularies["role"], "parameter")
    update = rows.columns["phase"] == _code(vocabularies["phase"], "update")
    whole: Bools = rows.run.tensors.coded("placement").codes[rows.tensor] < 0
    known = rows.known("fingerprint", np.arange(len(rows)))
    kept = np.flatnonzero((parameter | update) & whole & known)
    columns = {name: column[kept] for name, column in rows.columns.items()}
    return Rows(rows.run, rows.tensor[kept], rows.call_row[kept], columns)


def _bits(rows: Rows) -> Ints:
    return np.asarray(rows.statistic("fingerprint", np.arange(len(rows))), np.uint64)


def _judged(run: RunData, shared: _SharedRows, ranks: dict[int, Rows], vocabularies: Vocabularies) -> Replicas:
    different = shared.different()
    starts, ends = np.searchsorted(shared.key, different), np.searchsorted(shared.key, different, side="right")
    groups = [_groups(shared, slice(*ends_of)) for ends_of in zip(starts.tolist(), ends.tolist(), strict=True)]
    alone: dict[int, int] = dict.fromkeys(ranks, 0)
    for ranks_by_bits in groups:
        for rank in odd_ones(ranks_by_bits):
            alone[rank] += 1
    first = None
    if groups:
        steps = np.array([int(ranks[int(shared.rank[at])].columns["step"][shared.row[at]]) for at in starts.tolist()])
        earliest = int(np.lexsort((shared.row[starts], steps))[0])
        first = Disagreement(_place(shared, int(starts[earliest]), ranks, vocabularies), groups[earliest])
    return Replicas(run, len(np.unique(shared.key)), len(groups), first, alone)


def _groups(shared: _SharedRows, at: slice) -> Groups:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, bits in zip(shared.rank[at].tolist(), shared.bits[at].tolist(), strict=True):
        groups[bits].append(rank)
    return tuple(sorted((tuple(group) for group in groups.values()), key=lambda group: (-len(group), group)))


def _place(shared: _SharedRows, at: int, ranks: dict[int, Rows], vocabularies: Vocabularies) -> TensorPlace:
    rows, row = ranks[int(shared.rank[at])], int(shared.row[at])
    cells = {name: int(column[row]) for name, column in rows.columns.items()}
    words = {name: _word(vocabularies[name], cells[name]) for name in ("site", "type", "phase", "role", "path")}
    return TensorPlace(
        step=cells["step"],
        micro=cells["micro"],
        call=cells["call"],
        recompute=bool(cells["recompute"]),
        verdict="diverged",
        error=float("nan"),
        reason="bits differ",
        weight=False,
        **words,
    )


def _word(vocabulary: StringTable, code: int) -> str:
    return str(vocabulary.words[code]) if code >= 0 else ""


def _code(vocabulary: StringTable, word: str) -> int:
    return vocabulary.words.index(word) if word in vocabulary.words else -2


def _among(steps: StepSelection) -> str:
    return f" in steps {steps}" if steps else ""


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
