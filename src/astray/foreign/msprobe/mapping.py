"""The user's word on which entry of the NPU is which of the bench: msprobe's `data_mapping` and `cell_mapping`.

Entries that belong together get a key that nothing else has; everything after that is an ordinary comparison. A mapping
of modules is astray's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping as Dictionary
from pathlib import Path
from typing import Any

import numpy as np

from astray.capture.config_file import load
from astray.comparison.pair.mapping import Mapping
from astray.errors import CompareError, RecordError
from astray.foreign.msprobe.run_entries import Names
from astray.records import Role
from astray.store import DictionaryColumn, RunData, Table
from astray.store.convert import RenamedRank
from astray.store.run import RankRun


def mapping_in(given: Any, name: str) -> dict[str, str]:
    """A mapping from NPU's names to the bench's, as a dict or in a YAML file."""
    if not given:
        return {}
    if isinstance(given, str | Path):
        try:
            given = load(given)
        except RecordError as error:
            raise CompareError(f"{name}: {error}") from None
    if not isinstance(given, Dictionary) or not all(isinstance(one, str) for pair in given.items() for one in pair):
        raise CompareError(f"{name} is {given!r}. It maps names of the NPU's dump to names of the bench's.")
    return dict(given)


def of_modules(given: Any) -> Mapping | None:
    """A `cell_mapping`: `fc2.Dense: fc2.Linear`, a module's path and class."""
    found = mapping_in(given, "cell_mapping")
    if not found:
        return None
    sites, types = {}, {}
    for npu, bench in found.items():
        (path, _, cls), (other, _, another) = (
            one.removeprefix("Module.").removeprefix("Cell.").rpartition(".") for one in (npu, bench)
        )
        if not path or not other:
            raise CompareError(
                f"cell_mapping has {npu!r}: {bench!r}. Write the path of a module and its class: fc.Linear."
            )
        sites[path] = other
        types[cls] = another
    return Mapping(sites, types={cls: another for cls, another in types.items() if cls != another})


def renamed(npu: RunData, bench: RunData, mapping: dict[str, str]) -> tuple[RunData, RunData]:
    """Both runs, with one key for what the mapping says is one: the name of the bench's entry."""
    used: set[str] = set()
    ranks = {
        number: _renamed(rank, bench.ranks[number], mapping, used)
        for number, rank in npu.ranks.items()
        if number in bench.ranks
    }
    for name in mapping:
        if name not in used:
            raise CompareError(
                f"data_mapping says {name!r}: {mapping[name]!r}, but one of them is not there. Names are written as in "
                "the columns NPU Name and Bench Name."
            )
    return (
        npu.with_ranks(npu.ranks | {number: pair[0] for number, pair in ranks.items()}),
        bench.with_ranks(bench.ranks | {number: pair[1] for number, pair in ranks.items()}),
    )


def _renamed(rank: RankRun, like: RankRun, mapping: dict[str, str], used: set[str]) -> tuple[RankRun, RankRun]:
    ours, theirs = Names(rank), Names(like)
    keys = _Keys(), _Keys()
    for step, entry in ours.calls:
        target = mapping.get(entry)
        if target is not None and (step, target) in theirs.calls:
            keys[0].calls[ours.calls[step, entry]] = keys[1].calls[theirs.calls[step, target]] = target
            used.add(entry)
    there = {(step, name.full): row for row, (step, name) in enumerate(zip(_steps(like), theirs.tensors, strict=True))}
    for row, (step, name) in enumerate(zip(_steps(rank), ours.tensors, strict=True)):
        other = there.get((step, mapping.get(name.full, "")))
        if other is not None:
            keys[0].tensors[row] = keys[1].tensors[other] = mapping[name.full], like.tensors["role"][other]
            used.add(name.full)
    return (
        RankRun(rank.rank, RenamedRank(rank, *keys[0].given_to(rank))),
        RankRun(like.rank, RenamedRank(like, *keys[1].given_to(like))),
    )


def _steps(rank: RankRun) -> list[int]:
    """The step of each tensor."""
    found: list[int] = rank.calls.numbers("step")[rank.call_rows].tolist()
    return found


class _Keys:
    """The keys that some rows of one rank get. A tensor with a key of its own gets a call of its own, too.

    calls: of rows of calls. tensors: of rows of tensors, with the role that both sides are to have.
    """

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.tensors: dict[int, tuple[str, Role]] = {}

    def given_to(self, rank: RankRun) -> tuple[Table, Table]:
        """The calls and tensors with these keys."""
        count, rows = len(rank.calls), sorted(self.tensors)
        alone = rank.call_rows[np.array(rows, np.intp)]
        calls = rank.calls.take(np.concatenate([np.arange(count), alone]))
        seqs = calls.numbers("seq").copy()
        seqs[count:] = seqs.max(initial=0) + 1 + np.arange(len(rows))
        keys = self.calls | {count + at: self.tensors[row][0] for at, row in enumerate(rows)}
        columns = _with_keys(calls, keys, alone=range(count, count + len(rows))) | {"seq": seqs}
        words = {name: rank.tensors.coded(name).tolist() for name in ("role", "path")}
        owners = rank.tensors.numbers("seq").copy()
        for at, row in enumerate(rows):
            owners[row] = seqs[count + at]
            words["role"][row], words["path"][row] = self.tensors[row][1], "out"
        coded = {name: DictionaryColumn.of(column) for name, column in words.items()}
        return _replaced(calls, columns), _replaced(rank.tensors, {"seq": owners, **coded})


def _with_keys(calls: Table, keys: dict[int, str], alone: range) -> dict[str, Any]:
    """The columns of a key. What stands alone is of one phase on both sides, whatever it was a part of."""
    told = {"kind": "custom", "type": ""}
    words = {name: calls.coded(name).tolist() for name in ("kind", "site", "type", "phase")}
    numbers = {name: calls.numbers(name).copy() for name in ("micro", "call")}
    for row, key in keys.items():
        for name in ("kind", "site", "type"):
            words[name][row] = told.get(name, key)
        for column in numbers.values():
            column[row] = 0
    for row in alone:
        words["phase"][row] = "forward"
    return {name: DictionaryColumn.of(column) for name, column in words.items()} | numbers


def _replaced(table: Table, columns: dict[str, Any]) -> Table:
    found = copy.copy(table)
    found.columns = {**table.columns, **columns}
    return found
