"""Which of the grid's faults `locate` proves, beside an honest difference: other kernels, another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from faults.declared import SETTINGS
from faults.grid.catalogue import KINDS
from faults.grid.declared import Kind
from faults.grid.models import MODELS, Model
from faults.grid.recording import in_processes
from faults.grid.training import STEPS, Training
from faults.grid.variants import DIFFERENCES, Difference, Half, Variant
from faults.proving import Proof, TrainedProgram, prove

_SETTINGS = (SETTINGS["modules"], SETTINGS["functions"])

Cell = tuple[Model, Difference, Kind | None, Half]


def prove_all(folder: Path, cells: Sequence[Cell], processes: int) -> list[tuple[Half, Proof]]:
    """Runs `locate` on each cell, in so many processes."""
    names = [(model.name, difference.name, None if kind is None else kind.name) for model, difference, kind, _ in cells]
    proofs = in_processes(processes, _prove, [folder] * len(cells), names)
    return [(cell[3], proof) for cell, proof in zip(cells, proofs, strict=True)]


def _prove(folder: Path, cell: tuple[str, str, str | None]) -> Proof:
    model, difference, name = MODELS[cell[0]], DIFFERENCES[cell[1]], cell[2]
    kind = None if name is None else KINDS[name]
    culprits = []
    if kind is not None:
        fault = kind.planted(model)
        seen = [setting for setting in _SETTINGS if setting.sees(fault.culprit) or fault.shows]
        culprits = [(culprit, setting) for setting in seen for culprit in (fault.expected(setting), *kind.also)]
    steps = STEPS if kind is None else kind.steps
    right = TrainedProgram("right", partial(_training, model, difference.reference, None, steps))
    wrong = TrainedProgram("wrong", partial(_training, model, difference.candidate, kind, steps))
    title = f"{model.name}/{difference.name}/{name or 'control'}"
    return prove(title, culprits, right, wrong, folder / title.replace("/", "-"))


def _training(model: Model, variant: Variant, kind: Kind | None, steps: int) -> Training:
    training = Training(model, variant, steps)
    if kind is not None:
        kind.planted(model).plant(training)  # type: ignore[arg-type]
    training.prepare()
    return training
