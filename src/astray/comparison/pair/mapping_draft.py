"""Drafts a mapping for two runs whose names differ: `astray map`.

The modules of the first step are taken in order of execution, and paired by the shapes of their own parameters, what
they give, and the last part of their names. The tensors of checkpoints have no order (some files are sorted by name,
others by module): those with the same bits are paired, and of the others those of the same shape and the same numbers
in their names, the most similar names first. From the pairs come rules, as few as will do: a module stands for all that
is inside it and has the same name there, and names that differ only in their numbers become one pattern. What own
tensors, settings and functions are called, and how weights lie, is found by `drafted_tensors` and `drafted_words`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from astray.comparison.pair.draft_text import draft_lines
from astray.comparison.pair.drafted_tensors import (
    ReadMeasured,
    TensorPairs,
    drafted_layouts,
    pair_own,
    renamed_last_parts,
    renamed_states,
)
from astray.comparison.pair.drafted_words import (
    drafted_attributes,
    drafted_functions,
    drafted_labels,
    drafted_paths,
    drafted_types,
)
from astray.comparison.pair.framework_names import PADDLE, TORCH, UNLIKE, Equivalents, equivalents
from astray.comparison.pair.mapping import Mapping
from astray.comparison.pair.own_tensors import Measured, OwnTensor, own_tensors
from astray.comparison.pair.renaming import last_part
from astray.comparison.pair.sequence_alignment import CallStream, pair_streams
from astray.errors import CompareError
from astray.records import ROOT
from astray.store import CheckpointData, RankRun, RunData


class Module(NamedTuple):
    """A module that was called."""

    site: str
    type: str
    parameters: tuple[tuple[int, ...], ...]  # the shapes of its own, each sorted: a transposed weight is the same one
    output: tuple[int, ...]
    size: float  # the logarithm of the norm of what it gave

    @property
    def label(self) -> str:
        """The site with its class; the tensor of a checkpoint has none."""
        return f"{self.site} ({self.type})" if self.type else self.site


class Draft(NamedTuple):
    """A mapping, and what it does not cover.

    why: what shows each layout, by its name. reasons: what is known of the frameworks. unknown: tensors that may need a
    layout and have none, a sentence each.
    """

    mapping: Mapping
    pairs: list[tuple[Module, Module]]  # of the reference and of the candidate
    only_reference: list[Module]
    only_candidate: list[Module]
    known: Equivalents | None = None
    why: Dictionary[str, str] = MappingProxyType({})
    reasons: Sequence[str] = ()
    unknown: Sequence[str] = ()

    @property
    def of_modules(self) -> bool:
        """Whether names are of modules; those of tensors have no class."""
        return any(module.type for module in (*self.only_reference, *self.only_candidate, *sum(self.pairs, ())))

    def __str__(self) -> str:
        """The mapping as a file, with what it does not cover in comments."""
        return "\n".join(draft_lines(self))


def draft(reference: RunData, candidate: RunData) -> Draft:
    """Find out which module is which. Raises CompareError when a run has no modules."""
    if isinstance(reference, CheckpointData) != isinstance(candidate, CheckpointData):
        raise CompareError("A checkpoint and a recording have no names to map: give two of a kind.")
    modules_reference, modules_candidate = modules(reference), modules(candidate)
    known = equivalents(framework_of(reference), framework_of(candidate))
    if isinstance(reference, CheckpointData) and isinstance(candidate, CheckpointData):
        indices = pair_renamed(_tensors(reference), _tensors(candidate))
    else:
        columns = pair_streams(*_streams(modules_reference, modules_candidate))
        indices = list(zip(*(column.tolist() for column in columns), strict=True))
    pairs = [(modules_reference[i], modules_candidate[j]) for i, j in indices]
    paired_reference, paired_candidate = ({pair[side] for pair in indices} for side in (0, 1))
    names = [(of_candidate.site, of_reference.site) for of_reference, of_candidate in pairs]
    own = _own_pairs(names, reference, candidate, known)
    tensors = renamed_last_parts((of_reference.name, of_candidate.name) for of_reference, of_candidate in own)
    if isinstance(reference, CheckpointData):
        names = [(old, new) for old, new in names if Mapping(tensors=tensors).tensor(old) != new]
    names += [
        (of_candidate.name, of_reference.name)
        for of_reference, of_candidate in own
        if last_part(of_candidate.name) not in {last_part(of_reference.name), *tensors}
    ]
    layouts = drafted_layouts(own, _reader(reference, candidate), known)
    mapping = replace(_rules(names), tensors=tensors, layouts=tuple(rule for rule, _ in layouts.rules))
    if known is not None and not isinstance(reference, CheckpointData):
        mapping = _with_words(mapping, pairs, reference, candidate, known)
    if known is not None:
        mapping = _with_lists(mapping, reference, candidate, known)
    return Draft(
        mapping,
        pairs,
        [module for index, module in enumerate(modules_reference) if index not in paired_reference],
        [module for index, module in enumerate(modules_candidate) if index not in paired_candidate],
        known,
        {rule.name: why for rule, why in layouts.rules},
        layouts.reasons,
        layouts.unknown,
    )


def framework_of(run: RunData) -> str | None:
    """The framework of a run, or the one that saved a checkpoint; None where that is not known."""
    if not isinstance(run, CheckpointData):
        return run.info.framework
    return next((name for name in (PADDLE, TORCH) if name in run.checkpoint.format.lower()), None)


def _own_pairs(
    names: list[tuple[str, str]], reference: RunData, candidate: RunData, known: Equivalents | None
) -> TensorPairs:
    """The own tensors of paired modules; of checkpoints, whose names are those of tensors, the pairs themselves."""
    of_reference, of_candidate = own_tensors(reference), own_tensors(candidate)
    if isinstance(reference, CheckpointData):
        return [(of_reference[new], of_candidate[old]) for old, new in names]
    by_module: list[dict[str, list[OwnTensor]]] = [defaultdict(list), defaultdict(list)]
    for side, tensors in zip(by_module, (of_reference, of_candidate), strict=True):
        for tensor in tensors.values():
            side[tensor.module].append(tensor)
    return [pair for old, new in names for pair in pair_own(by_module[0][new], by_module[1][old], known)]


def _reader(reference: RunData, candidate: RunData) -> ReadMeasured:
    """Reads what is known of the values of a pair's tensors."""

    def read(of_reference: OwnTensor, of_candidate: OwnTensor) -> tuple[Measured, Measured]:
        return (
            Measured.of(reference.ranks[of_reference.rank].tensors, of_reference.row),
            Measured.of(candidate.ranks[of_candidate.rank].tensors, of_candidate.row),
        )

    return read


