"""The sentences that explain why a call is blamed, and where to look.

Reads a `Culprit`, feeds `Divergence.evidence`. Sentences about weights are in `weights`, those about what else was seen
around the divergence in `clues`.
"""

from __future__ import annotations

import numpy as np

from astray.comparison.blame import clues, weights
from astray.comparison.blame.culprit import Culprit
from astray.comparison.blame.weights import STATE_ROLES, OtherWeights
from astray.comparison.divergence import TensorPlace
from astray.comparison.judge.calls import is_loss
from astray.comparison.pair.joined_rank import JoinedRank
from astray.comparison.rows import Ints
from astray.comparison.setup.setup_difference import SetupDifference
from astray.comparison.verdict import SENTENCES, Reason, Verdict


def evidence(
    culprit: Culprit,
    settings: tuple[SetupDifference, ...],
    entry: TensorPlace,
    others: OtherWeights,
    onset: clues.Onset | None,
) -> list[str]:
    """All sentences about a culprit.

    settings: what was set differently and explains it. entry: the tensor that entered it wrong. others: the weights
    that differ with that. onset: the first tensor that is not bit-identical.
    """
    inputs, states = culprit.places(culprit.call, "input"), culprit.places(culprit.call, *STATE_ROLES)
    sentences = [setting.sentence for setting in settings]
    if settings and entry.verdict in clues.AGREEING_LABELS:
        sentences.append(
            f"Its {entry.tensor} is the first that it can have changed, and is off by no more than can be "
            f"explained without it ({clues.verdict_of(entry)})."
        )
    elif culprit.cause == "input":
        sentences.append(_about_input(culprit, entry))
    elif culprit.cause == "parameter" and not culprit.matched[culprit.entry]:
        agree = clues.agreement([("input", inputs)])
        sentences.append(_about_unmatched(entry) + (f" {agree}." if agree else ""))
    elif culprit.cause == "parameter":
        name = culprit.parameter_name()
        sentences.append(weights.sentence(culprit.pairs, culprit.entry, entry, name, inputs, others, culprit.reference))
    else:
        sentences.append(_about_computation(culprit, entry, inputs, states))
    sentences += clues.suspicious([*inputs, *states])
    until = max(culprit.start, culprit.shown)
    named = {site for one in settings if one.kind == "argument" for site in one.sites or (one.site,) if site}
    sentences += clues.arguments(culprit.pairs, until, [culprit.call], culprit.reference, culprit.candidate, named)
    sentences += clues.unmatched(culprit.pairs, culprit.start)
    if isinstance(culprit.reference, JoinedRank) and isinstance(culprit.candidate, JoinedRank):
        row_reference, row_candidate = (
            int(culprit.pairs[f"row_{side}"][culprit.shown]) for side in ("reference", "candidate")
        )
        limit = float(culprit.pairs["limit"][culprit.start])
        sentences += clues.micro_steps(culprit.reference, culprit.candidate, row_reference, row_candidate, limit)
    if onset is not None:
        sentences.append(f"The runs are bit-identical until {onset.place} ({clues.verdict_of(onset.place)}).")
    return sentences


def _about_unmatched(entry: TensorPlace) -> str:
    """About a parameter or buffer that only one run has."""
    which = entry.verdict.removeprefix("only in ")
    return f"Its {entry.tensor} is there only in the {which}: the other run computed without it."


def _about_input(culprit: Culprit, entry: TensorPlace) -> str:
    """About what came from outside of the outermost call."""
    if entry.phase == "update":
        return weights.about_update(entry)
    if entry.phase == "backward":
        return _about_arriving(culprit, entry)
    differs = f"The {entry.tensor} of this outermost call already differs, and"
    maker = _made_by_one_run(culprit)
    if maker:
        return f"The {entry.tensor} of this outermost call already differs. {maker}."
    before = _call_before(culprit)
    data = "the data, its order, the seed and the preprocessing"
    if is_loss(entry.type) and culprit.is_integer(culprit.entry):
        fact = f"The {entry.tensor} of this loss already differs, and no recorded call made it"
        return f"{fact}: look at {data}. Labels that a model chose itself may fall another way by rounding."
    if before is None:
        return f"{differs} no call before it produced it: look at {data}."
    between = f"the code between the call of {before.module} before it and this one, which was not recorded"
    if before.step != entry.step:
        return f"{differs} no recorded call made it: look at {data}, or at {between}."
    agrees = (
        f" What that call gave agrees ({clues.verdict_of(before)})." if before.verdict in clues.AGREEING_LABELS else ""
    )
    return f"{differs} no recorded call made it: look at {between}.{agrees}"


