"""Pairs the tensors of two runs.

Why were these two tensors paired? Because they have the same key: step, micro, site, call, phase, role and path, in the
same rank, and both or neither are of a recomputed forward call. The backward of a recomputed call is the ordinary one,
and is paired with that of a run without checkpointing. Nothing else counts: not time, not the order of execution, not
the shape. Parameters and buffers of a module count as one role. When a run holds the same key several times, the first
is paired with the first, the second with the second. Three things make an exception:

- Functions of which one run has more calls. `call` counts the calls of one site within a micro step, so the numbers of
  all that follow are off by one. Where a module does not call the same in the same order, `partners` pairs its calls in
  order of execution (`sequence_alignment`), so that neighbours show what is additional.
- Modules whose calls come in another order, as in programs that iterate over a set of names. Where each call has plain
  arguments of its own, `renumber_by_arguments` pairs by those.
- Runs whose names say nothing, if the user says so, or if one of the two does not record in which module a function was
  called (`unnamed_calls`). All calls are then paired in order of execution, whatever they are called.

The pairs come in the reference's order of observation. What only the candidate has comes right after the row that it
followed there, so that the merged order reads like one execution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from astray.comparison.pair.matching import Matching
from astray.comparison.pair.sequence_alignment import CallStream, pair_streams
from astray.comparison.rows import Bools, Floats, Ints, Rows, StringTable
from astray.graph.keys import find, number_repeats, one_key, repeats
from astray.store import RunData

KEY = ("step", "micro", "site", "call", "phase", "again", "role", "path")
ANONYMOUS = ("step", "micro", "phase", "again", "role", "path")
"""The key where names say nothing."""


class Alignment(NamedTuple):
    """For each pair its place among the rows of either side, −1 where that side has none."""

    reference: Ints
    candidate: Ints

    @property
    def matched(self) -> Bools:
        return (self.reference >= 0) & (self.candidate >= 0)


def align(
    reference: Rows, candidate: Rows, words: Words, *, in_order: bool = False, same_shape: bool = False
) -> Alignment:
    """Pair the rows of one rank.

    in_order: by the order of execution and by what was called, whatever the sites are called.
    same_shape: tensors of different shapes are not paired.
    """
    partner: Ints
    candidate = renumber_by_arguments(reference, candidate, words)
    if _has_same_keys(reference, candidate):  # two runs of one program: each row has its partner at its own place
        partner = np.arange(len(reference))
    else:
        partner = find(*_keys(reference, candidate, words, in_order))
    if same_shape:
        shapes = reference.columns["form"], np.append(candidate.columns["form"], -1)
        partner = np.where(shapes[0] == shapes[1][partner], partner, -1)
    return merge(partner, len(candidate))


def unnamed_calls(reference: RunData, candidate: RunData, matching: Matching) -> tuple[Matching, list[str]]:
    """The matching with `by` decided: by key or by order; and a note where it is by order.

    Some tools do not record in which module a function was called. Beside a run that does, names mean nothing; the
    order of calls still does.
    """
    if matching.by != "auto":
        return matching, []
    known = [knows_modules(run) for run in (reference, candidate)]
    if matching.micro == "joined" or set(known) != {True, False}:
        return replace(matching, by="key"), []
    run = (reference, candidate)[known.index(False)]
    note = f"{run.path} does not say in which modules functions were called, so calls are paired by their order."
    return replace(matching, by="order"), [note]


def knows_modules(run: RunData) -> bool | None:
    """Whether a run records in which modules its functions were called; None where it has no functions."""
    functions = False
    for rank in run.ranks.values():
        kinds, sites = rank.calls.coded("kind"), rank.calls.coded("site")
        counted = [kinds.values.index(kind) for kind in REPEATED_KINDS if kind in kinds.values]
        if "module" in kinds.values:
            return True if counted else None
        for kind in counted:
            functions = True
            of_kind = {sites.values[code] for code in set(sites.codes[kinds.codes == kind].tolist()) if code >= 0}
            if any(not site.startswith("/") for site in of_kind):
                return True
    return False if functions else None


def _has_same_keys(reference: Rows, candidate: Rows) -> bool:
    return all(np.array_equal(reference.columns[name], candidate.columns[name]) for name in KEY)


def _keys(reference: Rows, candidate: Rows, words: Words, in_order: bool) -> tuple[Ints, Ints]:
    """One number for each row, which only its partner has too."""
    columns = {name: np.concatenate([reference.columns[name], candidate.columns[name]]) for name in KEY}
    if {"parameter", "state"} <= {*words.role}:
        # A module has one tensor of a name: running statistics are parameters in one framework and buffers in another.
        kind = np.concatenate([reference.columns["kind"], candidate.columns["kind"]])
        own = (columns["role"] == words.role.index("state")) & np.isin(kind, _codes(words.kind, ("module",)))
        columns["role"] = np.where(own, words.role.index("parameter"), columns["role"])
    keys = one_key([columns[name] for name in (ANONYMOUS if in_order else KEY)])
    keys_reference, keys_candidate = keys[: len(reference)], keys[len(reference) :]
    if in_order or not np.array_equal(keys_reference, keys_candidate):
        partner = np.concatenate(partners(reference, candidate, words, in_order))
        if partner.any():
            columns["call"] = np.where(partner > 0, 0, columns["call"])
            keys = one_key([*(columns[name] for name in (ANONYMOUS if in_order else KEY)), partner])
            keys_reference, keys_candidate = keys[: len(reference)], keys[len(reference) :]
    if repeats(keys_reference) or repeats(keys_candidate):
        keys = one_key([keys, np.concatenate([number_repeats(keys_reference), number_repeats(keys_candidate)])])
        keys_reference, keys_candidate = keys[: len(reference)], keys[len(reference) :]
    return keys_reference, keys_candidate


def merge(partner: Ints, candidates: int) -> Alignment:
    """Lay the candidate's unmatched rows between the pairs.

    partner: the candidate row of each reference row, or −1. candidates: how many rows the candidate has.
    """
    if len(partner) == candidates and np.array_equal(partner, np.arange(candidates)):
        return Alignment(partner, partner)
    matched = np.flatnonzero(partner >= 0)
    reference_of = np.full(candidates, -1)  # the reference row of each candidate row
    reference_of[partner[matched]] = matched
    unmatched = np.flatnonzero(reference_of < 0)
    # the last candidate row at or before each one that has a partner; −1 before the first such row
    last = np.maximum.accumulate(np.where(reference_of >= 0, np.arange(candidates), -1))[unmatched]
    follows = np.where(last >= 0, reference_of[last], -1)
    # a stable sort keeps a reference row before the unmatched rows that follow it, and those in their own order
    order = np.argsort(np.concatenate([np.arange(len(partner)), follows]), kind="stable")
    reference = np.concatenate([np.arange(len(partner)), np.full(len(unmatched), -1)])[order]
    return Alignment(reference, np.concatenate([partner, unmatched])[order])


# -- calls that numbers do not pair ------------------------------------------------------------------------------------


SCOPE = ("step", "micro", "phase", "again")
"""Calls of different scopes are never paired."""

REPEATED_KINDS = ("function", "op", "collective")
"""Kinds of calls whose sites are called again and again within one call of their module."""


class Words(NamedTuple):
    """The values behind the codes of some columns."""

    kind: list[str]
    site: list[str]
    role: list[str]


class CallSequence(NamedTuple):
    """The calls that rows belong to, in order of execution, and which of them each row belongs to."""

    columns: dict[str, Ints]
    of_row: Ints
    detail: Ints
    size: Floats
    forward: Ints  # of a backward call, the place of the call that it belongs to; −1 where that is not known

    @classmethod
    def of(cls, rows: Rows, measure: str) -> CallSequence:
        """Calls are rows of a table in the order in which they began. `measure` says how large a tensor is."""
        call_rows, first, of_row = np.unique(rows.call_row, return_index=True, return_inverse=True)
        columns = {name: rows.columns[name][first] for name in (*SCOPE, "kind", "site", "type", "call")}
        count = len(call_rows)
        details, sizes = _details(rows, of_row, count), _sizes(rows, of_row, count, measure)
        return cls(columns, of_row, details, sizes, _forward_calls(rows, call_rows, columns))

    def __len__(self) -> int:
        return len(self.detail)


def _forward_calls(rows: Rows, call_rows: Ints, columns: dict[str, Ints]) -> Ints:
    """For each call the place of the forward call whose backward it is, −1 for others.

    An op of the backward pass is a call of its own. Of a call that was made again the backward may belong to either.
    """
    assert rows.run is not None, "there are rows"
    calls = rows.run.calls
    phase, kind = calls.coded("phase"), calls.coded("kind")
    seq, parent = calls.numbers("seq")[call_rows], calls.numbers("parent")[call_rows]
    is_backward = (phase.codes == phase.code("backward"))[call_rows] & (parent >= 0)
    is_backward &= np.isin(kind.codes[call_rows], [kind.code(name) for name in ("function", "collective")])
    place = np.full(len(call_rows), -1)
    at = np.flatnonzero(is_backward)
    if len(at):
        order = np.argsort(seq, kind="stable")
        found = order[np.minimum(np.searchsorted(seq, parent[at], sorter=order), len(seq) - 1)]
        known = (seq[found] == parent[at]) & (columns["again"][found] == 0)
        known &= columns["site"][found] == columns["site"][at]
        place[at[known]] = found[known]
    return place


def renumber_by_arguments(reference: Rows, candidate: Rows, words: Words) -> Rows:
    """The candidate with its calls of a module numbered as the reference's calls with the same plain arguments.

    Unchanged where all come in the same order, and where two calls have the same arguments.
    """
    module = words.kind.index("module") if "module" in words.kind else -1
    repeated = [(rows.columns["kind"] == module) & (rows.columns["call"] > 0) for rows in (reference, candidate)]
    if not all(side.any() for side in repeated):
        return candidate
    vocabulary = StringTable()
    arguments, arguments_candidate = (_arguments_of_calls(rows, module, vocabulary) for rows in (reference, candidate))
    renumbered: dict[tuple[ModulePlace, int], int] = {}
    for place in arguments.keys() & arguments_candidate.keys():
        wanted, order = arguments[place], arguments_candidate[place]
        if wanted != order and len(set(wanted)) == len(wanted) and sorted(wanted) == sorted(order):
            renumbered |= {(place, number): wanted.index(code) for number, code in enumerate(order)}
    if not renumbered:
        return candidate
    columns = candidate.columns
    call = columns["call"].copy()
    sites = [site for (*_, site), _ in renumbered]
    at = np.flatnonzero((columns["kind"] == module) & np.isin(columns["site"], sites))
    keys = zip(*(columns[name][at].tolist() for name in ("step", "micro", "site", "call")), strict=True)
    call[at] = [renumbered.get(((step, micro, site), number), number) for step, micro, site, number in keys]
    return replace(candidate, columns=columns | {"call": call})


ModulePlace = tuple[int, int, int]
"""Step, micro step and site of a module."""


def _arguments_of_calls(rows: Rows, module: int, vocabulary: StringTable) -> dict[ModulePlace, list[int]]:
    """The codes of the arguments of each call of a module that is called several times, in order."""
    assert rows.run is not None, "there are rows"
    arguments = vocabulary.encode(rows.run.calls.coded("args"))[rows.call_row]
    columns = rows.columns
    at = np.flatnonzero((columns["kind"] == module) & (arguments >= 0) & (columns["again"] == 0))
    at = at[np.unique(rows.call_row[at], return_index=True)[1]]
    by_number: dict[ModulePlace, dict[int, int]] = {}
    several = np.isin(columns["site"][at], np.unique(columns["site"][at][columns["call"][at] > 0]))
    names = [columns[name][at[several]].tolist() for name in ("step", "micro", "site", "call")]
    for step, micro, site, call, code in zip(*names, arguments[at[several]].tolist(), strict=True):
        by_number.setdefault((step, micro, site), {}).setdefault(call, code)
    complete = {place: calls for place, calls in by_number.items() if sorted(calls) == list(range(len(calls)))}
    return {place: [calls[number] for number in range(len(calls))] for place, calls in complete.items()}


def partners(reference: Rows, candidate: Rows, words: Words, in_order: bool) -> tuple[Ints, Ints]:
    """A number for each row that its partner's call has too; 0 where the key decides.

    Calls that are paired by order and have no partner get a number of their own. in_order: all calls are. A backward
    call has the partner of its forward call, for gradients of several branches may come in any order.
    """
    nothing = np.zeros(len(reference), np.int64), np.zeros(len(candidate), np.int64)
    if not len(reference) or not len(candidate):
        return nothing
    measure = _size_statistic(reference, candidate)
    calls_reference, calls_candidate = CallSequence.of(reference, measure), CallSequence.of(candidate, measure)
    scopes = _common_numbers(
        [calls_reference.columns[name] for name in SCOPE], [calls_candidate.columns[name] for name in SCOPE]
    )
    if in_order:
        by_order = streams = np.ones(len(calls_reference), np.bool_), np.ones(len(calls_candidate), np.bool_)
    else:
        by_order = _in_uneven_modules(calls_reference, calls_candidate, scopes, words)
        streams = _in_modules_of(calls_reference, calls_candidate, by_order, scopes, _modules(words.site))
        for masks in (by_order, streams):
            for taken, calls in zip(masks, (calls_reference, calls_candidate), strict=True):
                taken &= calls.forward < 0
        for taken, alike in zip(by_order, _agree_by_number(calls_reference, calls_candidate, scopes), strict=True):
            taken &= ~alike
    numbers = np.zeros(len(calls_reference), np.int64), np.zeros(len(calls_candidate), np.int64)
    for scope in np.unique(scopes[0][streams[0]]).tolist():
        places = [np.flatnonzero(taken & (of == scope)) for taken, of in zip(streams, scopes, strict=True)]
        first, second = pair_streams(
            _stream(calls_reference, places[0], words), _stream(calls_candidate, places[1], words)
        )
        first, second = places[0][first], places[1][second]
        if not in_order:  # names decide: the stream only says which of several calls of a site it is
            same = calls_reference.columns["site"][first] == calls_candidate.columns["site"][second]
            same &= (
                by_order[0][first]
                & by_order[1][second]
                & _have_plausible_shapes(calls_reference, calls_candidate, first, second)
            )
            first, second = first[same], second[same]
        numbers[0][first] = numbers[1][second] = first + 1
    unpaired = [taken & (number == 0) for taken, number in zip(by_order, numbers, strict=True)]
    numbers[0][unpaired[0]] = len(calls_reference) + 1 + np.flatnonzero(unpaired[0])
    numbers[1][unpaired[1]] = 2 * len(calls_reference) + 1 + np.flatnonzero(unpaired[1])
    if not in_order:
        for number, calls in zip(numbers, (calls_reference, calls_candidate), strict=True):
            backward = calls.forward >= 0
            number[backward] = number[calls.forward[backward]]
    return numbers[0][calls_reference.of_row], numbers[1][calls_candidate.of_row]


def _stream(calls: CallSequence, at: Ints, words: Words) -> CallStream:
    """A call's kind and name. Of a function or op its kind is the last part of its site, and its name the site.

    A module may be of any class, since ports of a model have classes of their own; its name is the class.
    """
    columns = {name: column[at].astype(np.int64) for name, column in calls.columns.items()}
    functions: dict[str, int] = {}
    codes = np.array([functions.setdefault(site.rpartition("/")[2], len(functions)) for site in words.site], np.int64)
    by_name = np.isin(columns["kind"], _codes(words.kind, REPEATED_KINDS))
    kind = np.where(by_name, codes[columns["site"]], len(codes)) * len(words.kind) + columns["kind"]
    name = np.where(by_name, columns["site"], len(words.site) + columns["type"])
    return CallStream(kind, calls.detail[at], name, calls.size[at])


def _codes(words: list[str], wanted: tuple[str, ...]) -> list[int]:
    return [code for code, word in enumerate(words) if word in wanted]


def _modules(sites: list[str]) -> Ints:
    """The number of the module that each site lies in."""
    names: dict[str, int] = {}
    return np.array([names.setdefault(site.partition("/")[0], len(names)) for site in sites], np.int64)


def _in_uneven_modules(
    reference: CallSequence, candidate: CallSequence, scopes: tuple[Ints, Ints], words: Words
) -> tuple[Bools, Bools]:
    """Calls in modules that both sides have, and in which they do not call the same in the same order."""
    modules, counted = _modules(words.site), _codes(words.kind, REPEATED_KINDS)
    sides = []
    for calls, scope in zip((reference, candidate), scopes, strict=True):
        at = np.flatnonzero(np.isin(calls.columns["kind"], counted))
        sides.append((at, scope[at], modules[calls.columns["site"][at]], calls.columns["site"][at]))
    groups = _common_numbers(*([side[1], side[2]] for side in sides))
    order = [np.argsort(group, kind="stable") for group in groups]
    most = int(max(group.max(initial=-1) for group in groups)) + 1
    counts = [np.bincount(group, minlength=most) for group in groups]
    uneven = (counts[0] != counts[1]) & (counts[0] > 0) & (counts[1] > 0)
    even = [np.flatnonzero((counts[0] == counts[1])[group[one]]) for group, one in zip(groups, order, strict=True)]
    sites = [side[3][one[kept]] for side, one, kept in zip(sides, order, even, strict=True)]
    uneven[np.unique(groups[0][order[0][even[0]]][sites[0] != sites[1]])] = True
    masks = []
    for calls, side, group in zip((reference, candidate), sides, groups, strict=True):
        mask = np.zeros(len(calls), np.bool_)
        mask[side[0]] = uneven[group]
        masks.append(mask)
    return masks[0], masks[1]


SAME_NORM = 1e-4
"""How far apart the logarithms of two norms are at most that are the same but for rounding. Other calls of one function
on tensors of one shape, as of query, key and value, are further apart."""


def _agree_by_number(
    reference: CallSequence, candidate: CallSequence, scopes: tuple[Ints, Ints]
) -> tuple[Bools, Bools]:
    """Calls of a site that both sides call as often, whose numbers pair results of the same shapes and the same size.

    In modules that do not call the same in the same order: one may reshape query, key and value first, and the other do
    all with one of them and then with the next.
    """
    sites = [side.columns["site"].astype(np.int64) for side in (reference, candidate)]
    places = _common_numbers([scopes[0], sites[0]], [scopes[1], sites[1]])
    most = int(max(place.max(initial=-1) for place in places)) + 1
    counts = [np.bincount(place, minlength=most) for place in places]
    calls = _common_numbers([places[0], reference.columns["call"]], [places[1], candidate.columns["call"]])
    partner = find(calls[0], calls[1])
    at = np.flatnonzero((partner >= 0) & (counts[0] == counts[1])[places[0]])
    other = partner[at]
    with np.errstate(invalid="ignore"):
        close = np.abs(reference.size[at] - candidate.size[other]) <= SAME_NORM
    close &= reference.detail[at] == candidate.detail[other]
    masks = np.zeros(len(reference), np.bool_), np.zeros(len(candidate), np.bool_)
    masks[0][at[close]], masks[1][other[close]] = True, True
    return masks


def _have_plausible_shapes(reference: CallSequence, candidate: CallSequence, first: Ints, second: Ints) -> Bools:
    """Pairs of equal shapes, and those between two such: there the shape differs, elsewhere the pair is a wrong one."""
    same = reference.detail[first] == candidate.detail[second]
    following = (np.diff(first) == 1) & (np.diff(second) == 1)
    before, after = np.append(False, same[:-1] & following), np.append(same[1:] & following, False)
    return np.asarray(same | (before & after))


def _in_modules_of(
    reference: CallSequence,
    candidate: CallSequence,
    by_order: tuple[Bools, Bools],
    scopes: tuple[Ints, Ints],
    modules: Ints,
) -> tuple[Bools, Bools]:
    """All calls in the modules of those that are paired by order: their neighbours."""
    module_of = _common_numbers(
        [scopes[0], modules[reference.columns["site"]]], [scopes[1], modules[candidate.columns["site"]]]
    )
    modules_wanted = np.union1d(module_of[0][by_order[0]], module_of[1][by_order[1]])
    return np.isin(module_of[0], modules_wanted), np.isin(module_of[1], modules_wanted)


def _common_numbers(reference: list[Ints], candidate: list[Ints]) -> tuple[Ints, Ints]:
    """One number for each combination of values, the same on both sides."""
    keys = one_key([np.concatenate([one, other]) for one, other in zip(reference, candidate, strict=True)])
    _, number = np.unique(keys, return_inverse=True)
    return number[: len(reference[0])], number[len(reference[0]) :]


def _details(rows: Rows, of_row: Ints, calls: int) -> Ints:
    """A number for the shapes of a call's tensors. Not for their dtypes: those may be what the runs differ in."""
    factors = {"role": 0x9E3779B1, "path": 0x85EBCA77, "shape": 0x27D4EB2F}
    mixed = np.zeros(len(rows), np.uint64)
    for name, factor in factors.items():
        column = rows.laid_out_shape if name == "shape" else rows.columns[name]
        mixed = (mixed ^ column.astype(np.int64).astype(np.uint64)) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    found = np.zeros(calls, np.uint64)
    np.add.at(found, of_row, mixed)
    return found.view(np.int64)


def _size_statistic(reference: Rows, candidate: Rows) -> str:
    """The statistic that says how large tensors are: the norm, or the largest element where a run has few norms."""
    known = [np.isfinite(rows.statistic("l2", np.arange(len(rows)))).mean() for rows in (reference, candidate)]
    return "l2" if min(known) >= 0.5 else "absmax"


def _sizes(rows: Rows, of_row: Ints, calls: int, measure: str) -> Floats:
    """The logarithm of the size of a call's last tensor: its result, where it has one."""
    assert rows.run is not None, "a rank that is not there has no rows to ask for"
    last = np.zeros(calls, np.int64)
    last[of_row] = np.arange(len(rows))
    size = rows.statistic(measure, last)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(np.where(size > 0, size, np.nan))
