"""The checker: two folders of the saving hook → a CSV for each rank, with the columns its users know.

What both folders have is compared, by name. What only one has, and whatever stands in the way of a comparison, is said
in a file beside the result. All numbers are of float64, over the whole tensor, with ddof 0.
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
from astray.foreign.saving_hook.files import FOLDERS, RESULTS, Folder, RankListing, list_rank, rank_folders
from astray.formatting.terminal import COULD_NOT, say, tell
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

_FEW = 5  # notes that the terminal shows of a rank; the file has all


class CheckerRow(NamedTuple):
    """A line of the result, and what has to be said of it."""

    name: str
    cosine: float
    numbers: tuple[float, ...]
    note: str


class CheckerResult(NamedTuple):
    """The results of one rank, and the files they are in, which are there unless they would be empty."""

    folder: Folder
    rank: int
    rows: list[CheckerRow]
    notes: list[tuple[str, str]]
    result: Path
    notes_file: Path


class RankFolders(NamedTuple):
    """One rank of one folder, and where its files are in A and B; None where there is no such rank."""

    folder: Folder
    rank: int
    homes: tuple[Path | None, Path | None]


def plan(a: Path, b: Path) -> tuple[list[RankFolders], list[str]]:
    """What there is to compare, and what is wrong with the folders. Raises RunError when one is not of this format."""
    problems: list[str] = []
    sides = [_ranks(path, problems) for path in (a, b)]
    jobs = [
        RankFolders(folder, rank, (sides[0][folder].get(rank), sides[1][folder].get(rank)))
        for folder in FOLDERS
        for rank in sorted({rank for side in sides for rank in side[folder]})
    ]
    return jobs, problems


def _ranks(path: Path, problems: list[str]) -> dict[Folder, dict[int, Path]]:
    if not path.is_dir():
        raise RunError(f"{path} is no folder." if path.exists() else f"{path} does not exist.")
    ranks: dict[Folder, dict[int, Path]] = {}
    for folder in FOLDERS:
        ranks[folder], wrong = rank_folders(path, folder)
        problems += wrong
    if not any(ranks.values()):
        raise RunError(
            f"{path} has no folder of a rank, such as tensors/rank_0. Runs of other formats are compared by "
            "`astray compare`."
        )
    return ranks


def check(job: RankFolders, results: Path, progress: Progress) -> CheckerResult:
    """Compare one rank, and write what comes of it into `results`. Raises OSError where that cannot be written."""
    folder, rank, homes = job
    listed = [
        RankListing([], [f"There is no rank {rank} in `{folder}` of {side}."])
        if home is None
        else list_rank(home, folder)
        for side, home in zip("AB", homes, strict=True)
    ]
    notes = [("", problem) for side in listed for problem in side.problems]
    a, b = ({file.saved: file.path for file in side.files} for side in listed)
    for side, mine, others in (("A", a, b), ("B", b, a)):
        notes += [(path.name, f"only in {side}") for saved, path in mine.items() if saved not in others]
    pairs = [(path, b[saved]) for saved, path in a.items() if saved in b]
    rows = []
    for done, (one, other) in enumerate(pairs):
        progress(done, len(pairs))
        rows.append(_compare(one, other))
    notes += [(row.name, row.note) for row in rows if row.note]
    files = (results / f"rank_{rank}_rst.csv", results / f"rank_{rank}_notes.csv")
    checked = CheckerResult(folder, rank, rows, notes, *files)
    _write(checked)
    return checked


class _CheckedSide(NamedTuple):
    """One of two tensors. `values` keeps alive what `memory` describes."""

    values: npy.Array
    memory: Strided
    moments: Moments

    @property
    def measures(self) -> tuple[float, float, float]:
        """Mean, standard deviation and variance; NaN where one element is not finite."""
        found = self.moments
        return (found.mean, found.std(), found.var()) if found.finite == found.count else UNKNOWN


UNKNOWN = (math.nan, math.nan, math.nan)


def _compare(one: Path, other: Path) -> CheckerRow:
    notes: list[str] = []
    a, b = _read(one, "A", notes), _read(other, "B", notes)
    cosine = math.nan
    if a is not None and b is not None:
        apart = _apart(a, b)
        notes += [] if apart is None else [apart]
        cosine = metrics.cosine(contrast(a.memory, b.memory)) if not notes else math.nan
    measures = zip(*(UNKNOWN if side is None else side.measures for side in (a, b)), strict=True)
    return CheckerRow(
        one.name, cosine, tuple(number for x, y in measures for number in (x, y, x - y)), "; ".join(notes)
    )


def _read(path: Path, name: str, notes: list[str]) -> _CheckedSide | None:
    try:
        if not path.is_file():
            raise RunError(f"{path} is no plain file.")
        values, dtype = npy.read(path), npy.describe(path).dtype
    except RunError as error:
        notes.append(str(error))
        return None
    memory = Strided.from_numpy(values, dtype)
    side = _CheckedSide(values, memory, moments(memory))
    bad = side.moments.count - side.moments.finite
    if bad:
        notes.append(f"{bad:,} of {side.moments.count:,} numbers of {name} are NaN or infinite")
    return side


def _apart(a: _CheckedSide, b: _CheckedSide) -> str | None:
    """Why the elements of two tensors are no pairs."""
    if a.memory.shape != b.memory.shape:
        return f"elements were not paired, for the shapes are {list(a.memory.shape)} and {list(b.memory.shape)}"
    if len({side.memory.dtype.startswith("complex") for side in (a, b)}) > 1:
        return f"elements were not paired, for the types are {a.memory.dtype} and {b.memory.dtype}"
    return None if a.moments.count else "there are no elements"


def _write(checked: CheckerResult) -> None:
    """Write the two files of a rank. One that would be empty is taken away, should it be there from before."""
    rows = [(row.name, row.cosine, *row.numbers) for row in checked.rows]
    for place, head, lines in ((checked.result, COLUMNS, rows), (checked.notes_file, NOTES, checked.notes)):
        if not lines:
            place.unlink(missing_ok=True)
            continue
        with atomic_file(place) as draft, draft.open("w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            writer.writerows(lines)


def describe(checked: CheckerResult) -> Iterator[str]:
    """What the terminal says of a rank."""
    where = f"{checked.folder}, rank {checked.rank}:"
    if checked.rows:
        worst = min(checked.rows, key=lambda row: (not math.isnan(row.cosine), row.cosine))
        yield f"{where} {counted(len(checked.rows), 'tensor')} compared → {checked.result}"
        yield f"    lowest cosine similarity {worst.cosine:.10g}: {worst.name}"
    else:
        yield f"{where} nothing in common"
    few = checked.notes[:_FEW]
    yield from (f"    {name}: {note}" if name else f"    {note}" for name, note in few)
    if len(checked.notes) > len(few):
        yield f"    and {len(checked.notes) - len(few):,} more, in {checked.notes_file}"


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
        tell(f"{parser.prog}: {_sentence(error)}")
        return COULD_NOT
    return 0


def _check_folders(a: Path, b: Path) -> None:
    jobs, problems = plan(a, b)
    for problem in problems:
        say(problem)
    for job in jobs:
        with ProgressLine(f"comparing {job.folder} of rank {job.rank}") as progress:
            checked = check(job, a / job.folder / RESULTS, progress)
        for line in describe(checked):
            say(line)


def _sentence(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror or error}."
