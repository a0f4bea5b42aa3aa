"""The checker: two folders of the saving hook → a CSV for each rank, with the columns of the original checker.

Tensors that both folders have are compared, by name. What only one has, and what prevents a comparison, is noted in a
file beside the result. All numbers are computed in float64, over the whole tensor, with ddof 0.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from astray.comparison.measure import metrics
from astray.comparison.measure.evidence import Progress
from astray.errors import AstrayError, RunError
from astray.foreign import array_files as npy
from astray.foreign.saving_hook.files import FOLDERS, RESULTS, FolderName, RankListing, list_rank, rank_folders
from astray.formatting.terminal import COULD_NOT, print_note, print_report
from astray.formatting.terminal import Progress as ProgressLine
from astray.report.atomic_files import atomic_file
from astray.stats import Strided, contrast
from astray.stats.moments import Moments, moments
from astray.wording import counted

COLUMNS = (
    "tensor_name", "cosine similarity", "meanA", "meanB", "meanA - meanB", "stdA", "stdB", "stdA - stdB", "varA",
    "varB", "varA - varB",
)  # fmt: skip
NOTES = ("tensor_name", "note")

_MOST_SHOWN = 5  # notes of a rank on the terminal; the file has all


class CheckerRow(NamedTuple):
    """A line of the result, and a note on it."""

    name: str
    cosine: float
    numbers: tuple[float, ...]
    note: str


class CheckerResult(NamedTuple):
    """The results of one rank, and their files, which are not written where they would be empty."""

    folder: FolderName
    rank: int
    rows: list[CheckerRow]
    notes: list[tuple[str, str]]
    result: Path
    notes_file: Path


class RankFolders(NamedTuple):
    """One rank of one folder, and its paths in A and B; None where there is no such rank."""

    folder: FolderName
    rank: int
    homes: tuple[Path | None, Path | None]


def plan(a: Path, b: Path) -> tuple[list[RankFolders], list[str]]:
    """The ranks to compare, and problems with the folders. Raises RunError when one is not of this format."""
    problems: list[str] = []
    sides = [_ranks(path, problems) for path in (a, b)]
    jobs = [
        RankFolders(folder, rank, (sides[0][folder].get(rank), sides[1][folder].get(rank)))
        for folder in FOLDERS
        for rank in sorted({rank for side in sides for rank in side[folder]})
    ]
    return jobs, problems


def _ranks(path: Path, problems: list[str]) -> dict[FolderName, dict[int, Path]]:
    if not path.is_dir():
        raise RunError(f"{path} is not a folder." if path.exists() else f"{path} does not exist.")
    ranks: dict[FolderName, dict[int, Path]] = {}
    for folder in FOLDERS:
        ranks[folder], of_folder = rank_folders(path, folder)
        problems += of_folder
    if not any(ranks.values()):
        raise RunError(
            f"{path} has no folder of a rank, such as tensors/rank_0. Runs of other formats are compared by "
            "`astray compare`."
        )
    return ranks


def check(job: RankFolders, results: Path, progress: Progress) -> CheckerResult:
    """Compare one rank, and write its results into `results`. Raises OSError where that cannot be written."""
    folder, rank, homes = job
    listed = [
        RankListing([], [f"There is no rank {rank} in `{folder}` of {side}."])
        if home is None
        else list_rank(home, folder)
        for side, home in zip("AB", homes, strict=True)
    ]
    notes = [("", problem) for side in listed for problem in side.problems]
    a, b = ({file.name: file.path for file in side.files} for side in listed)
    for side, own, others in (("A", a, b), ("B", b, a)):
        notes += [(path.name, f"only in {side}") for name, path in own.items() if name not in others]
    pairs = [(path, b[name]) for name, path in a.items() if name in b]
    rows = []
    for done, (path_a, path_b) in enumerate(pairs):
        progress(done, len(pairs))
        rows.append(_compare(path_a, path_b))
    notes += [(row.name, row.note) for row in rows if row.note]
    files = (results / f"rank_{rank}_rst.csv", results / f"rank_{rank}_notes.csv")
    checked = CheckerResult(folder, rank, rows, notes, *files)
    _write(checked)
    return checked


class _CheckedSide(NamedTuple):
    """One of two tensors. `values` keeps the memory alive that `memory` describes."""

    values: npy.Array
    memory: Strided
    moments: Moments

    @property
    def measures(self) -> tuple[float, float, float]:
        """Mean, standard deviation and variance; NaN where an element is not finite."""
        of = self.moments
        return (of.mean, of.std(), of.var()) if of.finite == of.count else UNKNOWN


UNKNOWN = (math.nan, math.nan, math.nan)


def _compare(path_a: Path, path_b: Path) -> CheckerRow:
    notes: list[str] = []
    a, b = _read(path_a, "A", notes), _read(path_b, "B", notes)
    cosine = math.nan
    if a is not None and b is not None:
        reason = _why_not_paired(a, b)
        notes += [] if reason is None else [reason]
        cosine = metrics.cosine(contrast(a.memory, b.memory)) if not notes else math.nan
    measures = zip(*(UNKNOWN if side is None else side.measures for side in (a, b)), strict=True)
    return CheckerRow(
        path_a.name, cosine, tuple(number for x, y in measures for number in (x, y, x - y)), "; ".join(notes)
    )


def _read(path: Path, name: str, notes: list[str]) -> _CheckedSide | None:
    try:
        if not path.is_file():
            raise RunError(f"{path} is not a plain file.")
        values, dtype = npy.read(path), npy.describe(path).dtype
    except RunError as error:
        notes.append(str(error))
        return None
    memory = Strided.from_numpy(values, dtype)
    side = _CheckedSide(values, memory, moments(memory))
    nonfinite = side.moments.count - side.moments.finite
    if nonfinite:
        notes.append(f"{nonfinite:,} of {side.moments.count:,} numbers of {name} are NaN or infinite")
    return side


def _why_not_paired(a: _CheckedSide, b: _CheckedSide) -> str | None:
    """Why the elements of two tensors cannot be paired; None where they can."""
    if a.memory.shape != b.memory.shape:
        return f"elements were not paired, for the shapes are {list(a.memory.shape)} and {list(b.memory.shape)}"
    if len({side.memory.dtype.startswith("complex") for side in (a, b)}) > 1:
        return f"elements were not paired, for the types are {a.memory.dtype} and {b.memory.dtype}"
    return None if a.moments.count else "there are no elements"


def _write(checked: CheckerResult) -> None:
    """Write the two files of a rank. One that would be empty is removed if it exists from an earlier check."""
    rows = [(row.name, row.cosine, *row.numbers) for row in checked.rows]
    for path, head, lines in ((checked.result, COLUMNS, rows), (checked.notes_file, NOTES, checked.notes)):
        if not lines:
            path.unlink(missing_ok=True)
            continue
        with atomic_file(path) as draft, draft.open("w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            writer.writerows(lines)


def describe(checked: CheckerResult) -> Iterator[str]:
    """The lines about a rank for the terminal."""
    label = f"{checked.folder}, rank {checked.rank}:"
    if checked.rows:
        worst = min(checked.rows, key=lambda row: (not math.isnan(row.cosine), row.cosine))
        yield f"{label} {counted(len(checked.rows), 'tensor')} compared → {checked.result}"
        yield f"    lowest cosine similarity {worst.cosine:.10g}: {worst.name}"
    else:
        yield f"{label} nothing in common"
    shown = checked.notes[:_MOST_SHOWN]
    yield from (f"    {name}: {note}" if name else f"    {note}" for name, note in shown)
    if len(checked.notes) > len(shown):
        yield f"    and {len(checked.notes) - len(shown):,} more, in {checked.notes_file}"


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Checks two folders; the exit code is 0 whatever the numbers are, and 2 when it could not be done."""
    parser = argparse.ArgumentParser(
        prog="python -m astray.compat.saving_hook",
        description="Compares the tensors that two folders of the saving hook have in common, and writes a CSV for "
        "each rank into A/tensors/compare_rst and A/grads/compare_rst.",
    )
    parser.add_argument("--pathA", required=True, type=Path, metavar="A", help="one folder; the results are put there")
    parser.add_argument("--pathB", required=True, type=Path, metavar="B", help="the other")
    options = parser.parse_args(argv)
    try:
        _check_folders(options.pathA, options.pathB)
    except (AstrayError, OSError) as error:
        print_note(f"{parser.prog}: {_sentence(error)}")
        return COULD_NOT
    return 0


def _check_folders(a: Path, b: Path) -> None:
    jobs, problems = plan(a, b)
    for problem in problems:
        print_report(problem)
    for job in jobs:
        with ProgressLine(f"comparing {job.folder} of rank {job.rank}") as progress:
            checked = check(job, a / job.folder / RESULTS, progress)
        for line in describe(checked):
            print_report(line)


def _sentence(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}."
