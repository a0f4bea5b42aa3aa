"""`Comparer`: `astray.compare` of two dumps, in hooktools' words: folders, epochs, steps, metrics, filters, the worst.

The first folder is the reference. What cannot be measured, because NaN or infinity stands on one side only or shapes
differ, is always shown: no filter hides it. What only one folder has is counted, and told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import compare
from astray.errors import CompareError, RunError
from astray.foreign.hooktools.config import DIRECTORY, FILE, METRICS, ComparerConfig, Given, Metric, column, own
from astray.foreign.hooktools.files import CallFile, Label, Numbering, call_file, files_in, place_of, runs_in
from astray.foreign.hooktools.reader import HooktoolsRank, open_files
from astray.formatting.terminal import say
from astray.results.comparison import Comparison
from astray.store.run import RunData
from astray.wording import counted, printable

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class ComparerRow(NamedTuple):
    """One tensor that is beyond the filters, or cannot be measured."""

    label: Label
    phase: str
    site: str
    type: str
    part: str
    metrics: dict[str, float]
    verdict: str
    files: tuple[Path | None, Path | None]

    def __str__(self) -> str:
        numbers = "  ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        files = " | ".join("none" if file is None else file.name for file in self.files)
        where = printable(f"[{self.phase}][{self.label}] {self.site} ({self.type}) {self.part}")
        return f"{where}\n     {numbers}  {self.verdict}  {printable(files)}"


@dataclass(frozen=True, eq=False)
class ComparerResult:
    """What came of comparing two dumps.

    shown: the tensors beyond the filters, in order of observation. worst: of these the worst, the worst first.
    comparison: everything else, as `astray.compare` gives it; `numbering` has the epochs and steps of its step numbers.
    """

    comparison: Comparison
    numbering: Numbering
    compared: int
    shown: tuple[ComparerRow, ...]
    worst: tuple[ComparerRow, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.comparison.reference.path}  →  {self.comparison.candidate.path}",
            f"{counted(self.compared, 'tensor')} compared, {len(self.shown):,} beyond the filter",
        ]
        if self.worst:
            lines += [f"The worst {len(self.worst)}:", *(f"{n:3}. {row}" for n, row in enumerate(self.worst, 1))]
        first = self.comparison.first
        if first is not None:
            lines.append(f"Look first at {self.numbering.label(first.step)}: {printable(str(first.place))}")
        return "\n".join([*lines, *map(printable, [*_alone(self.comparison), *self.comparison.problems])])


class Comparer:
    """Compares two dumps as hooktools does.

    >>> findings = Comparer("comparer_demo.yaml").compare()     # prints the worst
    >>> findings.worst[0].site
    'h.2.mlp.proj'

    config: a YAML file, or a dict of what would stand in it; `astray help hooktools` has every key.
    """

    def __init__(self, config: Given) -> None:
        self._config = ComparerConfig.read(config)

    def compare(self) -> ComparerResult:
        """Compare, print what was found, and give it."""
        findings = self.find()
        if self._config.verbose:
            for row in findings.shown:
                say(str(row))
        say(str(findings))
        return findings

    def find(self) -> ComparerResult:
        """The same without a word. Raises CompareError when the dumps have nothing in common."""
        config = self._config
        first, second, number = self._runs()
        by = "order" if self._pairs_by_order else "key"
        diff = Comparison.of(compare(first, second, by=by, metrics=own(config.metrics)))
        measured = {name: column(metric, diff.pairs) for name, metric in self._numbers()}
        rows = np.flatnonzero(self._is_asked_for(diff))
        beyond, error = self._beyond(measured, rows)
        shown = {row: _row(diff, measured, row) for row in rows[beyond].tolist()}
        order = rows[beyond][np.argsort(-error[beyond], kind="stable")]
        worst = tuple(shown[row] for row in order[: config.top].tolist())
        return ComparerResult(diff, number, len(rows), tuple(shown.values()), worst)

    def _numbers(self) -> Iterator[tuple[str, Metric]]:
        """The numbers of every metric that was asked for."""
        for name in self._config.metrics:
            yield from METRICS[name].items()

    @property
    def _pairs_by_order(self) -> bool:
        return self._config.by_order or self._config.mode == FILE

    def _runs(self) -> tuple[RunData, RunData, Numbering]:
        """The two sides, and how the steps of both are numbered."""
        sides = [self._files(paths) for paths in (self._config.first, self._config.second)]
        number = Numbering(file.label for side in sides for files in side.values() for file in files)
        first, second = (
            open_files(Path(paths[0]), side, number)
            for paths, side in zip((self._config.first, self._config.second), sides, strict=True)
        )
        return first, second, number

    def _files(self, paths: Sequence[str]) -> dict[int, list[CallFile]]:
        """The files of one side that were asked for."""
        config = self._config
        if config.mode == DIRECTORY:
            found = {rank: files_in(folder) for rank, folder in runs_in(_there(paths[0])).items()}
        else:
            found = {0: list(_listed(paths, alone=config.mode == FILE))}
        chosen = {
            rank: [
                file
                for file in files
                if file.phase in config.phases and file.label.epoch in config.epochs and file.label.step in config.steps
            ]
            for rank, files in found.items()
        }
        if not any(chosen.values()):
            raise CompareError(
                f"{paths[0]} has no file of {', '.join(config.phases)} in epoch {config.epochs}, step {config.steps}. "
                f"It has {_described(found)}."
            )
        return chosen

    def _is_asked_for(self, diff: Comparison) -> Bools:
        """The rows of the kinds of calls, and of the parts of them, that were asked for."""
        config, pairs = self._config, diff.pairs
        wanted = diff.matched.copy()
        kinds = np.array(pairs["kind"].tolist())
        if config.skip_modules:
            wanted &= kinds != "module"
        if config.skip_functions:
            wanted &= np.isin(kinds, ("module", "parameter"))
        if config.parts:
            wanted &= np.array([_part(*cells) in config.parts for cells in zip(*_cells(diff), strict=True)], np.bool_)
        return wanted

    def _beyond(self, measured: Mapping[str, Floats], rows: npt.NDArray[np.intp]) -> tuple[Bools, Floats]:
        """Which of some rows are shown, and how bad each is: by the first metric, and ∞ where there is no number."""
        filters = self._config.filters
        shown, first = np.zeros(len(rows), np.bool_), np.zeros(len(rows))
        for place, name in enumerate(self._config.metrics):
            for number, metric in METRICS[name].items():
                error = metric.error(measured[number][rows])
                error = np.where(np.isnan(error), np.inf, error)
                shown |= error > filters.get(name, filters.get("global", 0.0))
                first = np.maximum(first, error) if place == 0 else first
        return shown, first


def _row(diff: Comparison, measured: Mapping[str, Floats], row: int) -> ComparerRow:
    cells = diff.pairs.row(row)
    first, second = (
        _file(run, cells["rank"], cells[f"call_{side}"])
        for run, side in ((diff.reference, "reference"), (diff.candidate, "candidate"))
    )
    file = call_file(first) if first is not None else None
    part = _part(*(cells[name] for name in _CELLS))
    return ComparerRow(
        file.label if file is not None else Label(),
        _folder(cells["kind"], cells["phase"]),
        cells["site"],
        cells["type"],
        f"{part} {cells['path']}",
        {name: float(numbers[row]) for name, numbers in measured.items()},
        cells["verdict"],
        (first, second),
    )


_CELLS = ("kind", "phase", "role", "path")


def _cells(diff: Comparison) -> Iterator[list[Any]]:
    return (diff.pairs[name].tolist() for name in _CELLS)


def _folder(kind: str, phase: str) -> str:
    return "gradient" if kind == "parameter" else phase


def _part(kind: str, phase: str, role: str, path: str) -> str:
    place = place_of(_folder(kind, phase), role, path)
    return "" if place is None else place.part


def _file(run: RunData, rank: int, call: int) -> Path | None:
    found = run.ranks.get(rank)
    return found.files[call] if isinstance(found, HooktoolsRank) and call >= 0 else None


def _alone(diff: Comparison) -> Iterator[str]:
    """What only one of the dumps has."""
    for side, word in (("candidate", "first"), ("reference", "second")):
        rows = np.flatnonzero(diff.pairs.numbers(f"row_{side}") < 0)
        if len(rows):
            cells = diff.pairs.row(int(rows[0]))
            part = _part(*(cells[name] for name in _CELLS))
            such = f"{part} {cells['path']} of {cells['site']}"
            yield f"{counted(len(rows), 'tensor')} are only in the {word}, such as {such}."


def _there(path: str) -> Path:
    if not Path(path).exists():
        raise RunError(f"{path} does not exist.")
    return Path(path)


def _listed(paths: Sequence[str], *, alone: bool) -> Iterator[CallFile]:
    """Files by their paths, or those of a folder. Two that are compared `alone` are of one step, whatever they say."""
    for path in map(_there, paths):
        files = files_in(path) if path.is_dir() else [call_file(path)]
        for file in files:
            if file is None:
                raise CompareError(
                    f"{path} is not named as hooktools' files are: forward_000017.pt, backward_…, gradient_…."
                )
            yield file._replace(label=Label()) if alone else file


def _described(found: Mapping[int, Sequence[CallFile]]) -> str:
    there = sorted({f"{file.phase}/{file.label}" for files in found.values() for file in files})
    return f"{', '.join(there[:5])}{' …' * (len(there) > 5)}" if there else "none at all"
