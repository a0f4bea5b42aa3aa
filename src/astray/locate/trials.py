"""Experiments on a suspect: the program once more, with one thing of the reference's in it, or one thing elsewhere.

`Workshop` records and compares; the functions below it are the trials, each of which gives a `Trial`. A graft proves a
suspect when two things hold: given the reference's inputs its result is still wrong, and with the reference's results
in the place of its own the divergence is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import astray
from astray.comparison.divergence import Divergence
from astray.comparison.verdict import AGREEING
from astray.errors import AstrayError
from astray.formatting import figures
from astray.locate.located import Trial
from astray.locate.programs import Program, RecordingRequest
from astray.process import relative_to_cwd
from astray.records import ROOT
from astray.report.text import error_of
from astray.results.comparison import Comparison
from astray.results.run import Run
from astray.store import RunData
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
        self.bypassed: tuple[str, ...] = ()
        """Regular expressions for functions that are not judged: grafts take the place of what they give."""

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
    return site.rpartition(".")[0] if is_of_parameter(divergence) else site


def is_of_parameter(divergence: Divergence) -> bool:
    """Whether it is the update or the gradient of a parameter, whose site is that of the parameter."""
    return divergence.phase == "update" or divergence.role == "gradient"


def is_same_module(rest: Divergence, divergence: Divergence) -> bool:
    """Whether two divergences are of one module, other than the outermost one, in which many things happen."""
    module = module_of(divergence)
    return module not in ("", ROOT) and module_of(rest) == module


def is_closer(found: Divergence, first: Divergence) -> bool:
    """Whether what a recording of a part shows is the same suspect more closely.

    A part lacks what its calls came from, and the other layers beside which they are judged: of the calls around the
    suspect the whole recording knows better, and what is given from outside was not made in the part.
    """
    module = module_of(first)
    if first.cause == "input" or not module:  # what is given comes from functions outside of every module
        return not module_of(found) or (found.site, found.phase) == (first.site, first.phase)
    given = found.cause == "input" and found.phase != "update"  # an update is given a gradient of its own
    return not given and f"{module_of(found)}.".startswith(f"{module}.")


def around(divergence: Divergence, run: RunData) -> str:
    """A regular expression for the sites around a suspect: the module in whose code it is, with all that is inside.

    Of a leaf it is the module around it, so that what it is given is seen to be made. What an outermost module is given
    comes from functions outside of every module.
    """
    module = module_of(divergence)
    if not module:
        return rf"^(/|{re.escape(ROOT)}$)"
    if divergence.cause == "input":
        return rf"^(/|{re.escape(module)}(/|$))"
    if module == ROOT:
        return around_alone(ROOT)
    outer = module.rpartition(".")[0]
    if "/" not in divergence.site and not _has_children(run, module) and _has_site(run, outer):
        module = outer
    return around_alone(module)


def _has_site(run: RunData, site: str) -> bool:
    return any(rank.calls.coded("site").code(site) >= 0 for rank in run.ranks.values())


def _has_children(run: RunData, module: str) -> bool:
    """Whether calls of modules that are directly inside of a module were recorded."""
    for rank in run.ranks.values():
        kinds, sites = rank.calls.coded("kind"), rank.calls.coded("site")
        of_modules = set(sites.codes[kinds.codes == kinds.code("module")].tolist())
        if any(re.fullmatch(_children(module), sites.values[code] or "") for code in of_modules):
            return True
    return False


def _children(module: str) -> str:
    """A regular expression for the modules that are directly inside of another."""
    return r"[\w-]+" if module == ROOT else rf"{re.escape(module)}\.[\w-]+"


def in_every_layer(pattern: str) -> str:
    """The same site in each layer: a port that does one layer otherwise does all of them so."""
    return re.sub(r"(?<![\\\d])\d+", r"\\d+", pattern)


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


class GraftTarget(NamedTuple):
    """A divergence that is tried.

    site: whose tensors are taken from the reference. own_code: whether it stands for what the code of this module does
        between the modules inside of it, since the suspect's own call is in one of the programs alone, or hides in it.
    """

    divergence: Divergence
    site: str
    own_code: bool = False

    @classmethod
    def of(cls, divergence: Divergence, reference: Run, candidate: Run) -> GraftTarget:
        """What can be taken from the reference to set a divergence right."""
        module = module_of(divergence)
        if is_of_parameter(divergence) or divergence.cause == "parameter":
            return cls(divergence, module or ROOT)  # parameters belong to modules, also where functions are given them
        made_by_both = all(_has_site(run, divergence.site) for run in (reference, candidate))
        if divergence.cause == "input" or (made_by_both and divergence.role and divergence.seen is None):
            return cls(divergence, divergence.site)
        if not module and divergence.seen is not None:
            return cls(divergence, divergence.seen.site)
        return cls(divergence, module or ROOT, own_code=bool(module))

    @property
    def noun(self) -> str:
        """What is taken from the reference, in a word."""
        if is_of_parameter(self.divergence):
            return "updated parameters"
        if self._is_given_wrong:
            return "inputs"
        return "parameters" if self.divergence.cause == "parameter" else "results"

    @property
    def _is_given_wrong(self) -> bool:
        """Whether its inputs are set right, and not what it makes of them."""
        return self.divergence.cause == "input" or (not self.own_code and not self.divergence.role)

    def grafts(self, values: Run, *, wider: bool = False) -> tuple[str, ...]:
        """What sets it right, as `--graft` takes it. wider: in all layers; of an update, all parameters."""
        site = re.escape(self.site)
        if is_of_parameter(self.divergence) or self.divergence.cause == "parameter":
            parts = [f"{'.*' if wider and is_of_parameter(self.divergence) else site}@parameters"]
        elif self._is_given_wrong:
            parts = [f"{site}@inputs"]
        else:
            parts = [f"{site}@outputs,gradients"]
        if self.own_code and _has_children(values, self.site):
            parts.append(f"{_children(self.site)}@inputs")
        return tuple(f"{relative_to_cwd(values.path)}:{in_every_layer(part) if wider else part}" for part in parts)

    def bypassed(self, *, wider: bool) -> tuple[str, ...]:
        """The functions that a module's own code calls, and those of the modules in it that are given their results."""
        if not self.own_code:
            return ()
        pattern = f"({re.escape(self.site)}|{_children(self.site)})/"
        return (in_every_layer(pattern) if wider else pattern,)

    def is_like(self, rest: Divergence) -> bool:
        """Whether what remains is the same in another layer, or another parameter of the same update."""
        if is_of_parameter(self.divergence):
            return rest.cause == "parameter" or is_of_parameter(rest)
        sites = (self.site, self.divergence.site)
        return any(rest.site != site and re.fullmatch(in_every_layer(re.escape(site)), rest.site) for site in sites)


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
    surprise = figures.surprise(worst.worst.judgement.surprise)
    text = (
        f"{number}: the {worst.worst.phase} of {worst.site} is {surprise} times as far from the exact result as "
        "rounding explains"
    )
    right = _is_right(reference, worst.site, divergence.step)
    if right is not None:
        text += "; in the reference it is right" if right else "; in the reference too"
    if f"{worst.site.partition('/')[0]}.".startswith(f"{module_of(divergence)}.") and right is not False:
        return Trial("replay", "proves", text, closer.path)
    return Trial("replay", "nothing", text, closer.path)