def _with_words(
    mapping: Mapping, pairs: list[tuple[Module, Module]], reference: RunData, candidate: RunData, known: Equivalents
) -> Mapping:
    """With what two frameworks call classes, settings, functions and states."""
    sides = reference.ranks[min(reference.ranks)], candidate.ranks[min(candidate.ranks)]
    types = drafted_types(
        ((of_reference.type, of_candidate.type) for of_reference, of_candidate in pairs), *sides, mapping, known
    )
    states = renamed_states(_states(sides[0]), _states(sides[1]), known)
    mapping = replace(
        mapping,
        types=types,
        functions=drafted_functions(*sides, known),
        tensors={**mapping.tensors, **states},
        attributes=drafted_attributes(*sides, known),
    )
    return replace(mapping, paths=drafted_paths(*sides, mapping) | drafted_labels(*sides, known))


def _with_lists(mapping: Mapping, reference: RunData, candidate: RunData, known: Equivalents) -> Mapping:
    """With the tensors that one side has alone, and of recordings those that each computes in its own way."""
    kept = [{*map(last_part, own_tensors(run)), *_states(run.ranks[min(run.ranks)])} for run in (reference, candidate)]
    renamed = {mapping.tensors.get(name, name) for name in kept[1]}
    unlike = () if isinstance(reference, CheckpointData) else tuple(UNLIKE)
    return replace(
        mapping,
        not_compared=tuple(name for name in unlike if name in kept[0] & renamed),
        only_in_reference=tuple(name for name in known.only_in("reference") if name in kept[0] - renamed),
        only_in_candidate=tuple(name for name in known.only_in("candidate") if name in renamed - kept[0]),
    )


def _states(rank: RankRun) -> set[str]:
    """What a run's optimizers keep for parameters."""
    paths = [str(path) for path in rank.tensors.coded("path").values]
    return {path.removeprefix("state.") for path in paths if path.startswith("state.")}


