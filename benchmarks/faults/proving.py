"""Which faults `locate` proves, as a user would have it: the reference kept statistics of modules alone.

The reference's program runs here, so that `locate` can record the guilty step of it again, with values. Of a control
nothing may be proven.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from tables import markdown

import astray
from astray.capture.children import LastStep, end_after
from astray.errors import AstrayError
from astray.locate.locate import locate
from astray.locate.located import Located
from astray.locate.programs import RecordingRequest
from faults.declared import SETTINGS, Control, Culprit, Fault, Plant, Setting
from faults.report import described
from faults.scoring import is_module, score
from faults.training import Program, Training

_FUNCTIONS = replace(SETTINGS["functions"], optimizer=True)
_SETTINGS = (SETTINGS["modules"], SETTINGS["updates"], SETTINGS["functions"], _FUNCTIONS)


class Trains(Protocol):
    """A training: its model, and the loop over its steps."""

    model: object

    def run(self, end_step: Callable[[], object]) -> None: ...


@dataclass(frozen=True)
class TrainedProgram:
    """A training as `locate` runs it. make: builds it anew, with what is planted in it."""

    name: str
    make: Callable[[], Trains]

    def __str__(self) -> str:
        return self.name

    def record(self, path: Path, request: RecordingRequest) -> None:
        training = self.make()
        with (
            suppress(LastStep),
            astray.record(path, training.model, overwrite=True, **request.settings()) as recorder,
        ):
            if request.until is not None:
                recorder.on_step_end = partial(end_after, request.until)
            training.run(recorder.step)


@dataclass(frozen=True)
class Proof:
    """What `locate` has found of a fault, or of a control, which has no culprits.

    culprits: the call to name, as each setting of a recording has it. verdict: that of `locate`, or "failed". found:
    the first fault that it names. by: the trials that prove it, or what went wrong.
    """

    name: str
    culprits: Sequence[tuple[Culprit, Setting]]
    verdict: str
    found: astray.Divergence | None = None
    by: str = ""

    @classmethod
    def of(cls, name: str, culprits: Sequence[tuple[Culprit, Setting]], located: Located) -> Proof:
        if not located.faults:
            return cls(name, culprits, located.verdict, None, located.doubt)
        first = located.faults[0]
        by = ", ".join(trial.name for trial in first.trials if trial.outcome == "proves")
        return cls(name, culprits, located.verdict, first.divergence, by)

    @property
    def is_culprit(self) -> bool:
        """Whether the first fault that it names is the declared culprit, or in the code of its module."""
        found = self.found
        return found is not None and any(
            score(found, culprit, setting) == "exact" or (is_module(found, culprit) and found.phase == culprit.phase)
            for culprit, setting in self.culprits
        )


def prove_planted(planted: Fault | Control, folder: Path) -> Proof:
    """Runs `locate` on a fault or a control of the small GPT."""
    culprits = []
    if isinstance(planted, Fault):
        seen = [setting for setting in _SETTINGS if setting.sees(planted.culprit) or planted.shows]
        culprits = [(planted.expected(setting), setting) for setting in seen]
    right = TrainedProgram("right", partial(_training, planted.program))
    wrong = TrainedProgram(planted.name, partial(_training, planted.program, planted.plant))
    return prove(planted.name, culprits, right, wrong, folder)


def _training(program: Program, plant: Plant | None = None) -> Training:
    training = Training(program)
    if plant is not None:
        plant(training)
    return training


def prove(
    name: str,
    culprits: Sequence[tuple[Culprit, Setting]],
    right: TrainedProgram,
    wrong: TrainedProgram,
    folder: Path,
) -> Proof:
    """Records the right program, and lets `locate` look for what is wrong in the other."""
    try:
        right.record(folder / "reference", RecordingRequest())
        reference = astray.open(folder / "reference")
        return Proof.of(name, culprits, locate(reference, wrong, folder / "walk", reference_program=right))
    except AstrayError as error:
        return Proof(name, culprits, "failed", by=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def applies(planted: Fault | Control) -> bool:
    """Those of one process: the ranks of the others are processes of their own."""
    return planted.program.ranks == 1


# -- tables ------------------------------------------------------------------------------------------------------------


def proof_table(proofs: Sequence[Proof]) -> str:
    """One line for each: what was found, whether it is the culprit, and by what it was proven."""
    return markdown(["planted", "found", "the culprit", "proven", "by"], map(_line, proofs), words=5)


def _line(proof: Proof) -> list[str]:
    right = "agrees" if not proof.culprits else "proven"
    mark = proof.verdict if proof.verdict == right else f"**{proof.verdict}**"
    culprit = "" if not proof.culprits else "yes" if proof.is_culprit else "**no**"
    return [proof.name, described(proof.found), culprit, mark, proof.by]


def proof_totals(proofs: Sequence[Proof]) -> str:
    faults, controls = ([one for one in proofs if bool(one.culprits) is wanted] for wanted in (True, False))
    proven = [one for one in faults if one.verdict == "proven"]
    right = [one for one in proven if one.is_culprit]
    silent = [one for one in faults if one.verdict == "agrees"]
    alarms = [one for one in controls if one.verdict == "proven"]
    numbers = {
        "faults": len(faults),
        "proven, the culprit": len(right),
        "proven, something else": len(proven) - len(right),
        "not proven": len(faults) - len(proven) - len(silent),
        "no alarm": len(silent),
        "controls": len(controls),
        "agree": len([one for one in controls if one.verdict == "agrees"]),
        "proven wrong": len(alarms),
    }
    return markdown(numbers, [map(str, numbers.values())], words=0)
