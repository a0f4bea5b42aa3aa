"""A comparison as msprobe's table: its columns in its order, with rows for tensors and for plain arguments.

The numbers are those of the comparison. NPU is the candidate, Bench the reference. Result is the verdict in msprobe's
words: "pass" for what agrees, "error" for what is wrong, "warning" for what cannot be judged or is on one side only;
Err_message has the reason.
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
from astray.foreign.msprobe.leaves import TENSOR_MARK
from astray.foreign.msprobe.run_entries import EntryName, EntryNames, ScalarArguments
from astray.store import RunData
from astray.wording import as_utf8

Mode = Literal["all", "summary", "md5"]
Cell = str | float | int | bool

MISSING = "N/A"
UNSUPPORTED = "unsupported"
NAN = "Nan"  # msprobe's spelling, for the difference of a statistic that is NaN on one side

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

_IDENTICAL = {"cosine": 1.0, "within_1e3": 1.0, "within_5e3": 1.0}  # of equal bits; the other metrics are 0
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

_RESULTS = {LABELS[verdict]: "pass" for verdict in AGREEING} | {LABELS[verdict]: "error" for verdict in BAD}
_ROLE_ORDER = {"input": 0, "parameter": 1, "output": 2}


def header(mode: Mode, stacks: bool) -> list[str]:
    """The names of the columns."""
    middle = {"all": (*METRICS, *SUMMARY), "summary": (*DIFFERENCES, *SUMMARY), "md5": CHECKSUMS}[mode]
    return [*BASIC, *middle, *JUDGED, *([STACK] if stacks else []), *([DATA] if mode == "all" else [])]


class _TableSide(NamedTuple):
    """One side of a pair: a row of `tensors`, and its names."""

    rank: int
    row: int
    name: EntryName


class MsprobeTable:
    """The rows of a comparison: lists of cells in the order of `header`.

    npu, bench: the two runs with their original names, where a mapping has renamed entries for the comparison.
    """

    def __init__(self, comparison: ComparisonData, mode: Mode, npu: RunData, bench: RunData) -> None:
        self.comparison, self.mode = comparison, mode
        self._names = [{number: EntryNames(rank) for number, rank in run.ranks.items()} for run in (npu, bench)]
        pairs = comparison.pairs
        self._rank, self._step = pairs.numbers("rank").tolist(), pairs.numbers("step").tolist()
        self._rows = [pairs.numbers(f"row_{side}").tolist() for side in ("candidate", "reference")]
        self.stacks = any(
            len(rank.calls) and rank.calls.valid("stack").any() for rank in comparison.candidate.ranks.values()
        )
        self._cells = {name: _column(comparison, name) for name in self._column_names()}
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
        self._shape_texts: dict[tuple[int, ...], str] = {}
        self._first = {_pair_row(comparison, first): first for first in (*comparison.firsts, *comparison.others)}

    def _column_names(self) -> list[str]:
        sides = ("candidate", "reference")
        facts = ("dtype", "shape", *STATISTICS, "nan", "inf", "fingerprint")
        of_sides = [f"{name}_{side}" for name in facts for side in sides]
        return [
            *of_sides,
            *METRICS.values(),
            "nonfinite_mismatch",
            "verdict",
            "error",
            "limit",
            "reason",
            "source",
            "role",
        ]

    def groups(self) -> dict[tuple[int, int], list[int]]:
        """The rows of each step and rank in the order of a dump's entries: a module after what is inside it."""
        sides = [self._side(0, at) or self._side(1, at) for at in range(len(self._rank))]
        last: dict[tuple[int, int, str], int] = {}
        for at, side in enumerate(sides):
            assert side is not None, "a pair has a side"
            last[self._rank[at], self._step[at], side.name.entry] = at
        groups: dict[tuple[int, int], list[int]] = {}
        for at in range(len(sides)):
            groups.setdefault((self._step[at], self._rank[at]), []).append(at)

        def order(at: int) -> tuple[int, int, int]:
            side = sides[at]
            assert side is not None
            entry = last[self._rank[at], self._step[at], side.name.entry]
            return entry, _ROLE_ORDER.get(self._cells["role"][at], 3), at

        return {key: sorted(rows, key=order) for key, rows in sorted(groups.items())}

    def lines(self, rows: list[int]) -> Iterator[list[Cell]]:
        """These rows as cells, with a row for each argument that is not a tensor."""
        with_stack: set[str] = set()  # entries whose stack has been written
        entry, waiting = None, deque[ArgumentPair | str]()
        for at in rows:
            npu, bench = self._side(0, at), self._side(1, at)
            side = npu or bench
            assert side is not None, "a pair has a side"
            if side.name.entry != entry:
                yield from self._scalar_lines(waiting)
                entry, waiting = side.name.entry, self._arguments_of(npu, bench)
            if waiting:  # those before this tensor, or the rest of them
                yield from self._scalar_lines(waiting, until=side.name.full)
            yield [
                *self._basic(at, npu, bench),
                *self._middle(at, npu, bench),
                *self._judged(at, npu, bench),
                *([self._stack(npu, with_stack)] if self.stacks else []),
                *([self._data_name(npu, bench)] if self.mode == "all" else []),
            ]
        yield from self._scalar_lines(waiting)

    def _arguments_of(self, npu: _TableSide | None, bench: _TableSide | None) -> deque[ArgumentPair | str]:
        """The arguments of an entry's call in order: pairs of those that are not tensors, names of those that are."""
        arguments: deque[ArgumentPair | str] = deque()
        if npu is None or npu.rank not in self._arguments[0]:
            return arguments
        bench_values = {}
        if bench is not None and bench.rank in self._arguments[1]:
            bench_values = {argument.path: argument.value for argument in self._arguments[1][bench.rank].of(bench.row)}
        for path, value in self._arguments[0][npu.rank].of(npu.row):
            name = f"{npu.name.entry}.input.{path}"
            if value == TENSOR_MARK:
                arguments.append(name)
            elif bench is not None and bench_values.get(path, TENSOR_MARK) != TENSOR_MARK:
                arguments.append(ArgumentPair(name, f"{bench.name.entry}.input.{path}", value, bench_values[path]))
            elif self._same_format:  # otherwise the other tool records other arguments
                arguments.append(ArgumentPair(name, "", value, None))
        return arguments

    def _scalar_lines(self, waiting: deque[ArgumentPair | str], until: str | None = None) -> Iterator[list[Cell]]:
        """The rows of arguments before the tensor `until`; all that are left where it is not among them."""
        if until is not None and until in waiting and until != waiting[0]:
            while waiting[0] != until:
                argument = waiting.popleft()
                if isinstance(argument, ArgumentPair):
                    yield argument.cells(self.mode, self.stacks)
        if until is None or until not in waiting:
            while waiting:
                argument = waiting.popleft()
                if isinstance(argument, ArgumentPair):
                    yield argument.cells(self.mode, self.stacks)
        elif waiting[0] == until:
            waiting.popleft()

    def _side(self, which: int, at: int) -> _TableSide | None:
        row, rank = self._rows[which][at], self._rank[at]
        return None if row < 0 else _TableSide(rank, row, self._names[which][rank].tensors[row])

    def _basic(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        cells: list[Cell] = [MISSING if side is None else self._name(side) for side in (npu, bench)]
        dtypes = [self._cells[f"dtype_{side}"][at] for side in ("candidate", "reference")]
        shapes = [self._cells[f"shape_{side}"][at] for side in ("candidate", "reference")]
        cells += [MISSING if dtype is None else f"torch.{dtype}" for dtype in dtypes]
        cells += [MISSING if shape is None else self._shape_text(shape) for shape in shapes]
        return [*cells, *(MISSING if flag is None else flag for flag in self._requires_grad(npu, bench))]

    def _shape_text(self, shape: tuple[int, ...]) -> str:
        """A shape as text. Cached: a run has few distinct shapes."""
        text = self._shape_texts.get(shape)
        if text is None:
            text = self._shape_texts[shape] = str(list(shape))
        return text

    def _name(self, side: _TableSide) -> str:
        """In mode "all" the name of the file, which marks arguments by keyword; in the others the name without that."""
        return side.name.file if self.mode == "all" else side.name.full

    def _requires_grad(self, npu: _TableSide | None, bench: _TableSide | None) -> list[bool | None]:
        return [
            None if side is None else self._requires[which][side.rank][side.row]
            for which, side in enumerate((npu, bench))
        ]

    def _middle(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        matched = npu is not None and bench is not None
        if self.mode == "md5":
            fingerprints = [self._cells[f"fingerprint_{side}"][at] for side in ("candidate", "reference")]
            return [
                MISSING if value is None else f"{value:08x}" for value in fingerprints
            ]  # CRC-32, or longer of astray
        statistics = [[self._cells[f"{name}_{side}"][at] for name in STATISTICS] for side in ("candidate", "reference")]
        summary: list[Cell] = [MISSING if value is None else value for side in statistics for value in side]
        if self.mode == "summary":
            if matched and self._nonfinite_differ(at):
                return [*([NAN] * len(DIFFERENCES)), *summary]
            return [*(_differences(*statistics) if matched else [MISSING] * len(DIFFERENCES)), *summary]
        if not matched or self._cells["nonfinite_mismatch"][at]:
            return [*([MISSING] * len(METRICS)), *summary]  # as msprobe, where NaN is on one side only
        identical = self._cells["verdict"][at] == "identical"
        return [*(self._metric(name, at, identical) for name in METRICS.values()), *summary]

    def _nonfinite_differ(self, at: int) -> bool:
        """Whether the sides have different counts of NaN and infinity: their statistics are then of other elements.

        Where a dump does not count them, missing extremes show that there are some.
        """
        nonfinite = [
            (self._nonfinite(side, at), *(self._cells[f"{name}_{side}"][at] is None for name in ("min", "max")))
            for side in ("candidate", "reference")
        ]
        return nonfinite[0] != nonfinite[1]

    def _metric(self, name: str, at: int, identical: bool) -> Cell:
        value = self._cells[name][at]
        if value is not None:
            return float(value)
        return _IDENTICAL.get(name, 0.0) if identical else UNSUPPORTED

    def _judged(self, at: int, npu: _TableSide | None, bench: _TableSide | None) -> list[Cell]:
        flags = self._requires_grad(npu, bench)
        consistent = None if None in flags else flags[0] == flags[1]
        result, messages = self.verdict(at)
        if consistent is False:
            result = "warning" if result == "pass" else result
            messages.append(f"requires_grad is {flags[0]} in NPU and {flags[1]} in Bench")
        return [MISSING if consistent is None else consistent, result, json.dumps(messages, ensure_ascii=False)]

    def verdict(self, at: int) -> tuple[str, list[str]]:
        """The result of a row in msprobe's words, and its messages."""
        label = self._cells["verdict"][at]
        result = _RESULTS.get(label, "warning")
        messages = []
        if label.startswith("only in"):
            side, other = ("NPU", "Bench") if label.endswith("candidate") else ("Bench", "NPU")
            messages.append(f"only in {side}: {other} has no such tensor")
        elif result != "pass":
            error, limit = self._cells["error"][at], self._cells["limit"][at]
            message = label
            if error is not None:
                message += f", off by {error:.2g} relative"
                if limit:
                    message += f" where no more than {limit:.2g} can be explained"
                elif limit is not None:
                    message += " where nothing may differ"
            messages.append(message)
        if self._cells["reason"][at] and result != "pass":
            messages.append(self._cells["reason"][at])
        for side, name in (("candidate", "NPU"), ("reference", "Bench")):
            counts = [f"{count} {word}" for word, count in self._nonfinite(side, at) if count]
            if counts and result != "pass":
                messages.append(f"{name} has {' and '.join(counts)}")
        first = self._first.get(at)
        if first is not None:
            messages.insert(0, f"a divergence begins here: {first.cause}")
        return result, messages

    def _nonfinite(self, side: str, at: int) -> list[tuple[str, int]]:
        return [(word, self._cells[f"{name}_{side}"][at] or 0) for word, name in (("NaN", "nan"), ("Inf", "inf"))]

    def _stack(self, npu: _TableSide | None, with_stack: set[str]) -> Cell:
        """The stack of an entry, in the row of its first tensor."""
        if npu is None or npu.name.entry in with_stack:
            return MISSING
        with_stack.add(npu.name.entry)
        stack = self._names[0][npu.rank].stacks[npu.row]
        frames = self.comparison.candidate.ranks[npu.rank].stack(stack) if stack is not None else []
        lines = [f"File {frame.file}, line {frame.line}, in {frame.function}, \n {frame.code}" for frame in frames]
        return str(lines) if lines else MISSING

    def _data_name(self, npu: _TableSide | None, bench: _TableSide | None) -> Cell:
        files = []
        for which, side in enumerate((npu, bench)):
            kept = side and self._kept[which][side.rank][side.row]
            files.append(f"{side.name.file}.pt" if side and kept else MISSING)
        return str(files)


def is_dump(run: RunData) -> bool:
    """Whether a run was read from files of msprobe, which have arguments as the program passed them."""
    return any(hasattr(rank, "entries") for rank in run.ranks.values())


def _pair_row(comparison: ComparisonData, divergence: Any) -> int:
    """The row of a divergence among the pairs, −1 when it has none of its own."""
    pairs, key = comparison.pairs, divergence.place
    matches = pairs.numbers("rank") == divergence.rank
    for name in ("step", "micro", "call"):
        matches = matches & (pairs.numbers(name) == getattr(key, name))
    for name in ("site", "phase", "role", "path"):
        column = pairs.coded(name)
        matches = matches & (column.codes == column.code(getattr(key, name)))
    at = np.flatnonzero(matches & (pairs.numbers("recompute") == key.recompute))
    return int(at[0]) if len(at) else -1


def _column(comparison: ComparisonData, name: str) -> list[Any]:
    """A column as objects, missing cells as None."""
    cells = comparison.columns[name]
    values = cells.column.tolist()
    return [cell if known else None for cell, known in zip(values, cells.known.tolist(), strict=True)]


def _differences(npu: list[float | None], bench: list[float | None]) -> list[Cell]:
    """The difference of each statistic, absolute and in percent of the bench's."""
    absolute: list[Cell] = []
    relative: list[Cell] = []
    for npu_value, bench_value in zip(npu, bench, strict=True):
        if npu_value is None or bench_value is None:
            absolute.append(MISSING)
            relative.append(MISSING)
            continue
        difference = npu_value - bench_value
        absolute.append(difference)
        if not difference:
            relative.append(0)
        elif bench_value and math.isfinite(difference):
            relative.append(f"{abs(difference / bench_value) * 100}%")
        else:
            relative.append(MISSING)
    return [*absolute, *relative]


# -- arguments that are not tensors ------------------------------------------------------------------------------------

NO_FILES = str(["-1", "-1"])


class ArgumentPair(NamedTuple):
    """An argument that is not a tensor, on both sides. `bench` is empty where only NPU has it."""

    npu: str
    bench: str
    npu_value: Any
    bench_value: Any

    def cells(self, mode: Mode, stacks: bool) -> list[Cell]:
        """Its row of the table."""
        agrees = (
            bool(self.bench) and self.npu_value == self.bench_value and type(self.npu_value) is type(self.bench_value)
        )
        messages = [] if agrees else [self._difference()]
        result = "pass" if agrees else "error" if self.bench else "warning"
        npu_form, bench_form = [
            _class_and_shape(self.npu_value),
            _class_and_shape(self.bench_value) if self.bench else (MISSING, MISSING),
        ]
        cells: list[Cell] = [self.npu, self.bench or MISSING]
        cells += [npu_form[0], bench_form[0], npu_form[1], bench_form[1], MISSING, MISSING]
        cells += self._middle(mode, agrees)
        cells += [True if self.bench else MISSING, result, json.dumps(messages, ensure_ascii=False)]
        return [*cells, *([MISSING] if stacks else []), *([NO_FILES] if mode == "all" else [])]

    def _difference(self) -> str:
        if not self.bench:
            return "only in NPU: Bench has no such argument"
        return f"the argument is {self.npu_value!r} in NPU and {self.bench_value!r} in Bench"

    def _middle(self, mode: Mode, agrees: bool) -> list[Cell]:
        sides = [self.npu_value, *([self.bench_value] if self.bench else [])]
        if mode == "md5":
            checksums: list[Cell] = [f"{zlib.crc32(as_utf8(str(value))):08x}" for value in sides]
            return [*checksums, *([MISSING] * (2 - len(sides)))]
        summary: list[Cell] = [
            "None" if value is None or _is_size(value) else value for value in sides for _ in range(4)
        ]
        summary += [MISSING] * (8 - len(summary))
        if mode == "all":
            return [*([UNSUPPORTED if self.bench else MISSING] * 6), *summary]
        return [*_argument_differences(self.npu_value, self.bench_value, agrees), *summary]


def _argument_differences(npu: Any, bench: Any, agrees: bool) -> list[Cell]:
    if agrees:
        return [0] * 8
    numbers = [value for value in (npu, bench) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < 2:
        return [MISSING] * 8
    difference = numbers[0] - numbers[1]
    relative = f"{abs(difference / numbers[1]) * 100}%" if numbers[1] else MISSING
    return [*([difference] * 4), *([relative] * 4)]


def _class_and_shape(value: Any) -> tuple[str, str]:
    """The cells of an argument in the columns of dtype and shape."""
    if value is None:
        return MISSING, MISSING
    if _is_size(value):
        return "torch.Size", value[len("torch.Size(") : -1]
    return f"<class '{type(value).__name__}'>", "[]"


def _is_size(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("torch.Size(")