def modules(run: RunData) -> list[Module]:
    """The modules of a run's first step, in the order in which they were first called."""
    rank = run.ranks[min(run.ranks)] if run.ranks else None
    if rank is None or not len(rank.calls):
        raise CompareError(f"{run.path} holds no calls, so there is nothing to map.")
    if isinstance(run, CheckpointData):
        return [Module(tensor.name, "", (), tensor.shape, np.nan) for tensor in _tensors(run)]
    calls = rank.calls
    wanted = (calls.coded("kind").codes == calls.coded("kind").code("module")) & (
        calls.coded("phase").codes == calls.coded("phase").code("forward")
    )
    wanted &= calls.numbers("step") == calls.numbers("step").min()
    rows = np.flatnonzero(wanted)
    if not len(rows):
        raise CompareError(
            f"{run.path} holds no module calls, so there is nothing to map. Record it with level='module'."
        )
    found: dict[str, Module] = {}
    tensors = _tensors_of(rank)
    for row in rows.tolist():
        site = calls["site"][row]
        if site not in found:
            found[site] = _module(rank, site, calls["type"][row] or "", tensors.get(row, []))
    return list(found.values())


def _tensors(run: CheckpointData) -> list[TensorSignature]:
    """The tensors of a checkpoint, which has no modules. One of a single repeated value is like many others."""
    tensors, sites = run.ranks[0].tensors, run.ranks[0].calls["site"]
    is_distinctive = tensors.valid("fingerprint") & (tensors.numbers("min") < tensors.numbers("max"))
    fingerprints = zip(tensors.numbers("fingerprint"), is_distinctive, strict=True)
    bits = [int(fingerprint) if distinctive else None for fingerprint, distinctive in fingerprints]
    return [TensorSignature(sites[row], shape, bits[row]) for row, shape in enumerate(tensors["shape"])]


def _tensors_of(rank: RankRun) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for tensor, call in enumerate(rank.call_rows.tolist()):
        found[call].append(tensor)
    return found


def _module(rank: RankRun, site: str, type: str, tensors: list[int]) -> Module:
    roles, shapes = rank.tensors["role"], rank.tensors["shape"]
    own = [row for row in tensors if roles[row] == "parameter"]
    trained = rank.tensors.numbers("requires_grad")
    own = [row for row in own if trained[row]] or own  # Paddle's running statistics are parameters too
    parameters = [tuple(sorted(shapes[row])) for row in own]
    outputs = [row for row in tensors if roles[row] == "output"]
    norm = float(rank.tensors.numbers("l2")[outputs[0]]) if outputs else np.nan
    size = float(np.log(norm)) if norm > 0 else np.nan
    return Module(site, type, tuple(sorted(parameters)), shapes[outputs[0]] if outputs else (), size)


def _streams(reference: list[Module], candidate: list[Module]) -> tuple[CallStream, CallStream]:
    """Modules of other parameters are never paired, nor one that holds modules with one that holds none."""
    numbers: dict[object, int] = {}

    def stream(side: str, modules: list[Module]) -> CallStream:
        sites = {module.site for module in modules}
        outer = {site.rpartition(".")[0] for site in sites}
        columns: list[list[object]] = [
            [(module.parameters, module.site in outer or module.site == ROOT) for module in modules],
            [("output", module.output) for module in modules],
            # That both are outermost is not a sign: one model may have been wrapped.
            [("name", side if module.site == ROOT else module.site.rpartition(".")[2]) for module in modules],
        ]
        kind, detail, name = (
            np.array([numbers.setdefault(key, len(numbers)) for key in column], np.int64) for column in columns
        )
        return CallStream(kind, detail, name, np.array([module.size for module in modules]))

    return stream("<reference>", reference), stream("<candidate>", candidate)


# -- rules -------------------------------------------------------------------------------------------------------------


def _rules(pairs: list[tuple[str, str]]) -> Mapping:
    """As few rules as map each first name to its second."""
    patterns = _patterns([(old, new) for old, new in pairs if old != new and ROOT not in (old, new)])
    sites: dict[str, str] = {}
    # Outer modules first, for they may do for what is inside them.
    for old, new in sorted(pairs, key=lambda pair: pair[0].count(".")):
        if Mapping(sites, patterns).site(old) != new:
            sites[old] = new
    return Mapping(sites, [pattern for pattern in patterns if _is_needed(pattern, patterns, sites, pairs)])


