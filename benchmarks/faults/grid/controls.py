"""Controls with many seeds: right runs with other weights and other data, of which none may be called wrong.

The grid itself has one control for each model and difference. What scatters like a random number is seen to scatter
only in many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tables import markdown

import astray
from faults.grid.cases import Keep
from faults.grid.models import MODELS
from faults.grid.recording import in_processes, record_training
from faults.grid.training import STEPS, Training
from faults.grid.variants import DIFFERENCES, Variant

APART = 1000
"""So far apart are the seeds of two controls: each run takes a few that follow each other."""


@dataclass(frozen=True)
class Control:
    """One pair of right runs, and what the comparison found most surprising; above 1 it is an alarm."""

    model: str
    noise: str
    seed: int
    is_alarm: bool
    surprise: float
    what: str


def judge_controls(
    folder: Path,
    models: Sequence[str],
    noises: Sequence[str],
    seeds: Sequence[int],
    keep: Keep,
    processes: int,
    steps: int = STEPS,
    noise_runs: int = 0,
) -> Iterator[Control]:
    """Record the runs that are not in the folder yet, and compare them, with so many perturbed references."""
    cells = [
        (model, noise, seed)
        for model in models
        if MODELS[model].available
        for noise in noises
        if DIFFERENCES[noise].available and DIFFERENCES[noise].kernels in (None, MODELS[model].kernels)
        for seed in seeds
    ]
    runs = dict.fromkeys(run for cell in cells for run in _runs(cell, keep, steps, noise_runs))
    for _ in in_processes(processes, _record, [folder] * len(runs), list(runs)):
        pass
    same = ([one] * len(cells) for one in (folder, keep, steps, noise_runs))
    yield from in_processes(processes, _judge, *same, cells)


class Run(NamedTuple):
    """A right run."""

    model: str
    variant: Variant
    seed: int
    keep: Keep
    steps: int
    perturb: int | None = None

    def path(self, folder: Path) -> Path:
        steps = "" if self.steps == STEPS else f"-{self.steps}-steps"
        perturbed = "" if self.perturb is None else f"-perturbed-{self.perturb}"
        return folder / self.model / self.variant.name / f"{self.seed}-{self.keep}{steps}{perturbed}"


def _runs(cell: tuple[str, str, int], keep: Keep, steps: int, noise_runs: int) -> list[Run]:
    """The reference of a control, its candidate, and its noise runs."""
    model, noise, seed = cell
    reference = Run(model, DIFFERENCES[noise].reference, seed, keep, steps)
    perturbed = [reference._replace(perturb=number) for number in range(1, noise_runs + 1)]
    return [reference, reference._replace(variant=DIFFERENCES[noise].candidate), *perturbed]


def _record(folder: Path, run: Run) -> None:
    path = run.path(folder)
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.unfinished")
        training = Training(MODELS[run.model], run.variant, run.steps, seed=APART * run.seed)
        options = {} if run.perturb is None else {"perturb": run.perturb}
        record_training(training, unfinished, level="module", keep=run.keep, **options)
        unfinished.rename(path)


def _judge(folder: Path, keep: Keep, steps: int, noise_runs: int, cell: tuple[str, str, int]) -> Control:
    model, noise, seed = cell
    reference, candidate, *perturbed = (run.path(folder) for run in _runs(cell, keep, steps, noise_runs))
    found = astray.compare(reference, candidate, noise=perturbed or None)
    suspect = found.suspects[0] if found.suspects else None
    what = "" if suspect is None else f"{suspect.measure} of {suspect.phase} {suspect.site}"
    return Control(model, noise, seed, found.first is not None, 0.0 if suspect is None else suspect.score, what)


def controls_table(controls: Sequence[Control]) -> str:
    """How many alarm, for each model and difference, and below them what they are."""
    all_, alarms = (Counter((one.model, one.noise) for one in some) for some in (controls, _alarms(controls)))
    noises = list(dict.fromkeys(one.noise for one in controls))
    models = list(dict.fromkeys(one.model for one in controls))
    rows = [
        [
            DIFFERENCES[noise].what,
            *(f"{alarms[model, noise]} of {all_[model, noise]}" if all_[model, noise] else "" for model in models),
        ]
        for noise in noises
    ]
    lines = [f"{one.model} {one.noise} {one.seed}: {one.what}, {one.surprise:.2f}" for one in _alarms(controls)]
    total = f"{len(lines)} of {len(controls)} right pairs are called wrong."
    return "\n\n".join([markdown(["reference → candidate", *models], rows, words=1), total, "\n".join(lines)]).strip()


def _alarms(controls: Sequence[Control]) -> list[Control]:
    return [one for one in controls if one.is_alarm]
