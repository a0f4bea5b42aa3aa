"""What a reader of a comparison should know about the two runs as wholes, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from astray.comparison.pair.mapping import NOTHING, Mapping
from astray.comparison.pair.matching import Matching
from astray.records import ANY_CALL
from astray.store import RunData
from astray.wording import counted

_MOST = 5

_WHICH_ROWS = (
    "level", "optimizer", "compiled", "steps", "ranks", "match", "ignore", "classes", "scope", "phases", "roles",
    "functions", "max_tensors", "max_tensors_per_step",
)  # fmt: skip
_WHAT_OF_THEM = ("keep", "samples", "slice", "max_bytes")
"""The settings of a recording that say which tensors have rows, and what is kept of each."""


def problems(reference: RunData, candidate: RunData, matching: Matching) -> list[str]:
    """Everything about the two runs that limits what the comparison can say."""
    return [
        *different_settings(reference, candidate),
        *_different_frameworks(reference, candidate, matching.mapping),
        *_different_steps(reference, candidate, matching),
        *_different_ranks(reference, candidate, matching),
        *_of_run("reference", reference),
        *_of_run("candidate", candidate),
    ]


def _why_nothing(run: RunData) -> str | None:
    """Why a run holds nothing, if it says so."""
    if run.problems:
        return run.problems[0]
    ends = [rank.end for rank in run.ranks.values()]
    reasons = [one.why for end in ends if end is not None for one in end.missed if one.what == ANY_CALL]
    return f"Nothing was recorded: {reasons[0]}." if reasons else None


def nothing_shared(reference: RunData, candidate: RunData, matching: Matching) -> str:
    """Why not one tensor of the two runs could be paired, and what to do."""
    for side, run in (("reference", reference), ("candidate", candidate)):
        if not any(len(rank.tensors) for rank in run.ranks.values()):
            why = _why_nothing(run) or f"What it was asked to record is in {run.path / 'run.json'}."
            return f"There is nothing to compare: the {side} {run.path} holds no tensors. {why} Record it again."
    have = "; ".join(f"{side} {_contents(run)}" for side, run in (("reference", reference), ("candidate", candidate)))
    return f"There is nothing to compare: no tensor has the same key in both runs. They have: {have}. " + _advice(
        reference, candidate, matching
    )


def different_settings(reference: RunData, candidate: RunData) -> list[str]:
    """Which settings of the two recordings differ, and what to do; empty where none does or one run lacks them."""
    rows, kept = (list(_differing_settings(reference, candidate, names)) for names in (_WHICH_ROWS, _WHAT_OF_THEM))
    if not rows and not kept:
        return []
    text = f"The two were recorded with different settings: {'; '.join([*rows, *kept])}."
    if rows:
        text += " What only one was asked for is only in that run: record both with the same settings."
    else:
        text += " They are compared by what both have kept; to compare by more, record both with the same."
    return [text]


def _differing_settings(reference: RunData, candidate: RunData, names: Sequence[str]) -> Iterator[str]:
    settings = reference.info.settings, candidate.info.settings
    for name in names:
        values = [one[name] for one in settings if name in one]
        if len(values) == 2 and values[0] != values[1] and (name != "samples" or _samples(*settings)):
            yield f"{name} is {_as_typed(values[0])} in the reference and {_as_typed(values[1])} in the candidate"


def _samples(*settings: dict[str, Any]) -> bool:
    """Whether it matters how large samples are."""
    return all("sample" in one.get("keep", ()) for one in settings)


def _as_typed(value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, dict):
        return "a list of one's own"
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words if words not in ("", "None") else "not given"


def little_shared(reference: int, candidate: int, matched: int, by: str, alike: bool = True) -> list[str]:
    """What to do when most tensors of both runs have no partner. alike: whether their settings are the same."""
    if 2 * matched >= min(reference, candidate):
        return []
    fact = f"Only {matched:,} tensors are in both runs, of {reference:,} in the reference and {candidate:,} in the "
    if by == "order" or not alike:  # names do not matter; or the settings explain it
        return [fact + "candidate."]
    return [
        f"{fact}candidate. If modules have other names, draft what belongs together with `astray map REFERENCE "
        "CANDIDATE`, or pair calls by their order with --by order."
    ]


def nothing_comparable(pairs: int) -> str:
    """What to do when pairs were found but neither statistics nor values nor fingerprints are on both sides."""
    return (
        f"There is nothing to compare: {pairs:,} tensors are in both runs, but what was kept of them in one was not "
        "kept in the other. Record both with the same keep, such as keep='stats'."
    )


def span(numbers: Sequence[int]) -> str:
    """Sorted distinct numbers, as people write them.

    >>> span([0, 1, 2, 3]), span([7]), span([0, 2, 4]), span([])
    ('0–3', '7', '0, 2, 4', 'none')
    """
    if not numbers:
        return "none"
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}–{numbers[-1]}"
    rest = f" … {numbers[-1]}" if len(numbers) > _MOST else ""
    return ", ".join(map(str, numbers[:_MOST])) + rest


def _different_frameworks(reference: RunData, candidate: RunData, mapping: Mapping = NOTHING) -> Iterator[str]:
    frameworks = reference.info.framework, candidate.info.framework
    if all(frameworks) and frameworks[0] != frameworks[1]:
        text = "Runs are of different frameworks: reference {}, candidate {}.".format(*frameworks)
        if mapping == NOTHING:
            text += " Where their names differ, draft what belongs together with `astray map REFERENCE CANDIDATE`."
        yield text


def _different_steps(reference: RunData, candidate: RunData, matching: Matching) -> Iterator[str]:
    steps_reference, steps_candidate = _steps(reference, matching), _steps(candidate, matching, matching.offset)
    if steps_reference == steps_candidate:
        return
    shared = sorted(set(steps_reference) & set(steps_candidate))
    offset = f" (with {matching.offset:+d})" if matching.offset else ""
    text = f"Runs have different steps: reference {span(steps_reference)}, candidate {span(steps_candidate)}{offset}."
    yield f"{text} Compare the shared part with --steps {_selection(shared)}." if shared else text


def _selection(steps: list[int]) -> str:
    whole = steps[-1] - steps[0] == len(steps) - 1
    return f"{steps[0]}:{steps[-1] + 1}" if whole else ",".join(map(str, steps))


def _different_ranks(reference: RunData, candidate: RunData, matching: Matching) -> Iterator[str]:
    ranks_reference, ranks_candidate = sorted(reference.ranks), sorted(candidate.ranks)
    if ranks_reference != ranks_candidate and matching.ranks is None:
        yield f"Runs have different ranks: reference {span(ranks_reference)}, candidate {span(ranks_candidate)}."


def _of_run(side: str, run: RunData) -> Iterator[str]:
    if run.info.perturbed is not None:
        yield (
            f"The {side} {run.path} was recorded with perturbed inputs (seed {run.info.perturbed}). Compare a run of "
            "the program as it is, and give this one as --noise."
        )
    for problem in run.problems:
        yield f"In the {side}: {problem}"
    for number, rank in run.ranks.items():
        where = f"the {side}" + (f", rank {number}" if len(run.ranks) > 1 else "")
        if rank.end is not None:
            for missed in rank.end.missed:
                times = f" ({missed.count:,} times)" if missed.count > 1 else ""
                yield f"Not observed in {where}: {missed.what}{times}: {missed.why}."
    if not run.complete and not run.problems:
        yield f"The {side} {run.path} is incomplete; what it holds is compared."


def _steps(run: RunData, matching: Matching, offset: int = 0) -> list[int]:
    return [step + offset for step in run.steps if step + offset in matching.steps]


def _sites(run: RunData) -> list[str]:
    return sorted({site for rank in run.ranks.values() for site in rank.calls.coded("site").values})


def _levels(run: RunData) -> list[str]:
    """The levels of which a run has calls."""
    kinds = {kind for rank in run.ranks.values() for kind in rank.calls.coded("kind").values}
    return [level for level in ("module", "function", "op") if level in kinds]


def _contents(run: RunData) -> str:
    sites = _sites(run)
    such = f", such as {sites[len(sites) // 2]}" if sites else ""
    return f"{run.path} ranks {span(sorted(run.ranks))}, steps {span(run.steps)}, {counted(len(sites), 'site')}{such}"


def _advice(reference: RunData, candidate: RunData, matching: Matching) -> str:
    if not set(reference.ranks) & set(candidate.ranks):
        return "They share no rank: record the same ranks."
    if not set(_steps(reference, matching)) & set(_steps(candidate, matching, matching.offset)):
        shared = sorted(set(reference.steps) & {step + matching.offset for step in candidate.steps})
        if matching.steps and shared:
            return f"They share no step among --steps {matching.steps}: choose from {span(shared)}."
        return "They share no step: record the same steps, or shift the candidate's with --offset."
    levels = [_levels(run) for run in (reference, candidate)]
    if all(levels) and not set(levels[0]) & set(levels[1]):
        kinds = [" and ".join(f"{level}s" for level in side) for side in levels]
        return f"The reference has rows of {kinds[0]} and the candidate of {kinds[1]}: record both with the same level."
    if settings := different_settings(reference, candidate):
        return settings[0]
    if (frameworks := next(_different_frameworks(reference, candidate), None)) is not None:
        return frameworks
    if not set(_sites(reference)) & {matching.mapping.site(site) for site in _sites(candidate)}:
        return (
            "They share no site: was the model wrapped or renamed? Draft what belongs together with `astray map "
            "REFERENCE CANDIDATE`, or pair calls by their order with --by order."
        )
    if matching.sites is not None:
        return f"Perhaps no site has {matching.sites.pattern!r} in its name."
    return "Record both with the same level and phases."
