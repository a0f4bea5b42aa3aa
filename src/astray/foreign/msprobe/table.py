"""A comparison as msprobe's table: its columns, in its order, and Result in its words.

The numbers are those of the comparison. NPU is the candidate, Bench the reference. Result is the verdict: what agrees
is a pass, what is wrong an error, and what cannot be judged or is on one side only a warning; Err_message says why.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from astray.comparison.comparison import ComparisonData
from astray.comparison.verdict import AGREEING, BAD, LABELS
from astray.foreign.msprobe.run_entries import TENSOR, EntryName, Names, ScalarArguments
from astray.store import RunData
from astray.wording import as_utf8

Mode = Literal["all", "summary", "md5"]
Cell = str | float | int | bool

MISSING = "N/A"
UNSUPPORTED = "unsupported"
NAN = "Nan"  # as msprobe writes the difference of a statistic that is NaN on one side

BASIC = (
    "NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape",
    "NPU Requires_grad", "Bench Requires_grad",
)  # fmt: skip
METRICS = {
    "Cosine": "cosine",
    "EucDist": "euclidean",
    "MaxAbsErr": "max_abs",
    "MaxRelativeErr": "max_rel",
    "One Thousandth Err Ratio": "within_1e3",
    "Five Thousandths Err Ratio": "within_5e3",
}
"""The metrics of values, and astray's names of them."""

_SAME = {"cosine": 1.0, "within_1e3": 1.0, "within_5e3": 1.0}  # of tensors with the same bits; the others are 0
DIFFERENCES = (
    "Max diff", "Min diff", "Mean diff", "L2norm diff",
    "MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr",
)  # fmt: skip
STATISTICS = ("max", "min", "mean", "l2")
SUMMARY = (
    "NPU max", "NPU min", "NPU mean", "NPU l2norm", "Bench max", "Bench min", "Bench mean", "Bench l2norm",
)  # fmt: skip
CHECKSUMS = ("NPU MD5", "BENCH MD5")
JUDGED = ("Requires_grad Consistent", "Result", "Err_message")
STACK, DATA = "NPU_Stack_Info", "Data_name"

_WORDS = {LABELS[one]: "pass" for one in AGREEING} | {LABELS[one]: "error" for one in BAD}
_ORDER = {"input": 0, "parameter": 1, "output": 2}


def header(mode: Mode, stacks: bool) -> list[str]:
    """The names of the columns."""
    middle = {"all": (*METRICS, *SUMMARY), "summary": (*DIFFERENCES, *SUMMARY), "md5": CHECKSUMS}[mode]
    return [*BASIC, *middle, *JUDGED, *([STACK] if stacks else []), *([DATA] if mode == "all" else [])]


class _TableSide(NamedTuple):
    """One side of a pair."""

    rank: int
    row: int
    name: EntryName


