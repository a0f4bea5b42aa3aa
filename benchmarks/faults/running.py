"""Records the reference and the candidates, and compares them.

One reference serves all faults of its program that are recorded by the same options.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import astray
from faults.declared import ANYWHERE, CONTROLS, Control, Culprit, Fault, Plant, Setting
from faults.ranks import Ranks
from faults.training import Program, Training


@dataclass(frozen=True)
class Outcome:
    """What came of comparing a candidate with its reference."""

    comparison: astray.Comparison
    seconds: float  # to train, record and compare the candidate


class Bench:
    """Keeps the references of one command in a folder, and the processes that distributed programs run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[tuple[str, Program], Path] = {}  # by how it is recorded, and what
        self._ranks: dict[int, Ranks] = {}

    def reference(self, setting: Setting, program: Program) -> Path:
        """The run of the program without any fault, recorded when it is first asked for."""
        key = (repr(setting.options), program)
        if key not in self._references:
            path = self.folder / f"reference-{len(self._references)}"
            self._record(path, setting, program, [])
            self._references[key] = path
        return self._references[key]

    def measure(self, planted: Fault | Control, setting: Setting) -> Outcome:
        """Run the program with the fault in it, and compare. The candidate's run is removed afterwards."""
        reference, candidate = self.reference(setting, planted.program), self.folder / "candidate"
        begin = time.perf_counter()
        try:
            background = [] if setting.background is None else [CONTROLS[setting.background].plant]
            self._record(candidate, setting, planted.program, [*background, planted.plant])
            return Outcome(astray.compare(reference, candidate), time.perf_counter() - begin)
        finally:
            shutil.rmtree(candidate, ignore_errors=True)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()

    def _record(self, path: Path, setting: Setting, program: Program, plants: Sequence[Plant]) -> None:
        if program.ranks == 1:
            record(0, path, setting, program, plants)
            return
        if program.ranks not in self._ranks:
            self._ranks[program.ranks] = Ranks(program.ranks, self.folder / f"meeting-of-{program.ranks}")
        self._ranks[program.ranks].call(record, path, setting, program, plants)


def is_recorded(culprit: Culprit, setting: Setting, run: astray.Run) -> bool:
    """Whether a run has the call that a culprit names, so that a comparison can name it too."""
    calls = run.ranks[0].calls
    here = zip(calls["step"], calls["phase"], calls["site"], strict=True)
    sites = {site for step, phase, site in here if (step, phase) == (culprit.step, culprit.phase)}
    if culprit.site == ANYWHERE:
        return bool(sites)
    if not setting.functions:
        return culprit.site in sites
    if culprit.function is not None:
        return f"{culprit.site}/{culprit.function}" in sites
    return culprit.site in sites or any(site.startswith(f"{culprit.site}/") for site in sites)


def record(rank: int, path: Path, setting: Setting, program: Program, plants: Sequence[Plant]) -> None:
    """Train the program, with what is planted in it, and record it."""
    training = Training(program, rank)
    for plant in plants:
        plant(training)
    with astray.record(path, training.model, **setting.options) as recorder:
        training.run(recorder.step)
