"""For a draft of a mapping between two frameworks: classes, settings and functions by what the frameworks call them.

Reads the runs, and the tables of `framework_names`. A word is drafted where the candidate has it and the reference does
not, and the reference has what stands for it: the rest of the tables is of no use to these two runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Dictionary
from typing import Any, NamedTuple

import numpy as np

from astray.comparison.pair.framework_names import Equivalents
from astray.comparison.pair.mapping import AttributeRule, Mapping
from astray.comparison.pair.renaming import renamed_columns
from astray.graph.keys import one_key
from astray.store import RankRun

CLOSE = 0.01
"""How far apart the sizes of two arguments are at most that are taken for one: the weights are the same, or nearly."""

_NOT_SETTINGS = ("class", "parameters", "written_gradients", "training", "device")


def drafted_types(
    pairs: Iterable[tuple[str, str]], reference: RankRun, candidate: RankRun, mapping: Mapping, known: Equivalents
) -> dict[str, str]:
    """What the candidate's classes are called in the reference: those of paired modules, of lists, of optimizers."""
    votes: dict[str, set[str]] = defaultdict(set)
    for of_reference, of_candidate in pairs:
        votes[of_candidate].add(of_reference)
    classes = _classes(reference, "module")
    for site, name in _classes(candidate, "module").items():  # also of modules that are never called
        other = classes.get(mapping.site(site))
        if other in known.types(name):
            votes[name].add(str(other))
    found = {name: next(iter(targets)) for name, targets in votes.items() if len(targets) == 1 and name not in targets}
    optimizers = {*_classes(reference, "optimizer").values()}
    for name in sorted({*_classes(candidate, "optimizer").values()} - optimizers):
        word = next((word for word in known.types(name) if word in optimizers), None)
        if word is not None:
            found[name] = word
    return found


def _classes(rank: RankRun, subject: str) -> dict[str, str]:
    """The classes of a run's modules or optimizers, by site."""
    return {
        row.site: str(row.values["class"]) for row in rank.setup if row.subject == subject and "class" in row.values
    }


# -- settings ----------------------------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    subject: str
    type: str
    name: str


def drafted_attributes(reference: RankRun, candidate: RankRun, known: Equivalents) -> dict[str, AttributeRule]:
    """What the candidate's settings are called in the reference; within a class where a name means something else."""
    names = defaultdict(set)
    for setting in _settings(reference):
        names[setting.subject].add(setting.name)
    found: dict[str, AttributeRule] = {}
    own = _settings(candidate)
    for setting in sorted(own):
        rule = known.attribute(setting.type, setting.name)
        bare = setting.name.lstrip("_")
        if rule is None and bare != setting.name:
            rule = bare  # a class of the program's own that hides what it is set to
        target = next(iter(rule)) if isinstance(rule, dict) else str(rule).removeprefix("1 - ")
        if rule in (None, setting.name) or target.partition(".")[0] not in names[setting.subject]:
            continue
        if target != setting.name and setting._replace(name=target) in own:
            continue  # it has both, as an optimizer has `lr` and the rate that it began with
        is_of_class = rule != known.attribute("", setting.name) and rule != bare
        found[f"{setting.type}.{setting.name}" if is_of_class else setting.name] = rule
    return found


def _settings(rank: RankRun) -> set[_Setting]:
    """What modules and optimizers of a run are set to, by the names of their classes."""
    classes: dict[tuple[str, str], str] = {}
    found = set()
    for row in rank.setup:
        if row.subject in ("module", "optimizer"):
            type = classes.setdefault((row.subject, row.site), str(row.values.get("class", "")))
            found |= {
                _Setting(row.subject, type, name)
                for name in row.values
                if "." not in name and name not in _NOT_SETTINGS
            }
    return found


# -- functions ---------------------------------------------------------------------------------------------------------


def drafted_functions(reference: RankRun, candidate: RankRun, known: Equivalents) -> dict[str, str]:
    """What the candidate's functions are called in the reference."""
    of_reference, of_candidate = _functions(reference), _functions(candidate)
    found = {}
    for name in sorted(of_candidate - of_reference):
        word = next((word for word in known.functions(name) if word in of_reference), None)
        if word is not None:
            found[name] = word
    return found


def _functions(rank: RankRun) -> set[str]:
    kinds, sites = rank.calls.coded("kind"), rank.calls.coded("site")
    at = sites.codes[kinds.codes == kinds.code("function")] if "function" in kinds.values else np.empty(0, np.int32)
    return {str(sites.values[code]).rpartition("/")[2] for code in np.unique(at).tolist() if code >= 0}


