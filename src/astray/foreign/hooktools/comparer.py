"""`Comparer`: `astray.compare` of two dumps, in hooktools' terms: folders, epochs, steps, metrics, filters, the worst.

The first folder is the reference. What cannot be measured, because NaN or infinity is on one side only or shapes
differ, is always shown: no filter hides it. What only one folder has is counted and reported.

The command `python -m astray.compat.hooktools` compares by a YAML file, and writes the two YAML files that users of
hooktools begin with (`DEMOS`): every key with its meaning beside it. Both can be used as they are, except for the two
folders that a comparer compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from astray.comparison.comparison import compare
from astray.errors import AstrayError, CompareError, RunError, UsageError
from astray.foreign.hooktools.config import (
    DIRECTORY,
    FILE,
    METRICS,
    ComparerConfig,
    Given,
    Metric,
    custom_metrics,
    shown_values,
)
from astray.foreign.hooktools.files import CallFile, Label, Numbering, call_file, files_in, path_in_file, runs_in
from astray.foreign.hooktools.reader import HooktoolsRank, open_files
from astray.formatting.terminal import COULD_NOT, print_note, print_report
from astray.results.comparison import Comparison
from astray.store.run import RunData
from astray.wording import counted, printable

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class ComparerRow(NamedTuple):
    """A tensor whose error exceeds the filters, or cannot be measured."""

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
    """The result of comparing two dumps.

    shown: the tensors that exceed the filters, in order of observation. worst: the worst of these, the worst first.
    comparison: everything else, as by `astray.compare`; `numbering` has the epochs and steps of its step numbers.
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
        return "\n".join([*lines, *map(printable, [*_one_sided(self.comparison), *self.comparison.problems])])


class Comparer:
    """Compares two dumps as hooktools does.

    >>> result = Comparer("comparer_demo.yaml").compare()     # prints the worst
    >>> result.worst[0].site
    'h.2.mlp.proj'

    config: a YAML file, or a dict with its content; `astray help hooktools` has every key.
    """

    def __init__(self, config: Given) -> None:
        self._config = ComparerConfig.read(config)

    def compare(self) -> ComparerResult:
        """Compare, print the result, and return it."""
        result = self.find()
        if self._config.verbose:
            for row in result.shown:
                print_report(str(row))
        print_report(str(result))
        return result

    def find(self) -> ComparerResult:
        """Compare without printing. Raises CompareError when the dumps have nothing in common."""
        config = self._config
        first, second, numbering = self._runs()
        by = "order" if self._pairs_by_order else "key"
        diff = Comparison.of(compare(first, second, by=by, metrics=custom_metrics(config.metrics)))
        measured = {name: shown_values(metric, diff.pairs) for name, metric in self._metrics()}
        rows = np.flatnonzero(self._is_selected(diff))
        beyond, error = self._exceeding(measured, rows)
        shown = {row: _row(diff, measured, row) for row in rows[beyond].tolist()}
        order = rows[beyond][np.argsort(-error[beyond], kind="stable")]
        worst = tuple(shown[row] for row in order[: config.top].tolist())
        return ComparerResult(diff, numbering, len(rows), tuple(shown.values()), worst)

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        """The numbers of all configured metrics."""
        for name in self._config.metrics:
            yield from METRICS[name].items()

    @property
    def _pairs_by_order(self) -> bool:
        return self._config.by_order or self._config.mode == FILE

    def _runs(self) -> tuple[RunData, RunData, Numbering]:
        """The two sides, and the numbering of the steps of both."""
        sides = [self._files(paths) for paths in (self._config.first, self._config.second)]
        numbering = Numbering(file.label for side in sides for files in side.values() for file in files)
        first, second = (
            open_files(Path(paths[0]), side, numbering)
            for paths, side in zip((self._config.first, self._config.second), sides, strict=True)
        )
        return first, second, numbering

    def _files(self, paths: Sequence[str]) -> dict[int, list[CallFile]]:
        """The selected files of one side."""
        config = self._config
        if config.mode == DIRECTORY:
            files = {rank: files_in(folder) for rank, folder in runs_in(_existing(paths[0])).items()}
        else:
            files = {0: list(_listed(paths, without_labels=config.mode == FILE))}
        selected = {
            rank: [
                file
                for file in of_rank
                if file.phase in config.phases and file.label.epoch in config.epochs and file.label.step in config.steps
            ]
            for rank, of_rank in files.items()
        }
        if not any(selected.values()):
            raise CompareError(
                f"{paths[0]} has no file of {', '.join(config.phases)} in epoch {config.epochs}, step {config.steps}. "
                f"It has {_describe(files)}."
            )
        return selected

    def _is_selected(self, diff: Comparison) -> Bools:
        """The rows of the selected kinds of calls and parts of them."""
        config, pairs = self._config, diff.pairs
        selected = diff.matched.copy()
        kinds = np.array(pairs["kind"].tolist())
        if config.skip_modules:
            selected &= kinds != "module"
        if config.skip_functions:
            selected &= np.isin(kinds, ("module", "parameter"))
        if config.parts:
            selected &= np.array([_part(*cells) in config.parts for cells in zip(*_cells(diff), strict=True)], np.bool_)
        return selected

    def _exceeding(self, measured: Mapping[str, Floats], rows: npt.NDArray[np.intp]) -> tuple[Bools, Floats]:
        """Which of some rows are shown, and the error of each by the first metric, ∞ where it cannot be measured."""
        filters = self._config.filters
        shown, first = np.zeros(len(rows), np.bool_), np.zeros(len(rows))
        for index, name in enumerate(self._config.metrics):
            for shown_name, metric in METRICS[name].items():
                error = metric.error(measured[shown_name][rows])
                error = np.where(np.isnan(error), np.inf, error)
                shown |= error > filters.get(name, filters.get("global", 0.0))
                first = np.maximum(first, error) if index == 0 else first
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
    position = path_in_file(_folder(kind, phase), role, path)
    return "" if position is None else position.part