def _about_arriving(culprit: Culprit, entry: TensorPlace) -> str:
    """About a gradient that arrives wrong at an outermost call."""
    arrives = f"The gradient that arrives at {entry.module} already differs, though everything before agrees"
    if entry.recompute:
        return (
            f"{arrives}, and the call around it is not known, because activation checkpointing made this one anew: "
            "look at the code around it."
        )
    factor = _common_factor(culprit)
    if factor is not None:
        arrives = f"All gradients of this step are {factor:.4g} times those of the reference"
    return f"{arrives}: look at the loss, its scaling and its reduction."


def _common_factor(culprit: Culprit) -> float | None:
    """The factor that all gradients of the step have in common, if they have one."""
    if SENTENCES[Reason.SCALED] not in TensorPlace.of(culprit.pairs, culprit.start).reason:
        return None
    reference, candidate = (
        float(run.tensors.numbers("l2")[int(culprit.pairs[row][culprit.start])])
        for run, row in ((culprit.reference, "row_reference"), (culprit.candidate, "row_candidate"))
    )
    return candidate / reference if reference > 0 else None


def _call_before(culprit: Culprit) -> TensorPlace | None:
    """The result of the outermost call before a wrong input, if that input may have been made of it.

    After a backward pass a wrong input is taken for the next batch of the data.
    """
    phase, calls = culprit.pairs.coded("phase"), culprit.call_of_row[: culprit.entry]
    if np.any(phase.codes[: culprit.entry] == phase.code("backward")):
        return None
    outermost = np.flatnonzero(np.append(culprit.graph.enclosings < 0, False)[calls] & (calls >= 0))
    results = outermost[culprit.has_role("output")[outermost]]
    return TensorPlace.of(culprit.pairs, int(results[-1])) if len(results) else None


def _made_by_one_run(culprit: Culprit) -> str:
    """Which call made the wrong value, where only one run has that call; empty where both have it or none is known."""
    makers: dict[str, str] = {}  # by side
    for side, run, only in (
        ("reference", culprit.reference, Verdict.ONLY_IN_REFERENCE),
        ("candidate", culprit.candidate, Verdict.ONLY_IN_CANDIDATE),
    ):
        producer = culprit.producer_in(side, run, only)
        rows: Ints = np.flatnonzero((culprit.pairs.numbers(f"row_{side}") == producer) & (producer >= 0))
        if len(rows) and culprit.pairs.coded("verdict").codes[rows[0]] == only:
            makers[side] = TensorPlace.of(culprit.pairs, int(rows[0])).module
    if len(makers) == 2:
        return "It comes from {reference} in the reference and from {candidate} in the candidate".format(**makers)
    for side, maker in makers.items():
        other = "candidate" if side == "reference" else "reference"
        return f"In the {side} it comes from {maker}, which the {other} does not call"
    return ""


def _about_computation(
    culprit: Culprit, entry: TensorPlace, inputs: list[TensorPlace], states: list[TensorPlace]
) -> str:
    """About a call whose inputs, parameters and buffers (`states`) agree."""
    if entry.role == "input":
        shows = f"The wrong value shows first as {entry.tensor} of {entry.module}"
        maker = _made_by_one_run(culprit)
        if maker:
            outer = culprit.graph.enclosing(int(culprit.call_of_row[culprit.entry]))
            return f"{shows}. {maker}" + (
                "." if outer is None else ": look at the code of {} ({}).".format(*culprit.name_of(outer))
            )
        site, kind = culprit.name_of(culprit.call)
        return f"{shows}, and no observed call produced it: the code of {site} ({kind}) around its submodules did."
    if entry.role == "gradient":
        return _about_gradient(culprit)
    parts = [(noun, [place for place in states if place.noun == noun]) for noun in ("parameter", "buffer", "state")]
    agree = clues.agreement([("input", inputs), *parts])
    if not agree:
        what = "compared" if inputs or states else "recorded"
        return f"None of its inputs was {what}, so they may differ; everything compared before it agrees."
    return f"{agree}, but its {entry.tensor} does not."


def _about_gradient(culprit: Culprit) -> str:
    """About the gradient of a parameter."""
    owner = culprit.graph.owner(int(culprit.call_of_row[culprit.entry]))
    backward = None if owner is None else culprit.graph.backward_of(owner)
    arriving = [] if backward is None else culprit.places(backward, "input")
    if owner is None or not clues.agreement([("gradient", arriving[:1])]):
        return "Everything before this gradient agrees: look at how it is computed and accumulated."
    site, kind = culprit.name_of(owner)
    return (
        f"The gradient that arrives at {site} ({kind}) agrees ({clues.verdict_of(arriving[0])}), but the one of "
        "its parameter does not: look at how it is computed and accumulated."
    )