def _is_right(reference: Run | None, site: str, step: int) -> bool | None:
    """Whether the calls of a site give what their inputs explain in the reference; None: not known."""
    if reference is None:
        return None
    try:
        calls = reference.replay(site, steps=step)
    except AstrayError:
        return None
    return not calls.stands_out if calls.calls else None


class Alone(NamedTuple):
    """A suspect judged alone: whether it is wrong given the reference's inputs, and what of it is."""

    trial: Trial
    comparison: Comparison | None
    run: Run


def by_itself(shop: Workshop, name: str, first: Divergence, values: Run, closer: Run) -> Alone:
    """The suspect, given the reference's inputs and parameters: what is wrong then is not so because of them."""
    site = module_of(first) or first.site
    inside = around_alone(site)
    if first.clean:
        comparison = shop.compare(values, closer, steps=first.step, sites=inside)
        return Alone(
            Trial("inputs", "supports", "all that it is given is identical to the reference's, bit for bit"),
            comparison,
            closer,
        )
    request = RecordingRequest(
        steps=str(first.step),
        until=first.step,
        level="module,function",
        keep="stats,tensors",
        match=inside,
        grafts=(f"{relative_to_cwd(values.path)}:{re.escape(site)}@inputs,parameters",),
    )
    run = shop.record(f"{name}-inputs", request)
    comparison = shop.compare(values, run, steps=first.step, sites=inside)
    found = comparison.first
    if found is None:
        text = f"given the reference's inputs, what {site} makes of them is right"
        return Alone(Trial("inputs", "refutes", text, run.path), None, run)
    text = f"given the reference's inputs, the {found.place.noun or 'result'} of {found.site} is still wrong"
    return Alone(Trial("inputs", "supports", f"{text}: {error_of(found)}", run.path), comparison, run)