def _file(run: RunData, rank: int, call: int) -> Path | None:
    rank_run = run.ranks.get(rank)
    return rank_run.files[call] if isinstance(rank_run, HooktoolsRank) and call >= 0 else None


def _one_sided(diff: Comparison) -> Iterator[str]:
    """Sentences about tensors that only one of the dumps has."""
    for side, word in (("candidate", "first"), ("reference", "second")):
        rows = np.flatnonzero(diff.pairs.numbers(f"row_{side}") < 0)
        if len(rows):
            cells = diff.pairs.row(int(rows[0]))
            part = _part(*(cells[name] for name in _CELLS))
            example = f"{part} {cells['path']} of {cells['site']}"
            yield f"{counted(len(rows), 'tensor')} are only in the {word}, such as {example}."


def _existing(path: str) -> Path:
    if not Path(path).exists():
        raise RunError(f"{path} does not exist.")
    return Path(path)


def _listed(paths: Sequence[str], *, without_labels: bool) -> Iterator[CallFile]:
    """Files by their paths, or those of a folder. `without_labels`: their steps do not matter."""
    for path in map(_existing, paths):
        files = files_in(path) if path.is_dir() else [call_file(path)]
        for file in files:
            if file is None:
                raise CompareError(
                    f"{path} is not named as hooktools' files are: forward_000017.pt, backward_…, gradient_…."
                )
            yield file._replace(label=Label()) if without_labels else file


def _describe(files: Mapping[int, Sequence[CallFile]]) -> str:
    folders = sorted({f"{file.phase}/{file.label}" for of_rank in files.values() for file in of_rank})
    return f"{', '.join(folders[:5])}{' …' * (len(folders) > 5)}" if folders else "none at all"


# -- the command -------------------------------------------------------------------------------------------------------