class MsprobeTable:
    """The rows of a comparison. Each is a list of cells in the order of `header`.

    npu, bench: the two runs under their own names, where a mapping gave them others.
    """

    def __init__(self, comparison: ComparisonData, mode: Mode, npu: RunData, bench: RunData) -> None:
        self.comparison, self.mode = comparison, mode
        self._names = [{number: Names(rank) for number, rank in run.ranks.items()} for run in (npu, bench)]
        pairs = comparison.pairs
        self._rank, self._step = pairs.numbers("rank").tolist(), pairs.numbers("step").tolist()
        self._rows = [pairs.numbers(f"row_{side}").tolist() for side in ("candidate", "reference")]
        self.stacks = any(
            len(rank.calls) and rank.calls.valid("stack").any() for rank in comparison.candidate.ranks.values()
        )
        self._cells = {name: _listed(comparison, name) for name in self._wanted()}
        runs = (comparison.candidate, comparison.reference)
        self._requires: list[dict[int, list[bool]]] = [
            {number: rank.tensors["requires_grad"].tolist() for number, rank in run.ranks.items()} for run in runs
        ]
        self._kept: list[dict[int, list[bool]]] = [
            {number: (rank.tensors.numbers("blob_file") >= 0).tolist() for number, rank in run.ranks.items()}
            for run in runs
        ]
        self._arguments = [
            {number: ScalarArguments(rank) for number, rank in run.ranks.items() if len(rank.calls)} for run in runs
        ]
        self._same_format = npu.info.framework == bench.info.framework and is_dump(npu) == is_dump(bench)
        self._forms: dict[tuple[int, ...], str] = {}
        self._first = {_place(comparison, one): one for one in (*comparison.firsts, *comparison.others)}

    def _wanted(self) -> list[str]:
        sides = ("candidate", "reference")
        form = [
            f"{name}_{side}" for name in ("dtype", "shape", *STATISTICS, "nan", "inf", "fingerprint") for side in sides
        ]
        return [*form, *METRICS.values(), "nonfinite_mismatch", "verdict", "error", "limit", "reason", "source", "role"]

    def groups(self) -> dict[tuple[int, int], list[int]]:
        """The rows of each rank and step, ordered as a dump has its entries: a module after what is inside it."""
        names = [self._side(0, at) or self._side(1, at) for at in range(len(self._rank))]
        last: dict[tuple[int, int, str], int] = {}
        for at, side in enumerate(names):
            assert side is not None, "a pair has a side"
            last[self._rank[at], self._step[at], side.name.entry] = at
        found: dict[tuple[int, int], list[int]] = {}
        for at in range(len(names)):
            found.setdefault((self._step[at], self._rank[at]), []).append(at)

        def order(at: int) -> tuple[int, int, int]:
            side = names[at]
            assert side is not None
            entry = last[self._rank[at], self._step[at], side.name.entry]
            return entry, _ORDER.get(self._cells["role"][at], 3), at

        return {key: sorted(rows, key=order) for key, rows in sorted(found.items())}

    def lines(self, rows: list[int]) -> Iterator[list[Cell]]:
        """These rows as cells."""
        told: set[str] = set()
        entry, waiting = None, deque[ArgumentPair | str]()
        for at in rows:
            npu, bench = self._side(0, at), self._side(1, at)
            side = npu or bench
            assert side is not None, "a pair has a side"
            if side.name.entry != entry:
                yield from self._scalar_lines(waiting)
                entry, waiting = side.name.entry, self._arguments_of(npu, bench)
            if waiting:  # a tensor's place among them, or the end of them
                yield from self._scalar_lines(waiting, until=side.name.full)
            yield [
                *self._basic(at, npu, bench),
                *self._middle(at, npu, bench),
                *self._judged(at, npu, bench),
                *([self._stack(npu, told)] if self.stacks else []),
                *([self._data_name(npu, bench)] if self.mode == "all" else []),
            ]
        yield from self._scalar_lines(waiting)

    def _arguments_of(self, npu: _TableSide | None, bench: _TableSide | None) -> deque[ArgumentPair | str]:
        """The arguments of the call of an entry in their order: those that are not tensors, and the names of those."""
        found: deque[ArgumentPair | str] = deque()
        if npu is None or npu.rank not in self._arguments[0]:
            return found
        theirs = {}
        if bench is not None and bench.rank in self._arguments[1]:
            theirs = {one.path: one.value for one in self._arguments[1][bench.rank].of(bench.row)}
        for one in self._arguments[0][npu.rank].of(npu.row):
            name = f"{npu.name.entry}.input.{one.path}"
            is_there = bench is not None and one.path in theirs and theirs[one.path] != TENSOR
            if one.value == TENSOR:
                found.append(name)
            elif is_there and bench is not None:
                other = f"{bench.name.entry}.input.{one.path}"
                found.append(ArgumentPair(name, other, one.value, theirs[one.path]))
            elif self._same_format:  # else another tool has written down other arguments
                found.append(ArgumentPair(name, "", one.value, None))
        return found

    def _scalar_lines(self, waiting: deque[ArgumentPair | str], until: str | None = None) -> Iterator[list[Cell]]:
        """Rows of arguments that come before a tensor; all that are left where it is not among them."""
        if until is not None and until in waiting and until != waiting[0]:
            while waiting[0] != until:
                one = waiting.popleft()
                if isinstance(one, ArgumentPair):
                    yield one.cells(self.mode, self.stacks)
        if until is None or until not in waiting:
            while waiting:
                one = waiting.popleft()
                if isinstance(one, ArgumentPair):
                    yield one.cells(self.mode, self.stacks)
        elif waiting[0] == until:
            waiting.popleft()

    def _run(self, which: int) -> RunData:
        return self.comparison.reference if which else self.comparison.candidate

    def _side(self, which: int, at: int) -> _TableSide | None:
        row, rank = self._rows[which][at], self._rank[at]
        return None if row < 0 else _TableSide(rank, row, self._names[which][rank].tensors[row])

    def _basic(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        found: list[Cell] = [MISSING if one is None else self._name(one) for one in (npu, bench)]
        dtypes = [self._cells[f"dtype_{side}"][at] for side in ("candidate", "reference")]
        shapes = [self._cells[f"shape_{side}"][at] for side in ("candidate", "reference")]
        found += [MISSING if dtype is None else f"torch.{dtype}" for dtype in dtypes]
        found += [MISSING if shape is None else self._form(shape) for shape in shapes]
        return [*found, *(MISSING if one is None else one for one in self._grads(npu, bench))]

    def _form(self, shape: tuple[int, ...]) -> str:
        """A shape in words, of which there are few."""
        found = self._forms.get(shape)
        if found is None:
            found = self._forms[shape] = str(list(shape))
        return found

    def _name(self, side: _TableSide) -> str:
        """As msprobe has it: of values by their file, which knows arguments by keyword, and else without."""
        return side.name.file if self.mode == "all" else side.name.full

    def _grads(self, npu: _TableSide | None, bench: _TableSide | None) -> list[bool | None]:
        return [
            None if side is None else self._requires[which][side.rank][side.row]
            for which, side in enumerate((npu, bench))
        ]

    def _middle(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        matched = npu is not None and bench is not None
        if self.mode == "md5":
            prints = [self._cells[f"fingerprint_{side}"][at] for side in ("candidate", "reference")]
            return [MISSING if one is None else f"{one:08x}" for one in prints]  # CRC-32; astray's own are longer
        statistics = [[self._cells[f"{name}_{side}"][at] for name in STATISTICS] for side in ("candidate", "reference")]
        summary: list[Cell] = [MISSING if one is None else one for side in statistics for one in side]
        if self.mode == "summary":
            if matched and self._is_odd(at):
                return [*([NAN] * len(DIFFERENCES)), *summary]
            return [*(_differences(*statistics) if matched else [MISSING] * len(DIFFERENCES)), *summary]
        if not matched or self._cells["nonfinite_mismatch"][at]:
            return [*([MISSING] * len(METRICS)), *summary]  # msprobe has no number either where NaN is on one side
        same = self._cells["verdict"][at] == "identical"
        return [*(self._metric(name, at, same) for name in METRICS.values()), *summary]

    def _is_odd(self, at: int) -> bool:
        """Whether one side has other counts of NaN and infinity: its statistics are then of other elements.

        Where a dump does not count them, extremes that are not there tell.
        """
        bad = [
            (self._bad(side, at), *(self._cells[f"{name}_{side}"][at] is None for name in ("min", "max")))
            for side in ("candidate", "reference")
        ]
        return bad[0] != bad[1]

    def _metric(self, name: str, at: int, same: bool) -> Cell:
        found = self._cells[name][at]
        if found is not None:
            return float(found)
        return _SAME.get(name, 0.0) if same else UNSUPPORTED

    def _judged(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        grads = self._grads(npu, bench)
        consistent = None if None in grads else grads[0] == grads[1]
        result, messages = self.verdict(at)
        if consistent is False:
            result = "warning" if result == "pass" else result
            messages.append(f"requires_grad is {grads[0]} in NPU and {grads[1]} in Bench")
        return [MISSING if consistent is None else consistent, result, json.dumps(messages, ensure_ascii=False)]

    def verdict(self, at: int) -> tuple[str, list[str]]:
        """The result of a row in msprobe's words, and what there is to say of it."""
        label = self._cells["verdict"][at]
        result = _WORDS.get(label, "warning")
        messages = []
        if label.startswith("only in"):
            here = "NPU" if label.endswith("candidate") else "Bench"
            other = "Bench" if here == "NPU" else "NPU"
            messages.append(f"only in {here}: {other} has no such tensor")
        elif result != "pass":
            error, limit = self._cells["error"][at], self._cells["limit"][at]
            far = "" if error is None else f", off by {error:.2g} relative"
            most = "" if error is None or limit is None else _most(limit)
            messages.append(f"{label}{far}{most}")
        if self._cells["reason"][at] and result != "pass":
            messages.append(self._cells["reason"][at])
        for side, name in (("candidate", "NPU"), ("reference", "Bench")):
            bad = [f"{count} {word}" for word, count in self._bad(side, at) if count]
            if bad and result != "pass":
                messages.append(f"{name} has {' and '.join(bad)}")
        first = self._first.get(at)
        if first is not None:
            messages.insert(0, f"a divergence begins here: {first.cause}")
        return result, messages

    def _bad(self, side: str, at: int) -> list[tuple[str, int]]:
        return [(word, self._cells[f"{name}_{side}"][at] or 0) for word, name in (("NaN", "nan"), ("Inf", "inf"))]

    def _stack(self, npu: _TableSide | None, told: set[str]) -> Cell:
        """The lines that an entry was called from, at its first tensor."""
        if npu is None or npu.name.entry in told:
            return MISSING
        told.add(npu.name.entry)
        stack = self._names[0][npu.rank].stacks[npu.row]
        frames = self.comparison.candidate.ranks[npu.rank].stack(stack) if stack is not None else []
        lines = [f"File {one.file}, line {one.line}, in {one.function}, \n {one.code}" for one in frames]
        return str(lines) if lines else MISSING

    def _data_name(self, npu: _TableSide | None, bench: _TableSide | None) -> Cell:
        found = []
        for which, side in enumerate((npu, bench)):
            kept = side and self._kept[which][side.rank][side.row]
            found.append(f"{side.name.file}.pt" if side and kept else MISSING)
        return str(found)


def is_dump(run: RunData) -> bool:
    """Whether a run was read from files of msprobe, which have arguments as they were given."""
    return any(hasattr(rank, "entries") for rank in run.ranks.values())


def _place(comparison: ComparisonData, divergence: Any) -> int:
    """The row of a divergence, −1 when it has none of its own."""
    pairs, place = comparison.pairs, divergence.place
    found = pairs.numbers("rank") == divergence.rank
    for name in ("step", "micro", "call"):
        found = found & (pairs.numbers(name) == getattr(place, name))
    for name in ("site", "phase", "role", "path"):
        column = pairs.coded(name)
        found = found & (column.codes == column.code(getattr(place, name)))
    at = np.flatnonzero(found & (pairs.numbers("recompute") == place.recompute))
    return int(at[0]) if len(at) else -1


def _listed(comparison: ComparisonData, name: str) -> list[Any]:
    """A column as objects, what is not known as None."""
    cells = comparison.columns[name]
    found = cells.column.tolist()
    return [cell if known else None for cell, known in zip(found, cells.known.tolist(), strict=True)]


def _differences(npu: list[float | None], bench: list[float | None]) -> list[Cell]:
    """What each statistic is off by, and in percent of the bench's."""
    absolute: list[Cell] = []
    relative: list[Cell] = []
    for ours, theirs in zip(npu, bench, strict=True):
        if ours is None or theirs is None:
            absolute.append(MISSING)
            relative.append(MISSING)
            continue
        difference = ours - theirs
        absolute.append(difference)
        known = theirs and math.isfinite(difference)
        relative.append(f"{abs(difference / theirs) * 100}%" if known and difference else MISSING if difference else 0)
    return [*absolute, *relative]


def _most(limit: float) -> str:
    return f" where no more than {limit:.2g} can be explained" if limit else " where nothing may differ"


# -- arguments that are not tensors ------------------------------------------------------------------------------------

NO_FILES = str(["-1", "-1"])


class ArgumentPair(NamedTuple):
    """One argument on both sides. A side without it has no name."""

    npu: str
    bench: str
    value: Any
    other: Any

    def cells(self, mode: str, stacks: bool) -> list[Cell]:
        """A row of the table."""
        agrees = bool(self.bench) and self.value == self.other and type(self.value) is type(self.other)
        messages = [] if agrees else [self._difference()]
        result = "pass" if agrees else "error" if self.bench else "warning"
        forms = [_class_and_shape(self.value), _class_and_shape(self.other) if self.bench else (MISSING, MISSING)]
        found: list[Cell] = [self.npu, self.bench or MISSING]
        found += [forms[0][0], forms[1][0], forms[0][1], forms[1][1], MISSING, MISSING]
        found += self._middle(mode, agrees)
        found += [True if self.bench else MISSING, result, json.dumps(messages, ensure_ascii=False)]
        return [*found, *([MISSING] if stacks else []), *([NO_FILES] if mode == "all" else [])]

    def _difference(self) -> str:
        if not self.bench:
            return "only in NPU: Bench has no such argument"
        return f"the argument is {self.value!r} in NPU and {self.other!r} in Bench"

    def _middle(self, mode: str, agrees: bool) -> list[Cell]:
        sides = [self.value, *([self.other] if self.bench else [])]
        if mode == "md5":
            prints: list[Cell] = [f"{zlib.crc32(as_utf8(str(one))):08x}" for one in sides]
            return [*prints, *([MISSING] * (2 - len(sides)))]
        summary: list[Cell] = [_shown(one) for one in sides for _ in range(4)]
        summary += [MISSING] * (8 - len(summary))
        if mode == "all":
            return [*([UNSUPPORTED if self.bench else MISSING] * 6), *summary]
        return [*_argument_differences(self.value, self.other, agrees), *summary]


def _argument_differences(value: Any, other: Any, agrees: bool) -> list[Cell]:
    if agrees:
        return [0] * 8
    numbers = [one for one in (value, other) if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(numbers) < 2:
        return [MISSING] * 8
    difference = numbers[0] - numbers[1]
    relative = f"{abs(difference / numbers[1]) * 100}%" if numbers[1] else MISSING
    return [*([difference] * 4), *([relative] * 4)]


def _class_and_shape(value: Any) -> tuple[str, str]:
    """What stands for the dtype and the shape of an argument."""
    if value is None:
        return MISSING, MISSING
    if _is_size(value):
        return "torch.Size", value[len("torch.Size(") : -1]
    return f"<class '{type(value).__name__}'>", "[]"


def _shown(value: Any) -> Cell:
    return "None" if value is None or _is_size(value) else value


def _is_size(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("torch.Size(")
