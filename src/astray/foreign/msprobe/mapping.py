"""msprobe's `data_mapping` and `cell_mapping`: which entry or module of NPU is which of bench.

Both sides of a mapped pair of entries get the same new key in both runs, so that an ordinary comparison pairs them. A
mapping of modules becomes one of astray's own.
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
from astray.foreign.msprobe.run_entries import EntryNames
from astray.records import Role
from astray.store import DictionaryColumn, RunData, Table
from astray.store.convert import RankView
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
    if not isinstance(given, Dictionary) or not all(isinstance(name, str) for pair in given.items() for name in pair):
        raise CompareError(f"{name} is {given!r}. It maps names of the NPU's dump to names of the bench's.")
    return dict(given)


def of_modules(given: Any) -> Mapping | None:
    """A `cell_mapping`: `fc2.Dense: fc2.Linear`, a module's path and class."""
    cells = mapping_in(given, "cell_mapping")
    if not cells:
        return None
    sites, types = {}, {}
    for npu, bench in cells.items():
        (npu_path, _, npu_class), (bench_path, _, bench_class) = (
            cell.removeprefix("Module.").removeprefix("Cell.").rpartition(".") for cell in (npu, bench)
        )
        if not npu_path or not bench_path:
            raise CompareError(
                f"cell_mapping has {npu!r}: {bench!r}. Write the path of a module and its class: fc.Linear."
            )
        sites[npu_path] = bench_path
        types[npu_class] = bench_class
    return Mapping(sites, types={npu: bench for npu, bench in types.items() if npu != bench})


def renamed(npu: RunData, bench: RunData, mapping: dict[str, str]) -> tuple[RunData, RunData]:
    """Both runs, with a common key for each mapped pair: the name of the bench's entry."""
    used: set[str] = set()
    ranks = {
        number: _rename_ranks(rank, bench.ranks[number], mapping, used)
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


def _rename_ranks(npu: RankRun, bench: RankRun, mapping: dict[str, str], used: set[str]) -> tuple[RankRun, RankRun]:
    """One rank of both runs with the common keys. Adds the names of the mapping that occur to `used`."""
    npu_names, bench_names = EntryNames(npu), EntryNames(bench)
    npu_keys, bench_keys = _NewKeys(), _NewKeys()
    for step, entry in npu_names.calls:
        target = mapping.get(entry)
        if target is not None and (step, target) in bench_names.calls:
            npu_keys.calls[npu_names.calls[step, entry]] = target
            bench_keys.calls[bench_names.calls[step, target]] = target
            used.add(entry)
    bench_rows = {
        (step, name.full): row for row, (step, name) in enumerate(zip(_steps(bench), bench_names.tensors, strict=True))
    }
    for row, (step, name) in enumerate(zip(_steps(npu), npu_names.tensors, strict=True)):
        bench_row = bench_rows.get((step, mapping.get(name.full, "")))
        if bench_row is not None:
            key = mapping[name.full], bench.tensors["role"][bench_row]
            npu_keys.tensors[row] = bench_keys.tensors[bench_row] = key
            used.add(name.full)
    return (
        RankRun(npu.rank, RankView(npu, *npu_keys.apply(npu))),
        RankRun(bench.rank, RankView(bench, *bench_keys.apply(bench))),
    )


def _steps(rank: RankRun) -> list[int]:
    """The step of each tensor."""
    steps: list[int] = rank.calls.numbers("step")[rank.call_rows].tolist()
    return steps


class _NewKeys:
    """The new keys of rows of one rank. A tensor with a new key gets a call of its own.

    calls: the key by row of `calls`. tensors: by row of `tensors`, the key and the role that both sides get.
    """

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.tensors: dict[int, tuple[str, Role]] = {}

    def apply(self, rank: RankRun) -> tuple[Table, Table]:
        """The tables of calls and tensors with these keys."""
        count, rows = len(rank.calls), sorted(self.tensors)
        owner_rows = rank.call_rows[np.array(rows, np.intp)]
        calls = rank.calls.take(np.concatenate([np.arange(count), owner_rows]))
        seqs = calls.numbers("seq").copy()
        seqs[count:] = seqs.max(initial=0) + 1 + np.arange(len(rows))
        keys = self.calls | {count + at: self.tensors[row][0] for at, row in enumerate(rows)}
        columns = _key_columns(calls, keys, of_tensors=range(count, count + len(rows))) | {"seq": seqs}
        words = {name: rank.tensors.coded(name).tolist() for name in ("role", "path")}
        owners = rank.tensors.numbers("seq").copy()
        for at, row in enumerate(rows):
            owners[row] = seqs[count + at]
            words["role"][row], words["path"][row] = self.tensors[row][1], "out"
        coded = {name: DictionaryColumn.of(column) for name, column in words.items()}
        return _replaced(calls, columns), _replaced(rank.tensors, {"seq": owners, **coded})


def _key_columns(calls: Table, keys: dict[int, str], of_tensors: range) -> dict[str, Any]:
    """The columns that make up a key. Calls made for single tensors get the same phase on both sides."""
    fixed = {"kind": "custom", "type": ""}
    words = {name: calls.coded(name).tolist() for name in ("kind", "site", "type", "phase")}
    numbers = {name: calls.numbers(name).copy() for name in ("micro", "call")}
    for row, key in keys.items():
        for name in ("kind", "site", "type"):
            words[name][row] = fixed.get(name, key)
        for column in numbers.values():
            column[row] = 0
    for row in of_tensors:
        words["phase"][row] = "forward"
    return {name: DictionaryColumn.of(column) for name, column in words.items()} | numbers


def _replaced(table: Table, columns: dict[str, Any]) -> Table:
    replaced = copy.copy(table)
    replaced.columns = {**table.columns, **columns}
    return replaced
