"""Compares what modules, optimizers, torch and the environment were set to: the timelines of a rank in both runs.

Gives raw findings, one for each value and place; `differences` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from astray.comparison.setup.setup_difference import ABSENT, Finding
from astray.comparison.setup.timelines import History, Settings, Timelines, at, first_difference
from astray.comparison.setup.wording import WRITTEN
from astray.records import ROOT

_OF_TENSORS = ("dtype", "requires_grad", "placement")
"""What is recorded of a module's own tensors, behind the name of the tensor and a dot."""

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
    for subject in ("torch", "scaler", "environment", "version", "device", "process", "seed"):
        yield from _plain(subject, reference, candidate, steps)


def _plain(subject: str, reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    """Of things that both runs have, the values that both have; of the environment also what only one has."""
    left, right = reference.of(subject), candidate.of(subject)
    unset: History = [(steps[0], None)]
    for site in left:
        if site not in right:
            continue
        mine, theirs = left[site], right[site]
        names = mine.keys() | theirs.keys() if subject == "environment" else mine.keys() & theirs.keys()
        for name in sorted(names):
            found = first_difference(mine.get(name, unset), theirs.get(name, unset), steps)
            if found is not None:
                yield Finding(subject, site, "", name, *found[1:], found[0])


# -- modules -----------------------------------------------------------------------------------------------------------


def _modules(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    left, right = reference.of("module"), candidate.of("module")
    is_whole = reference.is_whole and candidate.is_whole
    shared = [site for site in left if site in right]
    for site in shared:
        yield from _module(site, left[site], right[site], steps, is_whole)
    if is_whole and len(shared) >= _SHARED * max(len(left), len(right)):
        for site in _topmost(site for site in left if site not in right):
            yield Finding("module", site, _class(left[site]), "class", _class(left[site]), ABSENT)
        for site in _topmost(site for site in right if site not in left):
            yield Finding("module", site, _class(right[site]), "class", ABSENT, _class(right[site]))


def _module(site: str, left: Settings, right: Settings, steps: Sequence[int], is_whole: bool) -> Iterator[Finding]:
    kind = _class(left)
    is_same_class = kind == _class(right)
    for name in left.keys() & right.keys() if not is_whole else left.keys() | right.keys():
        subject, place, told = _of_tensor(site, name)
        if name in left and name in right:
            found = first_difference(left[name], right[name], steps)
            if found is not None:
                yield Finding(subject, place, kind, told, *found[1:], found[0])
        elif is_same_class or told in ("dtype", "wrapped in"):
            values = [at(side[name], steps[-1]) if name in side else ABSENT for side in (left, right)]
            if told == "dtype":
                yield Finding("parameter", place, kind, "tensor", *values)
            elif told not in ("requires_grad", "device"):
                yield Finding(subject, place, kind, told, *values)


def _of_tensor(site: str, name: str) -> tuple[str, str, str]:
    """What a name of a module's is about: the module, or one of its tensors, which is a site of its own."""
    tensor, dot, told = name.rpartition(".")
    if not dot or told not in _OF_TENSORS:
        return "module", site, name
    return "parameter", tensor if site == ROOT else f"{site}.{tensor}", told


def _class(settings: Settings) -> str:
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
    left, right = reference.of("autocast"), candidate.of("autocast")
    classes = reference.of("module")
    if not left or not right:
        return
    for site in {**left, **right}:
        one, other = _around(left, site), _around(right, site)
        if one is None or other is None:
            continue
        found = first_difference(one["autocast"], other["autocast"], steps)
        if found is not None:
            yield Finding("autocast", site, _class(classes.get(site, {})), "autocast", *found[1:], found[0])


def _around(known: dict[str, Settings], site: str) -> Settings | None:
    parts = site.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((known[name] for name in (*names, ROOT) if "autocast" in known.get(name, {})), None)


# -- optimizers --------------------------------------------------------------------------------------------------------


def _optimizers(reference: Timelines, candidate: Timelines, steps: Sequence[int]) -> Iterator[Finding]:
    left, right = (_by_label(side.of("optimizer")) for side in (reference, candidate))
    pairs = _paired(list(left), list(right))
    for one, other in pairs:
        yield from _optimizer(one, left[one], right[other], steps)
    yield from _memberships(left, right, {other: one for one, other in pairs}, steps)


def _by_label(groups: dict[str, Settings]) -> dict[str, list[Settings]]:
    """The parameter groups of each optimizer; of `AdamW/param_groups.0` it is `AdamW`."""
    found: dict[str, list[Settings]] = {}
    for site, settings in groups.items():
        found.setdefault(site.partition("/")[0], []).append(settings)
    return found


def _paired(left: list[str], right: list[str]) -> list[tuple[str, str]]:
    """Which optimizers belong together: those of one name, and the others in the order of their first steps."""
    shared = [label for label in left if label in right]
    rest = [[label for label in side if label not in shared] for side in (left, right)]
    return [*((label, label) for label in shared), *zip(*rest, strict=False)]


def _optimizer(label: str, left: list[Settings], right: list[Settings], steps: Sequence[int]) -> Iterator[Finding]:
    classes = _class(left[0]), _class(right[0])
    if classes[0] != classes[1]:
        yield Finding("optimizer", "", label, "class", *classes)
    for number, mate, members in _shared_groups(left, right, steps):
        place = f"{label}, group {number}"
        for name in sorted(left[number].keys() & right[mate].keys() - {"class", "parameters", *_OF_MEMBERS}):
            found = first_difference(left[number][name], right[mate][name], steps)
            if found is not None:
                for member in members or [""]:
                    yield Finding("optimizer", member, place, name, *found[1:], found[0])
        for several, name in _OF_MEMBERS.items():
            histories = left[number].get(several), right[mate].get(several)
            for member in members:
                mine, theirs = (
                    [(step, isinstance(names, list) and member in names) for step, names in one or ()]
                    for one in histories
                )
                found = first_difference(mine, theirs, steps)
                if found is not None:
                    yield Finding("optimizer", member, place, name, *found[1:], found[0])


def _shared_groups(
    left: list[Settings], right: list[Settings], steps: Sequence[int]
) -> Iterator[tuple[int, int, list[str]]]:
    """Which groups have parameters in common, and which; those of the same number where that is not known."""
    for number, group in enumerate(left):
        mine = _members(group, steps)
        for mate, other in enumerate(right):
            theirs = set(_members(other, steps))
            if not mine or not theirs:
                if number == mate:
                    yield number, mate, []
            elif members := [name for name in mine if name in theirs]:
                yield number, mate, members


def _members(group: Settings, steps: Sequence[int]) -> list[str]:
    """The parameters of a group. Those without a name get their place in it, whatever the optimizer's name is."""
    found = at(group.get("parameters"), steps[-1])
    names = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    return [name.partition("/")[2] if "/param_groups." in name else name for name in names]


def _memberships(
    left: dict[str, list[Settings]], right: dict[str, list[Settings]], renamed: dict[str, str], steps: Sequence[int]
) -> Iterator[Finding]:
    """The parameters that only one run optimizes."""
    mine, theirs = _places(left, steps), _places(right, steps)
    if not mine or not theirs:
        return
    for name, place in mine.items():
        if name not in theirs:
            yield Finding("optimizer", name, "", "parameters", place, ABSENT)
    for name, place in theirs.items():
        if name not in mine:
            label, _, rest = place.partition(", ")
            yield Finding("optimizer", name, "", "parameters", ABSENT, f"{renamed.get(label, label)}, {rest}")


def _places(optimizers: dict[str, list[Settings]], steps: Sequence[int]) -> dict[str, str]:
    return {
        name: f"{label}, group {number}"
        for label, groups in optimizers.items()
        for number, group in enumerate(groups)
        for name in _members(group, steps)
    }
