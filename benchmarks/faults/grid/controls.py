"""Controls with many seeds: right runs with other weights and other data, of which none may be called wrong.

The grid itself has one control for each model and difference. What scatters like a random number is seen to scatter
only in many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import markdown

import astray
from faults.grid.cases import Keep
from faults.grid.models import MODELS
from faults.grid.recording import in_processes, record_training
from faults.grid.training import Training
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
    folder: Path, models: Sequence[str], noises: Sequence[str], seeds: Sequence[int], keep: Keep, processes: int
) -> Iterator[Control]:
    """Record the runs that are not in the folder yet, and compare them."""
    cells = [
        (model, noise, seed)
        for model in models
        if MODELS[model].available
        for noise in noises
        if DIFFERENCES[noise].available and DIFFERENCES[noise].kernels in (None, MODELS[model].kernels)
        for seed in seeds
    ]
    runs = {
        (model, variant, seed): None
        for model, noise, seed in cells
        for variant in (DIFFERENCES[noise].reference, DIFFERENCES[noise].candidate)
    }
    for _ in in_processes(processes, _record, [folder] * len(runs), list(runs), [keep] * len(runs)):
        pass
    yield from in_processes(processes, _judge, [folder] * len(cells), cells, [keep] * len(cells))


def _path(folder: Path, model: str, variant: Variant, seed: int, keep: Keep) -> Path:
    return folder / model / variant.name / f"{seed}-{keep}"


def _record(folder: Path, run: tuple[str, Variant, int], keep: Keep) -> None:
    path = _path(folder, *run, keep)
    if not path.exists():
        model, variant, seed = run
        unfinished = path.with_name(f"{path.name}.unfinished")
        training = Training(MODELS[model], variant, seed=APART * seed)
        record_training(training, unfinished, level="module", keep=keep)
        unfinished.rename(path)


def _judge(folder: Path, cell: tuple[str, str, int], keep: Keep) -> Control:
    model, noise, seed = cell
    sides = DIFFERENCES[noise].reference, DIFFERENCES[noise].candidate
    reference, candidate = (astray.open(_path(folder, model, one, seed, keep)) for one in sides)
    found = astray.compare(reference, candidate)
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
