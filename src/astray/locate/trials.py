"""Experiments on a suspect: the program once more, with one thing of the reference's in it, or one thing elsewhere.

`Workshop` records and compares; the functions below it are the trials, each of which gives a `Trial`. A graft proves a
suspect when two things hold: given the reference's inputs its result is still wrong, and with the reference's results
in the place of its own the divergence is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import astray
from astray.comparison.divergence import Divergence
from astray.errors import AstrayError
from astray.locate.located import Trial
from astray.locate.programs import Program, RecordingRequest
from astray.process import relative_to_cwd
from astray.records import ROOT
from astray.report.text import error_of
from astray.results.comparison import Comparison
from astray.results.run import Run
from astray.wording import counted

SWAPPED_TO = "float64"
"""Where a suspect is computed when there are no values of the reference to graft, on a CPU; elsewhere it is the CPU."""


class Workshop:
    """Records a program in one folder, and compares what it has recorded with the reference.

    options: those of `astray.compare`, for every comparison. say: told what is being done.
    """

    def __init__(
        self,
        reference: Run,
        program: Program,
        folder: Path,
        options: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self.reference = reference
        self.program = program
        self.folder = folder
        self._options = dict(options)
        self.say = say

    @property
    def has_other_names(self) -> bool:
        """Whether a mapping says what the candidate's names are in the reference."""
        return self._options.get("mapping") is not None

    def record(self, name: str, request: RecordingRequest, program: Program | None = None) -> Run:
        """Records the program, or another one, into a folder of this name."""
        path = self.folder / name
        self.say(f"recording {name}: {_described(request)}")
        (program or self.program).record(path, request)
        return astray.open(path)

    def compare(self, reference: Run, candidate: Run, *, steps: Any = None, sites: str | None = None) -> Comparison:
        return astray.compare(reference, candidate, steps=steps, sites=sites, **self._options)


def _described(request: RecordingRequest) -> str:
    steps = f"step{'' if request.steps.isdecimal() else 's'} {request.steps}" if request.steps else "all steps"
    what = f"{request.level}, {request.keep}"
    around = f", sites {request.match}" if request.match else ""
    return f"{steps}, {what}{around}{''.join(f', graft {graft}' for graft in request.grafts)}" + "".join(
        f", swap {swap}" for swap in request.swaps
    )


# -- where to look -----------------------------------------------------------------------------------------------------


def module_of(divergence: Divergence) -> str:
    """The module whose call is blamed; empty outside of all."""
    site = divergence.site.partition("/")[0]
    if divergence.phase == "update" or divergence.type == "parameter":  # the site is that of a parameter
        return site.rpartition(".")[0]
    return site


def around(divergence: Divergence) -> str:
    """A regular expression for the sites around a suspect: the module that holds it, with all that is inside."""
    module = module_of(divergence)
    if not module:
        return "^/"
    if module == ROOT:
        return rf"^{re.escape(ROOT)}(/|$)"
    outer = module.rpartition(".")[0] or module
    return rf"^{_any_layer(outer)}([./]|$)"


def _any_layer(site: str) -> str:
    """A regular expression for a site in each layer: a port that does one layer otherwise does all of them so."""
    return re.sub(r"\d+", r"\\d+", re.escape(site))


def is_sibling(site: str, other: str) -> bool:
    """Whether two sites are the same in two layers."""
    return site != other and re.fullmatch(_any_layer(site), other) is not None


def keeps_values(run: Run, step: int, match: str) -> bool:
    """Whether a run kept values in this step at sites that fit."""
    for rank in run.ranks.values():
        kept = rank.tensors.valid("blob_file")
        calls = rank.call_rows
        steps, sites = rank.calls.numbers("step"), rank.calls.coded("site")
        fits = [re.search(match, site or "") is not None for site in sites.values]
        for row in kept.nonzero()[0].tolist():
            call = calls[row]
            if call >= 0 and steps[call] == step and fits[sites.codes[call]]:
                return True
    return False


# -- trials ------------------------------------------------------------------------------------------------------------


def repeats(candidate: Run, again: Run) -> Trial:
    """Two recordings of the same program, in the same steps: what it does not repeat says nothing of a fault."""
    steps = [step for step in again.steps if step in candidate.steps]
    what = f"two runs of {counted(len(steps), 'step')}"
    if astray.compare(candidate, again, steps=steps, exact=True).same:
        return Trial("repeats", "supports", f"{what} are equal, bit for bit", again.path)
    judged = astray.compare(candidate, again, steps=steps)
    if judged.first is None:
        exact = astray.compare(candidate, again, steps=steps, exact=True).first
        where = f", first {exact.place}" if exact is not None else ""
        return Trial("repeats", "nothing", f"{what} agree up to rounding{where}", again.path)
    return Trial("repeats", "refutes", f"{what} differ: {judged.first.place}; {error_of(judged.first)}", again.path)


