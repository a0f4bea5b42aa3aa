"""Compares what modules, optimizers, torch and the environment were set to: the timelines of a rank in both runs.

Gives raw findings, one for each value and place; `differences` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from astray.comparison.setup.setup_difference import ABSENT, Finding
from astray.comparison.setup.timelines import (
    OF_TENSORS,
    SettingHistories,
    SettingHistory,
    Timelines,
    at,
    first_difference,
)
from astray.comparison.setup.wording import WRITTEN
from astray.records import ROOT

_SHARED = 0.5
"""Of the modules of two runs so many must have the same names, or the names do not show which belongs to which."""


_OF_MEMBERS = {"written_gradients": WRITTEN}
"""Settings of a parameter group that are names of some of its parameters, and what holds for each of them."""


def findings(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    """Everything that a rank was set to differently."""
    yield from _modules(reference, candidate, steps)
    yield from _plain("config", reference, candidate, steps)
    yield from _autocast(reference, candidate, steps)
    yield from _optimizers(reference, candidate, steps)
    yield from _experiments("swap", "to", reference, candidate, steps)
    yield from _experiments("graft", "from", reference, candidate, steps)
    for subject in ("torch", "scaler", "environment", "version", "device", "process", "seed"):
        yield from _plain(subject, reference, candidate, steps)


def _plain(subject: str, reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    """Of things that both runs have, the values that both have; of the environment also what only one has."""
    sites_reference, sites_candidate = reference.of(subject), candidate.of(subject)
    unset: SettingHistory = [(steps[0], None)]
    for site in sites_reference:
        if site not in sites_candidate:
            continue
        settings_reference, settings_candidate = sites_reference[site], sites_candidate[site]
        names = (
            settings_reference.keys() | settings_candidate.keys()
            if subject == "environment"
            else settings_reference.keys() & settings_candidate.keys()
        )
        for name in sorted(names):
            found = first_difference(settings_reference.get(name, unset), settings_candidate.get(name, unset), steps)
            if found is not None:
                yield Finding(subject, site, "", name, *found[1:], found[0])


# -- modules -----------------------------------------------------------------------------------------------------------


def _modules(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    sites_reference, sites_candidate = reference.of("module"), candidate.of("module")
    is_whole = reference.is_whole and candidate.is_whole
    shared = [site for site in sites_reference if site in sites_candidate]
    for site in shared:
        yield from _module(
            site, sites_reference[site], sites_candidate[site], steps, is_whole, not reference.across_frameworks
        )
    if is_whole and len(shared) >= _SHARED * max(len(sites_reference), len(sites_candidate)):
        for site in _topmost(site for site in sites_reference if site not in sites_candidate):
            yield Finding("module", site, _class(sites_reference[site]), "class", _class(sites_reference[site]), ABSENT)
        for site in _topmost(site for site in sites_candidate if site not in sites_reference):
            yield Finding("module", site, _class(sites_candidate[site]), "class", ABSENT, _class(sites_candidate[site]))


def _module(
    site: str,
    reference: SettingHistories,
    candidate: SettingHistories,
    steps: Sequence[int],
    is_whole: bool,
    is_of_one_framework: bool,
) -> Iterator[Finding]:
    kind = _class(reference)
    is_same_class = kind == _class(candidate) and is_of_one_framework
    for name in reference.keys() & candidate.keys() if not is_whole else reference.keys() | candidate.keys():
        subject, place, setting = _of_tensor(site, name)
        if name in reference and name in candidate:
            found = first_difference(reference[name], candidate[name], steps)
            if found is not None and (is_of_one_framework or _are_of_a_kind(*found[1:])):
                yield Finding(subject, place, kind, setting, *found[1:], found[0])
        elif is_same_class or setting in ("dtype", "wrapped in"):
            values = [at(side[name], steps[-1]) if name in side else ABSENT for side in (reference, candidate)]
            if setting == "dtype":
                yield Finding("parameter", place, kind, "tensor", *values)
            elif setting not in ("requires_grad", "device"):
                yield Finding(subject, place, kind, setting, *values)


def _are_of_a_kind(reference: Any, candidate: Any) -> bool:
    """Whether two settings are of one kind. Frameworks have numbers in common, and words of their own for the rest."""
    kinds = [float if type(value) is int else type(value) for value in (reference, candidate)]
    return kinds[0] == kinds[1]


def _of_tensor(site: str, name: str) -> tuple[str, str, str]:
    """What a name of a module's is about: the module, or one of its tensors, which is a site of its own."""
    tensor, dot, setting = name.rpartition(".")
    if not dot or setting not in OF_TENSORS:
        return "module", site, name
    return "parameter", tensor if site == ROOT else f"{site}.{tensor}", setting