DESCRIPTION = (
    "`python -m astray.compat.hooktools demo tracer` writes tracer_demo.yaml; `… compare FILE` compares by such a file."
)

TRACER = """\
# What a Tracer records: trace = Tracer("tracer_demo.yaml", model)

log_dir: ./tmp                  # files go to log_dir/{tracer_name}_{unixtime}
tracer_name: tracer_demo

trace_mode: 3                   # 0 nothing, 1 forward, 2 backward, 3 both
trace_granularity: 0            # 0 every module, also a loss outside of the model; 1 those of the model
register_hooks: [dump_pt_hook]  # [] traces nothing
only_input: false               # leave out what calls give
only_output: false              # leave out what calls are given
verbose: false                  # tell where files go and how many there are

dump_pt_hook_options:
  hook_specifiy_modules:        # only modules (and functions) of these names; none given are all
    starts_with: []             # such as [h.2.attn]
    regular_expression: []      # such as ['h\\.\\d+\\.mlp']

hacker_non_nn_modules: false    # trace functions too
hacker_options:
  verbose: false                # tell at each untrace how often each function was called
  supported_apis:               # these functions, in groups of any name; leave it out for every function of torch
    functional: [torch.nn.functional.softmax, torch.nn.functional.layer_norm]
    tensor: [torch.matmul, torch.Tensor.add]
"""

COMPARER = """\
# What a Comparer compares: Comparer("comparer_demo.yaml").compare()

compare_mode: 0                 # 0 folders, 1 two files, 2 two lists of files
compare_directory_options:
  compared_directory_1: ./good  # the reference: a log_dir, a run in it, or any folder inside that
  compared_directory_2: ./bad

compare_folder_name: [forward, backward]  # forward, backward, gradient
compare_epochs: -1              # 8; -1 all; [1, 3] these two; "[0,8)" from 0 to 7
compare_steps: -1

evaluation_metrics: [L1, CS]    # L1, AE, MAE, MSE, RMSE, MAPE, CS; the worst are those of the first
filter:
  global_filter: 0              # what is no further off is not shown
  # L1_filter: 1.0e-5           # the same for one metric

only_compare_input: false
only_compare_output: false
compare_by_order: false         # pair calls by their order, whatever their names
top_k: 10
"""

DEMOS = {"tracer": TRACER, "comparer": COMPARER}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 2 when it could not do its work."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        options.work(options)
    except (AstrayError, OSError) as error:
        print_note(f"{parser.prog}: {error}")
        return COULD_NOT
    return 0


def _demo(options: argparse.Namespace) -> None:
    file = options.output or Path(f"{options.of}_demo.yaml")
    if file.exists() and not options.force:
        raise UsageError(f"{file} is there already. Choose another name with -o, or overwrite it with --force.")
    file.write_text(DEMOS[options.of], encoding="utf-8")
    print_report(f"Wrote {file}. Edit it; `astray help hooktools` explains every key.")


def _compare(options: argparse.Namespace) -> None:
    result = Comparer(options.config).compare()
    if options.html is not None:
        print_report(f"The page is in {result.comparison.to_html(options.html)}.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m astray.compat.hooktools", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="write tracer_demo.yaml or comparer_demo.yaml, every key with its meaning")
    demo.add_argument("of", nargs="?", choices=tuple(DEMOS), default="tracer", help="which; tracer by default")
    demo.add_argument("-o", "--output", type=Path, metavar="FILE", help="under another name")
    demo.add_argument("--force", action="store_true", help="overwrite a file that is there")
    demo.set_defaults(work=_demo)
    compare = commands.add_parser("compare", help="compare two dumps as a comparer's YAML file says")
    compare.add_argument("config", metavar="FILE", help="such as comparer_demo.yaml")
    compare.add_argument("--html", type=Path, metavar="FILE", help="also write the page: choose epoch and metric there")
    compare.set_defaults(work=_compare)
    return parser