def _patterns(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One pattern for names that differ in their numbers only. The outermost come first: they may do for the inner."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for old, new in pairs:
        if _numbers(old) == _numbers(new) and _numbers(old):
            groups[re.sub(r"\b\d+\b", "#", old), re.sub(r"\b\d+\b", "#", new)].append((old, new))
    found: list[tuple[str, str]] = []
    for (old, new), members in sorted(groups.items(), key=lambda group: group[0][0].count(".")):
        example = members[0]
        if len(members) > 1 and Mapping(patterns=found).site(example[0]) != example[1]:
            pattern = re.escape(old).replace(r"\#", "#").replace("#", r"(\d+)")
            found.append((pattern, _numbered(new)))
    return found


def _numbers(name: str) -> list[str]:
    return re.findall(r"\b\d+\b", name)


def _numbered(name: str) -> str:
    """With \\1, \\2 … for the numbers."""
    parts = name.split("#")
    return parts[0] + "".join(rf"\{place}{part}" for place, part in enumerate(parts[1:], 1))


def _is_needed(
    pattern: tuple[str, str], patterns: list[tuple[str, str]], sites: dict[str, str], pairs: list[tuple[str, str]]
) -> bool:
    without = Mapping(sites, [other for other in patterns if other != pattern])
    return any(without.site(old) != new for old, new in pairs)


# -- tensors of checkpoints --------------------------------------------------------------------------------------------


MOST_SIMILAR = 200
"""So many tensors of one shape and one set of numbers are compared with each other by name; more have no partner."""


class TensorSignature(NamedTuple):
    """A tensor by what it may be recognised by. `bits` is None where many tensors share them, as zeros do."""

    name: str
    shape: tuple[int, ...]
    bits: int | None


def pair_renamed(reference: list[TensorSignature], candidate: list[TensorSignature]) -> list[tuple[int, int]]:
    """Which tensor is which where names differ, as places in the two lists, in the order of the first.

    >>> pair_renamed(
    ...     [TensorSignature("h.0.w", (2, 3), None), TensorSignature("h.1.w", (2, 3), None)],
    ...     [TensorSignature("l.1.w", (2, 3), None)],
    ... )
    [(1, 0)]
    """
    paired = dict(_by_bits(reference, candidate))
    taken = set(paired.values())
    for index_reference, index_candidate in _by_names(reference, candidate, paired):
        if index_reference not in paired and index_candidate not in taken:
            paired[index_reference] = index_candidate
            taken.add(index_candidate)
    return sorted(paired.items())


def _by_bits(reference: list[TensorSignature], candidate: list[TensorSignature]) -> Iterator[tuple[int, int]]:
    """Those whose bits are unique on either side."""
    sides: list[dict[object, list[int]]] = []
    for side in (reference, candidate):
        found: dict[object, list[int]] = defaultdict(list)
        for place, tensor in enumerate(side):
            if tensor.bits is not None:
                found[tensor.shape, tensor.bits].append(place)
        sides.append(found)
    for key, places_reference in sides[0].items():
        places_candidate = sides[1].get(key, [])
        if len(places_reference) == len(places_candidate) == 1:
            yield places_reference[0], places_candidate[0]


def _by_names(
    reference: list[TensorSignature], candidate: list[TensorSignature], paired: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Those that may be the same, the most similar names first; a transposed shape will do where nothing else does."""
    taken = set(paired.values())
    groups: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (tensors, known) in enumerate(((reference, paired.keys()), (candidate, taken))):
        for place, tensor in enumerate(tensors):
            if place not in known:
                groups[tuple(sorted(tensor.shape)), tuple(_numbers(tensor.name))][side].append(place)
    found = [
        (_likeness(reference[index_reference], candidate[index_candidate]), index_reference, index_candidate)
        for places_reference, places_candidate in groups.values()
        if max(len(places_reference), len(places_candidate)) <= MOST_SIMILAR
        for index_reference in places_reference
        for index_candidate in places_candidate
    ]
    yield from (
        (index_reference, index_candidate)
        for _, index_reference, index_candidate in sorted(found, key=lambda one: (-one[0], one[1], one[2]))
    )


def _likeness(reference: TensorSignature, candidate: TensorSignature) -> float:
    words_reference, words_candidate = (re.findall(r"[a-z]+", side.name.lower()) for side in (reference, candidate))
    same_end = words_reference[-1:] == words_candidate[-1:]
    return (
        SequenceMatcher(None, words_reference, words_candidate, autojunk=False).ratio()
        + same_end
        + (reference.shape == candidate.shape)
    )