def _class(settings: SettingHistories) -> str:
    history = settings.get("class")
    return str(history[-1][1]) if history else ""


def _topmost(sites: Iterator[str]) -> list[str]:
    """Those that lie in none of the others."""
    found: list[str] = []
    alone = set(sites)
    for site in alone:
        parts = site.split(".")
        if not any(".".join(parts[:end]) in alone for end in range(1, len(parts))):
            found.append(site)
    return sorted(found)


def _autocast(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    """A module without autocast settings of its own runs as the outermost one does."""
    sites_reference, sites_candidate = reference.of("autocast"), candidate.of("autocast")
    classes = reference.of("module")
    if not sites_reference or not sites_candidate:
        return
    for site in {**sites_reference, **sites_candidate}:
        one, other = _around(sites_reference, site), _around(sites_candidate, site)
        if one is None or other is None:
            continue
        found = first_difference(one["autocast"], other["autocast"], steps)
        if found is not None:
            yield Finding("autocast", site, _class(classes.get(site, {})), "autocast", *found[1:], found[0])


def _experiments(
    subject: str, name: str, reference: Timelines, candidate: Timelines, steps: Sequence[int]
) -> Iterator[Finding]:
    """What was swapped or grafted in one run, and not in the other, or with something else."""
    sites_reference, sites_candidate = reference.of(subject), candidate.of(subject)
    if not (reference.is_whole and candidate.is_whole):
        return
    for site in {**sites_reference, **sites_candidate}:
        histories = [
            [(steps[0] - 1, None), *side.get(site, {}).get(name, [])] for side in (sites_reference, sites_candidate)
        ]
        found = first_difference(histories[0], histories[1], steps)
        if found is not None:
            yield Finding(subject, site, "", name, *found[1:], found[0])


def _around(known: dict[str, SettingHistories], site: str) -> SettingHistories | None:
    parts = site.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((known[name] for name in (*names, ROOT) if "autocast" in known.get(name, {})), None)


# -- optimizers --------------------------------------------------------------------------------------------------------


def _optimizers(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    groups_reference, groups_candidate = (_by_label(side.of("optimizer")) for side in (reference, candidate))
    pairs = _paired(list(groups_reference), list(groups_candidate))
    for label_reference, label_candidate in pairs:
        yield from _optimizer(
            label_reference,
            groups_reference[label_reference],
            groups_candidate[label_candidate],
            steps,
            not reference.across_frameworks,
        )
    yield from _memberships(
        groups_reference,
        groups_candidate,
        {label_candidate: label_reference for label_reference, label_candidate in pairs},
        steps,
        (_frozen(reference, steps), _frozen(candidate, steps)),
    )


def _by_label(groups: dict[str, SettingHistories]) -> dict[str, list[SettingHistories]]:
    """The parameter groups of each optimizer; of `AdamW/param_groups.0` it is `AdamW`."""
    found: dict[str, list[SettingHistories]] = {}
    for site, settings in groups.items():
        found.setdefault(site.partition("/")[0], []).append(settings)
    return found


def _paired(reference: list[str], candidate: list[str]) -> list[tuple[str, str]]:
    """Which optimizers belong together: those of one name, and the others in the order of their first steps."""
    shared = [label for label in reference if label in candidate]
    rest = [[label for label in side if label not in shared] for side in (reference, candidate)]
    return [*((label, label) for label in shared), *zip(*rest, strict=False)]


def _optimizer(
    label: str,
    reference: list[SettingHistories],
    candidate: list[SettingHistories],
    steps: Sequence[int],
    is_of_one_framework: bool,
) -> Iterator[Finding]:
    classes = _class(reference[0]), _class(candidate[0])
    if classes[0] != classes[1]:
        yield Finding("optimizer", "", label, "class", *classes)
    for number, partner, members in _shared_groups(reference, candidate, steps):
        place = f"{label}, group {number}"
        for name in sorted(
            reference[number].keys() & candidate[partner].keys() - {"class", "parameters", *_OF_MEMBERS}
        ):
            found = first_difference(reference[number][name], candidate[partner][name], steps)
            if found is not None and (is_of_one_framework or _are_of_a_kind(*found[1:])):
                for member in members or [""]:
                    yield Finding("optimizer", member, place, name, *found[1:], found[0])
        for several, name in _OF_MEMBERS.items():
            histories = reference[number].get(several), candidate[partner].get(several)
            for member in members:
                history_reference, history_candidate = (
                    [(step, isinstance(names, list) and member in names) for step, names in one or ()]
                    for one in histories
                )
                found = first_difference(history_reference, history_candidate, steps)
                if found is not None:
                    yield Finding("optimizer", member, place, name, *found[1:], found[0])


def _shared_groups(
    reference: list[SettingHistories], candidate: list[SettingHistories], steps: Sequence[int]
) -> Iterator[tuple[int, int, list[str]]]:
    """Which groups have parameters in common, and which; those of the same number where that is not known."""
    for number, group in enumerate(reference):
        members_reference = _members(group, steps)
        for partner, other in enumerate(candidate):
            members_candidate = set(_members(other, steps))
            if not members_reference or not members_candidate:
                if number == partner:
                    yield number, partner, []
            elif members := [name for name in members_reference if name in members_candidate]:
                yield number, partner, members


def _members(group: SettingHistories, steps: Sequence[int]) -> list[str]:
    """The parameters of a group. Those without a name get their place in it, whatever the optimizer's name is."""
    found = at(group.get("parameters"), steps[-1])
    names = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    return [name.partition("/")[2] if "/param_groups." in name else name for name in names]


def _memberships(
    reference: dict[str, list[SettingHistories]],
    candidate: dict[str, list[SettingHistories]],
    renamed: dict[str, str],
    steps: Sequence[int],
    are_frozen: tuple[set[str], set[str]],
) -> Iterator[Finding]:
    """The parameters that only one run optimizes. One that takes no gradient is optimized by nothing."""
    places_reference, places_candidate = _places(reference, steps), _places(candidate, steps)
    if not places_reference or not places_candidate:
        return
    for name, place in places_reference.items():
        if name not in places_candidate and name not in are_frozen[0]:
            yield Finding("optimizer", name, "", "parameters", place, ABSENT)
    for name, place in places_candidate.items():
        if name not in places_reference and name not in are_frozen[1]:
            label, _, rest = place.partition(", ")
            yield Finding("optimizer", name, "", "parameters", ABSENT, f"{renamed.get(label, label)}, {rest}")


def _frozen(timelines: Timelines, steps: Sequence[int]) -> set[str]:
    """The parameters that take no gradient."""
    return {
        place
        for site, settings in timelines.of("module").items()
        for name, history in settings.items()
        for _, place, setting in (_of_tensor(site, name),)
        if setting == "requires_grad" and at(history, steps[-1]) is False
    }


def _places(optimizers: dict[str, list[SettingHistories]], steps: Sequence[int]) -> dict[str, str]:
    return {
        name: f"{label}, group {number}"
        for label, groups in optimizers.items()
        for number, group in enumerate(groups)
        for name in _members(group, steps)
    }