def replayed(closer: Run, divergence: Divergence, reference: Run | None) -> Trial:
    """The calls around a suspect, executed again from their own inputs."""
    try:
        replay = closer.replay(steps=divergence.step)
    except AstrayError as error:
        return Trial("replay", "nothing", str(error), closer.path)
    number = f"{len(replay.calls):,} of {counted(replay.total, 'call')} around it executed again"
    if not replay.stands_out:
        if not replay.calls:
            return Trial(
                "replay", "nothing", f"none of {counted(replay.total, 'call')} around it can be executed again"
            )
        text = f"{number}: each result is what its inputs and arguments explain"
        return Trial("replay", "nothing", text, closer.path)
    worst = next((call for call in replay.stands_out if call.site == divergence.site), replay.stands_out[0])
    judgement = worst.worst.judgement
    text = (
        f"{number}: the {worst.worst.phase} of {worst.site} is {_times(judgement.surprise)} times as far from the "
        "exact result as rounding explains"
    )
    own = _in_reference(reference, worst.site, divergence.step)
    return Trial("replay", "proves", f"{text}{own}", closer.path)


def _in_reference(reference: Run | None, site: str, step: int) -> str:
    if reference is None:
        return ""
    try:
        calls = reference.replay(site, steps=step)
    except AstrayError:
        return ""
    if not calls.calls:
        return ""
    return "; in the reference too" if calls.stands_out else "; in the reference it is right"


def _times(surprise: float) -> str:
    from astray.formatting import figures

    return figures.surprise(surprise)


def by_itself(shop: Workshop, name: str, divergence: Divergence, values: Run, request: RecordingRequest) -> Trial:
    """Whether the suspect's result is wrong also when it is given the reference's inputs and parameters."""
    if divergence.clean:
        return Trial("inputs", "supports", "all that it is given is identical to the reference's, bit for bit")
    grafts = (*_specs(values, divergence.site, "inputs"), *_specs(values, module_of(divergence), "parameters"))
    run = shop.record(f"{name}-inputs", request._replace(grafts=(*request.grafts, *grafts)))
    fits = f"^{re.escape(divergence.site)}$"
    found = shop.compare(values, run, steps=divergence.step, sites=fits).first
    if found is None:
        return Trial("inputs", "refutes", "given the reference's inputs, its result is right", run.path)
    text = f"given the reference's inputs, its {found.place.tensor} is still wrong: {error_of(found)}"
    return Trial("inputs", "supports", text, run.path)


def grafted(
    shop: Workshop, name: str, divergence: Divergence, values: Run, request: RecordingRequest, *, layers: bool = False
) -> tuple[Trial, Divergence | None, tuple[str, ...]]:
    """The reference's tensors in place of the suspect's: is the divergence gone?

    layers: also in place of the same site's in all other layers. Returns the trial, what is wrong then, and the grafts.
    """
    grafts = _grafts(values, divergence, layers=layers)
    run = shop.record(name, request._replace(grafts=(*request.grafts, *grafts)))
    comparison = shop.compare(shop.reference, run, steps=request.steps)
    what = _grafted_words(divergence, layers=layers)
    rest = comparison.first
    step = f"step {divergence.step}" if divergence.phase != "update" else f"step {divergence.step + 1}"
    if rest is None:
        return Trial("graft", "proves", f"with {what}, nothing in {step} is wrong any more", run.path), None, grafts
    where = f"{rest.place} is wrong: {error_of(rest)}"
    if rest.site == divergence.site and rest.phase == divergence.phase:
        return Trial("graft", "nothing", f"with {what}, it is wrong still: {where}", run.path), rest, grafts
    return Trial("graft", "proves", f"with {what}, it is right; after it {where}", run.path), rest, grafts


def _grafted_words(divergence: Divergence, *, layers: bool) -> str:
    noun = {"parameter": "parameters", "input": "inputs"}.get(divergence.cause, "results")
    if divergence.phase == "update":
        noun = "updated parameters"
    where = " in all layers" if layers else ""
    return f"the reference's {noun} in place of its own{where}"


def _grafts(values: Run, divergence: Divergence, *, layers: bool) -> tuple[str, ...]:
    """What is taken from the reference so that the suspect is as it should be."""
    module = module_of(divergence) or ROOT
    if divergence.phase == "update" or divergence.cause == "parameter":
        return _specs(values, module, "parameters", layers=layers)
    if divergence.cause == "input":
        return _specs(values, divergence.site, "inputs", layers=layers)
    results = _specs(values, divergence.site, "outputs", layers=layers)
    return (*results, *_specs(values, divergence.site, "gradients", layers=layers))


def _specs(values: Run, site: str, what: str, *, layers: bool = False) -> tuple[str, ...]:
    if not site:
        return ()
    return (f"{relative_to_cwd(values.path)}:{_any_layer(site) if layers else re.escape(site)}@{what}",)


def swapped(shop: Workshop, name: str, divergence: Divergence, request: RecordingRequest) -> Trial:
    """The suspect computed elsewhere: where it cannot be compared with the reference's values, this may tell."""
    on_cpu = divergence.candidate.device.startswith("cpu") or not divergence.candidate.device
    to = SWAPPED_TO if on_cpu else "cpu"
    run = shop.record(name, request._replace(swaps=(f"{re.escape(divergence.site)}={to}",)))
    rest = shop.compare(shop.reference, run, steps=request.steps).first
    where = "in float64" if on_cpu else "on the CPU"
    if rest is None:
        return Trial("swap", "proves", f"computed {where}, it and all that follows is right", run.path)
    return Trial("swap", "nothing", f"computed {where}, it is no better: {rest.place}; {error_of(rest)}", run.path)
