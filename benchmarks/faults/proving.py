"""Which faults `locate` proves, each as a user would have it: the reference kept statistics of modules alone.

The reference's program runs here, so that `locate` can record the guilty step of it again, with values.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tables import markdown

import astray
from astray.capture.children import LastStep, end_after
from astray.errors import AstrayError
from astray.locate.locate import locate
from astray.locate.located import Located
from astray.locate.programs import RecordingRequest
from faults.declared import SETTINGS, Fault, Plant
from faults.report import described
from faults.scoring import is_module, score
from faults.training import Program, Training

_FUNCTIONS = replace(SETTINGS["functions"], optimizer=True)


@dataclass(frozen=True)
class PlantedProgram:
    """The training with what is planted in it, as `locate` runs it."""

    name: str
    program: Program
    plants: Sequence[Plant] = ()

    def __str__(self) -> str:
        return self.name

    def record(self, path: Path, request: RecordingRequest) -> None:
        training = Training(self.program)
        for plant in self.plants:
            plant(training)
        with (
            suppress(LastStep),
            astray.record(path, training.model, overwrite=True, **request.settings()) as recorder,
        ):
            if request.until is not None:
                recorder.on_step_end = partial(end_after, request.until)
            training.run(recorder.step)


@dataclass(frozen=True)
class Proof:
    """What `locate` has found of a fault; `why` says what went wrong where it found nothing."""

    fault: Fault
    located: Located | None
    why: str = ""

    @property
    def verdict(self) -> str:
        return "failed" if self.located is None else self.located.verdict

    @property
    def is_culprit(self) -> bool:
        """Whether the first fault that it names is the declared culprit, or in the code of its module."""
        found = self.located.faults[0].divergence if self.located is not None and self.located.faults else None
        settings = (SETTINGS["modules"], SETTINGS["updates"], SETTINGS["functions"], _FUNCTIONS)
        expected = [
            (self.fault.expected(setting), setting)
            for setting in settings
            if setting.sees(self.fault.culprit) or self.fault.shows
        ]
        return found is not None and any(
            score(found, culprit, setting) == "exact" or (is_module(found, culprit) and found.phase == culprit.phase)
            for culprit, setting in expected
        )


def prove(fault: Fault, folder: Path) -> Proof:
    """Runs `locate` on a fault."""
    right, wrong = PlantedProgram("right", fault.program), PlantedProgram(fault.name, fault.program, (fault.plant,))
    try:
        right.record(folder / "reference", RecordingRequest())
        reference = astray.open(folder / "reference")
        return Proof(fault, locate(reference, wrong, folder / "walk", reference_program=right))
    except AstrayError as error:
        return Proof(fault, None, str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def applies(fault: Fault) -> bool:
    """Faults of one process: this program runs its ranks in processes of its own."""
    return fault.program.ranks == 1


def proof_table(proofs: Sequence[Proof]) -> str:
    """One line for each fault: what was found, whether it is the culprit, and by what it was proven."""
    rows = []
    for proof in proofs:
        located = proof.located
        faults = located.faults if located is not None else []
        by = ", ".join(trial.name for trial in faults[0].trials if trial.outcome == "proves") if faults else proof.why
        mark = proof.verdict if proof.verdict == "proven" else f"**{proof.verdict}**"
        rows.append(
            [
                proof.fault.name,
                described(faults[0].divergence if faults else None),
                "yes" if proof.is_culprit else "**no**",
                mark,
                by,
            ]
        )
    return markdown(["fault", "found", "the culprit", "proven", "by"], rows, words=5)


def proof_totals(proofs: Sequence[Proof]) -> str:
    proven = [proof for proof in proofs if proof.verdict == "proven"]
    right = [proof for proof in proven if proof.is_culprit]
    silent = [proof for proof in proofs if proof.verdict == "agrees"]
    numbers = [len(proofs), len(right), len(proven) - len(right), len(proofs) - len(proven) - len(silent), len(silent)]
    heads = ["faults", "proven, the culprit", "proven, something else", "not proven", "no alarm"]
    return markdown(heads, [[str(number) for number in numbers]], words=0)
