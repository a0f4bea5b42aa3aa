"""msprobe's `compare`: two dumps, or any runs that astray opens, into msprobe's table as CSV or a workbook.

It runs `astray.compare` and writes the table of its result; docs/coming-from/msprobe.md lists where results differ from
msprobe's.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import ComparisonData
from astray.comparison.comparison import compare as compare_runs
from astray.comparison.pair.matching import MatchingOptions
from astray.errors import AstrayError, UsageError
from astray.foreign.msprobe.mapping import mapping_in, of_modules, renamed
from astray.foreign.msprobe.table import Cell, Mode, MsprobeTable, header
from astray.formatting.terminal import COULD_NOT, print_note, print_report
from astray.report.atomic_files import atomic_file
from astray.report.text import render
from astray.report.xlsx import CREATED, SHEET_ROWS, cell_text, xlsxwriter_module
from astray.store import RunData, open_run
from astray.store import Table as StoredTable
from astray.store.run import RankRun
from astray.wording import as_utf8, did_you_mean

AnyPath = str | os.PathLike[str]

_PATHS = ("npu_path", "bench_path", "stack_path", "npu_dump_data_dir", "bench_dump_data_dir", "is_print_compare_log")
_IDLE = ("is_print_compare_log", "diff_analyze", "first_diff_analyze", "summary_compare", "md5_compare")
"""Options without effect: the first divergence is always searched for, and the dumps determine the mode."""

_REFUSED = {
    "layer_mapping": "Give data_mapping or cell_mapping, or draft a mapping with `astray map` and give it as mapping.",
    "api_mapping": "Give data_mapping, or mapping with a section `functions`.",
    "consistent_check": "Compare a training with an inference by `astray compare`, with --map.",
    "backend": "It belongs to consistent_check.",
    "config": "It belongs to consistent_check.",
}


def compare(
    input_param: Mapping[str, Any],
    output_path: AnyPath = "./output",
    stack_mode: bool | None = None,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    *,
    xlsx: bool = False,
    suffix: str = "",
    data_mapping: AnyPath | Mapping[str, str] | None = None,
    cell_mapping: AnyPath | Mapping[str, str] | None = None,
    mapping: AnyPath | None = None,
    **options: Any,
) -> list[Path]:
    """Compare a dump with that of the bench, and write the table of all tensors. Returns the paths of the files.

    >>> compare({"npu_path": "a/step0/rank0/dump.json", "bench_path": "b/step0/rank0/dump.json"}, "./output")
    [PosixPath('output/compare_result_20261116101500.csv'), PosixPath('output/advisor_20261116101500.txt')]

    input_param: `npu_path` is the run that may be wrong, `bench_path` the one that is right. Each is a dump.json, the
        folder of a rank, of a step or of a whole dump, or any run that astray opens. Further keys are not needed.
    stack_mode: whether there is a column with the lines of the program. By default where they are known.
    auto_analyze: also write the answer in words: the first divergence, and a summary.
    fuzzy_match: pair calls by their order and what was called, whatever their names and numbers.
    xlsx: a workbook in place of CSV.
    suffix: comes behind the names of the files.
    data_mapping: which entry or tensor of the NPU's is which of the bench's: a dict, or a YAML file.
    cell_mapping: the same for modules: `fc2.Dense: fc2.Linear`.
    mapping: a file of `astray map`.
    """
    for name, given in options.items():
        if name in _REFUSED and given:
            raise UsageError(f"{name}={given!r} is not supported. {_REFUSED[name]}")
        if name not in _IDLE and name not in _REFUSED:
            raise UsageError(f"{name}={given!r} is not an option of compare.{did_you_mean(name, (*_IDLE, *_REFUSED))}")
    with garbage_collection_paused():
        return _compare(
            input_param, output_path, stack_mode, auto_analyze, fuzzy_match, xlsx, suffix, data_mapping, cell_mapping,
            mapping,
        )  # fmt: skip


def _compare(
    input_param: Mapping[str, Any],
    output_path: AnyPath,
    stack_mode: bool | None,
    auto_analyze: bool,
    fuzzy_match: bool,
    xlsx: bool,
    suffix: str,
    data_mapping: AnyPath | Mapping[str, str] | None,
    cell_mapping: AnyPath | Mapping[str, str] | None,
    mapping: AnyPath | None,
) -> list[Path]:
    npu, bench = _inputs(input_param)
    options = MatchingOptions(by="order" if fuzzy_match else "key")
    if cell_mapping or mapping:
        modules = of_modules(cell_mapping)
        options["mapping"] = modules if modules is not None else mapping
    if len(npu.ranks) == len(bench.ranks) == 1:  # one rank each: these are compared, whatever their numbers
        (number,), (rank,) = bench.ranks, npu.ranks.values()
        npu = npu.with_ranks({number: rank})
    if len(npu.steps) == len(bench.steps) == 1:  # likewise one step each
        options["offset"] = bench.steps[0] - npu.steps[0]
    entries = mapping_in(data_mapping, "data_mapping")
    candidate, reference = renamed(npu, bench, entries) if entries else (npu, bench)
    comparison = compare_runs(reference, candidate, **options)
    table = MsprobeTable(comparison, mode_of(comparison), npu, bench)
    if stack_mode is not None:
        table.stacks = stack_mode
    now = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
    files = _write(table, Path(output_path) / f"{_stem(npu)}{suffix}", now, xlsx)
    if auto_analyze:
        advice = Path(output_path) / f"advisor{suffix}_{now}.txt"
        with atomic_file(advice) as draft:
            draft.write_bytes(as_utf8(f"{render(comparison)}\n"))
        files.append(advice)
    return files


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause the garbage collector: all rows stay until the end, and it would traverse them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def compare_distributed(
    npu_dump_dir: AnyPath, bench_dump_dir: AnyPath, output_path: AnyPath = "./output", **options: Any
) -> list[Path]:
    """Compare all ranks of a step, or of all steps, of two dumps: a file for each. Options are those of `compare`."""
    return compare({"npu_path": npu_dump_dir, "bench_path": bench_dump_dir}, output_path, **options)


def _inputs(given: Mapping[str, Any]) -> tuple[RunData, RunData]:
    if not isinstance(given, Mapping):
        raise UsageError(f"input_param is {given!r}. It is a dict with npu_path and bench_path.")
    for name in given:
        if name not in _PATHS:
            raise UsageError(f"input_param has {name!r}. It has npu_path and bench_path.{did_you_mean(name, _PATHS)}")
    for name in _PATHS[:2]:
        if not isinstance(given.get(name), str | os.PathLike):
            raise UsageError(f"input_param has no path {name}: it is {given.get(name)!r}.")
    return open_run(given["npu_path"]), open_run(given["bench_path"])


def _write(table: MsprobeTable, stem: Path, now: str, xlsx: bool) -> list[Path]:
    """Write a file for each step and rank; with several, its name has their numbers."""
    groups = table.groups()
    steps, ranks = {step for step, _ in groups}, {rank for _, rank in groups}
    write, suffix = (write_xlsx, "xlsx") if xlsx else (write_csv, "csv")
    head = header(table.mode, table.stacks)
    files = []
    for (step, rank), rows in groups.items():
        numbers = f"_step{step}" * (len(steps) > 1) + f"_rank{rank}" * (len(ranks) > 1)
        files.append(write(stem.with_name(f"{stem.name}{numbers}_{now}.{suffix}"), head, table.lines(rows)))
    return files


def _stem(npu: RunData) -> str:
    kinds = {kind for rank in npu.ranks.values() for kind in rank.calls.coded("kind").values}
    return "debug_compare_result" if kinds == {"custom"} else "compare_result"


def mode_of(comparison: ComparisonData) -> Mode:
    """The mode by what both dumps hold: values, checksums, or statistics."""
    runs = comparison.reference, comparison.candidate
    if all(_has(run, lambda tensors: tensors.numbers("blob_file") >= 0) for run in runs):
        return "all"
    checksums = all(rank.fingerprints != RankRun.fingerprints for run in runs for rank in run.ranks.values())
    has_statistics = all(_has(run, lambda tensors: tensors.valid("count")) for run in runs)
    return "md5" if checksums or not has_statistics else "summary"


def _has(run: RunData, condition: Callable[[StoredTable], npt.NDArray[np.bool_]]) -> bool:
    return any(bool(condition(rank.tensors).any()) for rank in run.ranks.values())


# -- the table as a file: CSV, or a workbook with a colour for each result ---------------------------------------------

_COLOURS = {"pass": "#C6EFCE", "warning": "#FFEB9C", "error": "#FFC7CE"}


def write_csv(file: Path, header: Sequence[str], lines: Iterable[Sequence[Cell]]) -> Path:
    """Write the table, and return its path. Infinity gets a leading space, or spreadsheets would read it as a name."""
    with atomic_file(file) as draft, draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as out:
        table = csv.writer(out)
        table.writerow(header)
        for line in lines:  # floats are written as `str` has them, so that only infinities are changed
            table.writerow([_text(cell) for cell in line] if math.inf in line or -math.inf in line else line)
    return file


def _text(cell: Cell) -> str:
    return f" {cell}" if isinstance(cell, float) and math.isinf(cell) else str(cell)


def write_xlsx(file: Path, header: Sequence[str], lines: Iterable[Sequence[Cell]]) -> Path:
    """Write a workbook, and return its path. Rows beyond what a sheet can hold go to the next."""
    library = xlsxwriter_module()
    with atomic_file(file) as draft:
        options = {"constant_memory": True, "strings_to_formulas": False, "strings_to_urls": False}
        book = library.Workbook(str(draft), options | {"tmpdir": str(draft.parent)})
        book.set_properties({"created": CREATED})
        remaining = iter(lines)
        rows = list(islice(remaining, SHEET_ROWS - 1))
        while rows or not book.worksheets():
            _add_sheet(book, header, rows)
            rows = list(islice(remaining, SHEET_ROWS - 1))
        book.close()
    return file


def _add_sheet(book: Any, header: Sequence[str], lines: Sequence[Sequence[Cell]]) -> None:
    sheet = book.add_worksheet()
    sheet.freeze_panes(1, 0)
    sheet.autofilter(0, 0, len(lines), len(header) - 1)
    result = header.index("Result")
    for word, colour in _COLOURS.items():
        rule = {"type": "cell", "criteria": "==", "value": f'"{word}"', "format": book.add_format({"bg_color": colour})}
        sheet.conditional_format(1, result, max(len(lines), 1), result, rule)
    for at, line in enumerate([header, *lines]):
        for column, cell in enumerate(line):
            if isinstance(cell, bool):
                sheet.write_boolean(at, column, cell)
            elif isinstance(cell, str) or not math.isfinite(cell):  # a sheet has no infinite number
                sheet.write_string(at, column, cell_text(str(cell)))
            else:
                sheet.write_number(at, column, cell)


# -- the command -------------------------------------------------------------------------------------------------------


DESCRIPTION = "`python -m astray.compat.msprobe compare -tp A -gp B -o output`: msprobe's command, with its options."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m astray.compat.msprobe`. Returns the exit code: 0, or 2 when it could not do its work."""
    options = _parser().parse_args(argv)
    try:
        files = compare(
            {"npu_path": options.target_path, "bench_path": options.golden_path},
            options.output_path,
            fuzzy_match=options.fuzzy_match,
            xlsx=options.xlsx,
            data_mapping=options.data_mapping,
            cell_mapping=options.cell_mapping,
            mapping=options.map,
        )
    except (AstrayError, OSError) as error:
        print_note(f"msprobe compare: {error}")
        return COULD_NOT
    print_report("\n".join(map(str, files)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m astray.compat.msprobe", description=DESCRIPTION)
    command = parser.add_subparsers(required=True).add_parser("compare", help="compare two dumps into msprobe's table")
    add = command.add_argument
    add("-tp", "--target_path", required=True, help="the dump that may be wrong: a dump.json, or a folder")
    add("-gp", "--golden_path", required=True, help="the dump that is right")
    add("-o", "--output_path", default="./output", help="the folder for the table")
    add("--xlsx", action="store_true", help="a workbook in place of CSV")
    add("-fm", "--fuzzy_match", action="store_true", help="pair calls by their order, whatever their names")
    add("-dm", "--data_mapping", help="a YAML file: which entry is which")
    add("-cm", "--cell_mapping", help="a YAML file: which module is which")
    add("--map", help="a file of `astray map`")
    return parser