def around_alone(site: str) -> str:
    """A regular expression for a site and what is inside of it."""
    if site == ROOT:
        return rf"^({re.escape(ROOT)}(/|$)|{_children(ROOT)}$)"
    return f"^{re.escape(site)}([./]|$)"


class Grafted(NamedTuple):
    """A graft trial, the first divergence that it leaves, the grafts that were made, and what they stand for."""

    trial: Trial
    rest: Divergence | None
    grafts: tuple[str, ...]
    bypassed: tuple[str, ...]


def grafted(
    shop: Workshop,
    name: str,
    suspect: GraftTarget,
    first: Divergence,
    values: Run,
    request: RecordingRequest,
    *,
    wider: bool = False,
) -> Grafted:
    """The reference's tensors in place of the suspect's: is the divergence gone?

    first: the divergence as it showed in the whole step. wider: also in place of those of the same site in all other
        layers; of an update, of all parameters.
    """
    grafts = (*request.grafts, *suspect.grafts(values, wider=wider))
    run = shop.record(name, request._replace(grafts=grafts))
    bypassed = (*shop.bypassed, *suspect.bypassed(wider=wider))
    judged = f"^(?!{'|'.join(bypassed)})" if bypassed else None
    rest = _remaining(shop.compare(shop.reference, run, steps=request.steps, sites=judged))
    what = f"with the reference's {suspect.noun} in place of {_whose(suspect, wider=wider)}"
    if rest is None:
        trial = Trial("graft", "proves", f"{what}, nothing in step {request.steps} is wrong any more", run.path)
    else:
        where = f"{rest.place} is wrong: {error_of(rest)}"
        stays = rest.phase == first.phase and rest.site in (suspect.divergence.site, suspect.site, first.site)
        if stays:
            trial = Trial("graft", "nothing", f"{what}, {where}", run.path)
        else:
            trial = Trial("graft", "proves", f"{what}, it is right; after it {where}", run.path)
    return Grafted(trial, rest, grafts, bypassed)


def _remaining(comparison: Comparison) -> Divergence | None:
    """The first divergence that shows in numbers: a parameter that one program lacks does not go by a graft."""
    agreeing = {verdict.label for verdict in AGREEING}
    wrong = (one for one in (*comparison.firsts, *comparison.others) if one.judged.verdict not in agreeing)
    return next(wrong, None)


def _whose(suspect: GraftTarget, *, wider: bool) -> str:
    """In place of whose tensors."""
    if wider and is_of_parameter(suspect.divergence):
        return "all of them"
    if suspect.own_code:
        whose = f"all that the code of {suspect.site} makes"
    else:
        whose = "its own" if suspect.site == suspect.divergence.site else f"those of {suspect.site}"
    return f"{whose}, in every layer" if wider else whose


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
