"""The walk from a run that is right and a program that may be wrong to a proven culprit.

1. The program is recorded as the reference was, by statistics and fingerprints, and compared.
2. A short part of it is recorded again: a program that does not repeat itself tells nothing of its faults.
3. The guilty step is recorded again, with functions and values around the suspect.
4. The suspect is tried: replayed, given the reference's inputs, replaced by the reference's results.
5. What remains wrong then is the next suspect.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from astray.comparison.divergence import Divergence
from astray.errors import AstrayError, UsageError
from astray.locate import trials
from astray.locate.located import Fault, Located, Trial
from astray.locate.programs import Program, RecordingRequest
from astray.locate.trials import Grafted, GraftTarget, Workshop
from astray.process import relative_to_cwd
from astray.results.comparison import Comparison
from astray.results.run import Run
from astray.steps import StepSelection

MOST_FAULTS = 3
"""So many faults are followed, each of which takes a few runs of the program. A fourth is named, and not tried."""

REPEATED_STEPS = 2
"""Steps of which it is looked whether the program repeats itself: the first, and one that depends on an update."""

UPDATES = "gradient,weight,state,update"


def locate(
    reference: Run,
    program: Program,
    folder: Path,
    *,
    steps: str | None = None,
    details: Sequence[Run] = (),
    reference_program: Program | None = None,
    prove: bool = True,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Located:
    """Finds the first call of a program that is wrong, and proves it.

    reference: the run that is right. folder: where the recordings of the walk go.
    steps: look only at these.
    details: further recordings of the reference, with the values of steps that turn out to be guilty.
    reference_program: records the reference again, where its run lacks values.
    prove: False: end when it is known whether the program agrees.
    options: those of `astray.compare`.
    say: told what is being done.
    """
    return _Locator(Workshop(reference, program, folder, options or {}, say), details, reference_program).go(
        steps, prove
    )


class _Locator:
    def __init__(self, shop: Workshop, details: Sequence[Run], reference_program: Program | None) -> None:
        self._shop = shop
        self._reference = shop.reference
        self._details = list(details)
        self._recorded: dict[RecordingRequest, Run] = {}  # further recordings of the reference
        self._reference_program = reference_program
        self._hints: dict[str, None] = {}

    def go(self, steps: str | None, prove: bool) -> Located:
        wanted = [step for step in self._reference.steps if step in StepSelection.parse(steps)]
        if not wanted:
            raise UsageError(
                f"{self._reference.path} has none of the steps {steps}; it has {_listed(self._reference.steps)}."
            )
        candidate = self._shop.record("candidate", self._as_reference(wanted))
        comparison = self._shop.compare(self._reference, candidate, steps=wanted)
        located = Located(self._reference.path, str(self._shop.program), self._shop.folder, comparison)
        if not comparison.same and prove:
            self._prove(located, candidate)
        located.hints = [] if located.verdict == "proven" else list(self._hints)
        return located

    def _as_reference(self, steps: Sequence[int]) -> RecordingRequest:
        """The settings of the reference, as far as they say which calls it has."""
        info = self._reference.info
        return RecordingRequest(
            steps=_listed(steps, most=None),
            until=steps[-1],
            level=",".join(info.words("level")) or "module",
            optimizer=",".join(info.words("optimizer")),
        )

    def _prove(self, located: Located, candidate: Run) -> None:
        short = candidate.steps[:REPEATED_STEPS]
        again = self._shop.record("again", self._as_reference(short))
        repeats = trials.repeats(candidate, again)
        located.trials.append(repeats)
        if repeats.outcome == "refutes":
            located.doubt = (
                f"{located.program} does not repeat itself, so that a difference from the reference says nothing. Set "
                "its seeds, as `astray.experiment.seed_all(0, deterministic=True)` does, in both programs."
            )
            return
        first = located.comparison.first
        grafts: tuple[str, ...] = ()
        while first is not None and len(located.faults) < MOST_FAULTS:
            fault, grafts = self._examined(first, located.comparison, len(located.faults) + 1, grafts)
            located.faults.append(fault)
            first = fault.rest if fault.proven else None
            if first is not None and trials.is_same_module(first, fault.divergence):
                break  # what a wrong call does to the gradients of its own parameters is not another fault

    # -- one suspect -------------------------------------------------------------------------------------------------

    def _examined(
        self, first: Divergence, comparison: Comparison, number: int, grafts: tuple[str, ...]
    ) -> tuple[Fault, tuple[str, ...]]:
        """The suspect more closely, and the trials on it; with the grafts that set it right.

        grafts: those that set right what was found before it.
        """
        name = f"fault-{number}"
        request = self._closely(first, trials.around(first, comparison.candidate))._replace(grafts=grafts)
        closer = self._shop.record(f"{name}-closer", request)
        values = self._values(first, request, name)
        if closer.info.framework != "torch":
            self._hints.setdefault(f"Nothing is tried on programs of {closer.info.framework}: they are compared alone.")
        elif self._shop.has_other_names:
            self._hints.setdefault("Values are not grafted between programs whose names differ (--map).")
        elif values is not None:
            return self._tried_beside(values, closer, first, comparison, name, grafts)
        fault = Fault(first, comparison)
        if closer.info.framework == "torch":
            fault.trials.append(trials.replayed(closer, first, None))
            if first.cause == "computation":
                whole = self._whole_step(first, grafts)
                fault.trials.append(self._tried("swap", trials.swapped, f"{name}-swap", first, whole))
        return fault, grafts

    def _tried_beside(
        self,
        values: Run,
        closer: Run,
        first: Divergence,
        comparison: Comparison,
        name: str,
        grafts: tuple[str, ...],
    ) -> tuple[Fault, tuple[str, ...]]:
        """The trials that take values of the reference."""
        fault = Fault(first, comparison)
        if not _is_computation(first):  # else a part is judged by what is wrong in it given the reference's inputs
            fault = self._named(first, comparison, closer, values)
        alone = self._judged_alone(fault.divergence, values, closer, name)
        if alone is not None and alone.comparison is not None and alone.comparison.first is not None:
            fault = Fault(alone.comparison.first, alone.comparison)
        fault.trials.append(trials.replayed(closer, fault.divergence, values))
        if alone is not None:
            fault.trials.append(alone.trial)
        suspect = GraftTarget.of(fault.divergence, values, alone.run if alone is not None else closer)
        grafts = self._grafted(fault, suspect, name, first, values, self._whole_step(fault.divergence, grafts))
        if alone is None and _is_computation(fault.divergence):
            # The divergence also goes where something before the suspect is wrong, and it alone passes that on.
            fault.trials = [
                each._replace(outcome="supports") if each.name == "graft" else each for each in fault.trials
            ]
        return fault, grafts

    def _judged_alone(self, divergence: Divergence, values: Run, closer: Run, name: str) -> trials.Alone | None:
        if not _is_computation(divergence):
            return None
        try:
            return trials.by_itself(self._shop, name, divergence, values, closer)
        except AstrayError as error:  # the program did not survive it, or what is left cannot be compared
            self._hints.setdefault(str(error))
            return None

    def _closely(self, first: Divergence, match: str) -> RecordingRequest:
        """How the guilty step is recorded again: with the one before it where a weight came out wrong of that."""
        begin, end = self._window(first)
        steps = str(end) if begin == end else f"{begin}:{end + 1}"
        update = trials.is_of_parameter(first) or first.cause == "parameter"
        return RecordingRequest(
            steps=steps,
            until=end,
            level="module,function",
            keep="stats,tensors",
            match=match,
            optimizer=UPDATES if update else "",
        )

    def _window(self, first: Divergence) -> tuple[int, int]:
        """The first and the last step that show a fault: of a wrong weight the update before it too, and vice versa."""
        known = self._reference.steps
        if trials.is_of_parameter(first):
            return first.step, first.step + (first.step + 1 in known)
        if first.cause == "parameter" and first.step - 1 in known:
            return first.step - 1, first.step
        return first.step, first.step

    def _whole_step(self, divergence: Divergence, grafts: tuple[str, ...]) -> RecordingRequest:
        """How the step is recorded in which the divergence should be gone; that of an update shows in the next."""
        base = self._as_reference([divergence.step + trials.is_of_parameter(divergence)])
        functions = any("/" in graft.rpartition(":")[2] for graft in grafts) or "/" in divergence.site
        if functions and "function" not in base.level:  # a function is grafted where it is seen
            base = base._replace(level=f"{base.level},function")
        return base._replace(grafts=grafts)

    def _values(self, first: Divergence, request: RecordingRequest, name: str) -> Run | None:
        """A recording of the reference with values around the suspect."""
        for run in (*self._details, self._reference):
            if trials.keeps_values(run, first.step, request.match):
                return run
        again = request._replace(grafts=())
        if again in self._recorded:
            return self._recorded[again]
        if self._reference_program is None:
            self._hints.setdefault(self._record_again(again))
            return None
        run = self._recorded[again] = self._shop.record(f"{name}-reference", again, self._reference_program)
        differs = self._shop.compare(self._reference, run, steps=first.step).first
        if differs is None:
            return run
        self._hints.setdefault(
            f"{self._reference_program} does not give what {relative_to_cwd(self._reference.path)} holds: "
            f"{differs.place} differs. Its values were not used."
        )
        return None

    def _record_again(self, request: RecordingRequest) -> str:
        words = shlex.join(request.options())
        path, command = relative_to_cwd(self._reference.path), " ".join(self._reference.info.command)
        return (
            f"{path} kept no values of this step. Record them where the reference was recorded (as: {command}) with "
            f"`astray run -o RUN {words} SCRIPT`, and give that run as --details RUN; or give --reference-command "
            "'SCRIPT ARGUMENTS' if it runs here."
        )

    def _named(self, first: Divergence, comparison: Comparison, closer: Run, values: Run) -> Fault:
        """The suspect as the closer recordings show it."""
        begin, end = self._window(first)
        match = trials.around(first, comparison.candidate)
        try:
            close = self._shop.compare(values, closer, steps=f"{begin}:{end + 1}", sites=match)
        except AstrayError as error:
            self._hints.setdefault(str(error))
            return Fault(first, comparison)
        if close.first is not None and trials.is_closer(close.first, first):
            return Fault(close.first, close)
        return Fault(first, comparison)

    def _grafted(
        self, fault: Fault, suspect: GraftTarget, name: str, first: Divergence, values: Run, whole: RecordingRequest
    ) -> tuple[str, ...]:
        """Replaces the suspect's results by the reference's."""
        if whole.until not in self._reference.steps:
            text = "the reference ends with this step, so that what comes of it is not known"
            fault.trials.append(Trial("graft", "nothing", text))
            return whole.grafts
        try:
            found = trials.grafted(self._shop, f"{name}-graft", suspect, first, values, whole)
            if found.rest is not None and suspect.is_like(found.rest):
                found = self._grafted_wider(found, suspect, name, first, values, whole)
        except AstrayError as error:
            fault.trials.append(Trial("graft", "nothing", str(error)))
            return whole.grafts
        fault.trials.append(found.trial)
        fault.rest = found.rest
        self._shop.bypassed = found.bypassed
        return found.grafts

    def _grafted_wider(
        self, found: Grafted, suspect: GraftTarget, name: str, first: Divergence, values: Run, whole: RecordingRequest
    ) -> Grafted:
        """What remains is the same in other layers, or for other parameters: it is one fault, if all go at once."""
        request = self._closely(suspect.divergence, "")
        match = "" if trials.is_of_parameter(suspect.divergence) else trials.in_every_layer(re.escape(suspect.site))
        wide = request._replace(match=match and f"^{match}([./]|$)", optimizer="")
        if self._reference_program is not None and values in self._recorded.values():
            values = self._shop.record(f"{name}-reference-wider", wide, self._reference_program)
        wider = trials.grafted(self._shop, f"{name}-graft-wider", suspect, first, values, whole, wider=True)
        return wider if wider.rest is None else found

    def _tried(self, name: str, trial: Callable[..., Trial], *given: Any) -> Trial:
        try:
            return trial(self._shop, *given)
        except AstrayError as error:  # the program did not survive it, or what is left cannot be compared
            return Trial(name, "nothing", str(error))


def _is_computation(divergence: Divergence) -> bool:
    """Whether a call is blamed for what it makes of its inputs, and not a parameter or what was given to it."""
    return divergence.cause == "computation" and not trials.is_of_parameter(divergence)


def _listed(steps: Sequence[int], most: int | None = 10) -> str:
    """Steps as `--steps` takes them: a range where they are one."""
    if len(steps) > 1 and list(steps) == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}:{steps[-1] + 1}"
    shown = steps if most is None else steps[:most]
    return ",".join(map(str, shown))