def drafted_labels(reference: RankRun, candidate: RankRun, known: Equivalents) -> dict[str, dict[str, str]]:
    """Which argument of a loss outside of all modules has the labels, where both runs have some of a kind."""
    of_reference, found = _labels(reference), {}
    for (name, path), form in _labels(candidate).items():
        word = next((word for word in known.labels(path) if of_reference.get((name, word)) == form), None)
        if word is not None:
            found[name] = {path: word}
    return found


def _labels(rank: RankRun) -> dict[tuple[str, str], Any]:
    """The first labels that losses are given: dtype and shape, without dimensions of size 1, by loss and argument."""
    kinds, sites = rank.calls.coded("kind"), rank.calls.coded("site")
    if "custom" not in kinds.values:
        return {}
    losses = [str(site or "").startswith("/") for site in sites.values]
    wanted = (kinds.codes == kinds.code("custom")) & np.array([*losses, False])[sites.codes]
    found: dict[tuple[str, str], Any] = {}
    for row in np.flatnonzero(np.append(wanted, False)[rank.call_rows]).tolist():
        name = str(rank.calls["site"][int(rank.call_rows[row])]).removeprefix("/")
        shape = tuple(size for size in rank.tensors["shape"][row] or () if size != 1)
        found.setdefault((name, str(rank.tensors["path"][row])), (rank.tensors["dtype"][row], shape))
    return found


class _Argument(NamedTuple):
    role: str
    path: str
    shape: tuple[int, ...]
    size: float


def drafted_paths(reference: RankRun, candidate: RankRun, mapping: Mapping) -> dict[str, dict[str, str]]:
    """Where the arguments and results of the candidate's functions are in the reference, where they are elsewhere.

    The first call of each site that both runs have; a tensor of the same shape and, within a hundredth, the same size.
    What calls of one function do not agree about is left out.
    """
    of_reference, of_candidate = _first_calls(reference, None), _first_calls(candidate, mapping)
    votes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for site, (name, arguments) in of_candidate.items():
        if site in of_reference:
            for path, target in _elsewhere(of_reference[site][1], arguments):
                votes[name][path].add(target)
    found = {
        name: {path: next(iter(targets)) for path, targets in paths.items() if len(targets) == 1}
        for name, paths in votes.items()
    }
    return {name: paths for name, paths in found.items() if paths}


def _elsewhere(reference: list[_Argument], candidate: list[_Argument]) -> Iterator[tuple[str, str]]:
    """The paths that only the candidate has, each with the path that only the reference has of the same tensor."""
    shared = {(one.role, one.path) for one in reference} & {(one.role, one.path) for one in candidate}
    free = [one for one in reference if (one.role, one.path) not in shared]
    for argument in candidate:
        if (argument.role, argument.path) in shared:
            continue
        alike = [one for one in free if (one.role, one.shape) == (argument.role, argument.shape)]
        alike = [one for one in alike if np.isclose(one.size, argument.size, rtol=CLOSE, atol=0, equal_nan=True)]
        if alike:
            best = min(alike, key=lambda one: abs(one.size - argument.size))
            free.remove(best)
            yield argument.path, best.path


def _first_calls(rank: RankRun, mapping: Mapping | None) -> dict[str, tuple[str, list[_Argument]]]:
    """The tensors of the first call of each function, by its site in the reference; with the run's own name of it."""
    calls, tensors = rank.calls, rank.tensors
    if "function" not in calls.coded("kind").values:
        return {}
    columns = renamed_columns(rank, mapping or Mapping())
    wanted = (calls.coded("kind").codes == calls.coded("kind").code("function")) & (calls.numbers("call") == 0)
    wanted &= calls.coded("phase").codes == calls.coded("phase").code("forward")
    wanted &= calls.numbers("step") == calls.numbers("step").min()
    rows = np.flatnonzero(np.append(wanted, False)[rank.call_rows] & (rank.call_rows >= 0))
    keys = one_key([rank.call_rows[rows], tensors.coded("role").codes[rows], tensors.coded("path").codes[rows]])
    found: dict[str, tuple[str, list[_Argument]]] = {}
    first: dict[str, int] = {}
    for row in rows[np.sort(np.unique(keys, return_index=True)[1])].tolist():
        call = int(rank.call_rows[row])
        site = str(columns.site[call])
        if first.setdefault(site, call) != call:
            continue
        _, arguments = found.setdefault(site, (str(calls["site"][call]).rpartition("/")[2], []))
        size = float(tensors.numbers("l2")[row])
        shape: Dictionary[int, Any] | Any = columns.form[row]
        arguments.append(_Argument(str(tensors["role"][row]), str(columns.path[row]), tuple(shape or ()), size))
    return found
