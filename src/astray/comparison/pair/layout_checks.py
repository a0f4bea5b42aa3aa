"""Layout rules that do not fit, before anything is compared; and those that are missing, when everything has been.

A rule that fits no tensor, or one that another would fit, is a mistake in the mapping file. A weight that is transposed
in one run and has no rule is never taken for the same: it stays a difference, with the rule that would explain it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

import numpy as np

from astray.comparison.pair.layouts import TRANSPOSE, Layout, Shape, fitting_layout
from astray.comparison.pair.matching import Matching
from astray.comparison.pair.own_tensors import Measured, own_tensors
from astray.comparison.pair.renaming import OWN, full_name
from astray.comparison.rows import Bools
from astray.comparison.verdict import BAD, Reason, explain
from astray.errors import CompareError
from astray.store import RunData, Table
from astray.wording import counted

_MOST = 3
_MOST_EXAMINED = 1000


def check_layouts(reference: RunData, candidate: RunData, matching: Matching) -> None:
    """Raises CompareError for a rule that fits no tensor, and for one that another would fit."""
    mapping = matching.mapping
    if not mapping.layouts:
        return
    file = f"the mapping {matching.file}" if matching.file else "the mapping"
    of_candidate, of_reference = own_tensors(candidate), own_tensors(reference)
    used: set[int] = set()
    for tensor in of_candidate.values():
        place = mapping.layout_rule(tensor.name)
        if place is None:
            continue
        used.add(place)
        partner = of_reference.get(mapping.tensor(tensor.name))
        wrong = _why_not(mapping.layouts[place].layout, tensor.shape, None if partner is None else partner.shape)
        if wrong:
            raise CompareError(f"The layout of {tensor.name} in {file} does not fit: {wrong}")
    unused = [rule for place, rule in enumerate(mapping.layouts) if place not in used]
    sites = {str(site) for rank in candidate.ranks.values() for site in rank.calls.coded("site").values}
    for rule in unused:
        if not any(mapping.layout_rule(name) is not None for name in (*sites, *_with_paths(candidate, rule.name))):
            near = difflib.get_close_matches(rule.name, [*of_candidate, *sites], 1, cutoff=0.0)
            raise CompareError(
                f"The layout of {rule.name!r} in {file} fits no tensor of the candidate"
                f"{f'; the nearest name is {near[0]!r}' if near else ''}. Names on the left are those of the candidate."
            )


def _with_paths(run: RunData, name: str) -> list[str]:
    """The names of single inputs and outputs, if that is what a rule is for."""
    if ":" not in name:
        return []
    names = set()
    for rank in run.ranks.values():
        sites, paths = rank.calls.coded("site"), rank.tensors.coded("path")
        places = np.append(sites.codes, -1)[rank.call_rows]
        for place, path in {*zip(places.tolist(), paths.codes.tolist(), strict=True)}:
            names.add(f"{sites.values[place]}:{paths.values[path]}" if min(place, path) >= 0 else "")
    return list(names)


def _why_not(layout: Layout, shape: Shape, reference: Shape | None) -> str:
    """What is wrong with a rule, and what would fit; empty where nothing is, or where another rule would not help."""
    try:
        made = layout.shape(shape)
    except ValueError as error:
        advice = "" if reference is None else f" {_advice(shape, reference)}"
        return f"{error}: {list(shape)}.{advice}"
    if reference is None or made == reference or not _advice(shape, reference):
        return ""
    return (
        f"{layout} makes {list(made)} of {list(shape)}, and the reference has {list(reference)}. "
        f"{_advice(shape, reference)}"
    )


def _advice(shape: Shape, reference: Shape) -> str:
    if shape == reference:
        return "It has the reference's shape without a rule: leave the rule out."
    fitting = fitting_layout(shape, reference)
    return f"What fits is: {fitting}" if fitting is not None else ""


# -- rules that are missing, or wrong ----------------------------------------------------------------------------------


def doubtful_layouts(pairs: Table, reference: RunData, candidate: RunData) -> list[str]:
    """Sentences about parameters that hold the reference's elements in another order, with a rule and without."""
    has_rule = _with_reason(pairs, Reason.LAID_OUT, Reason.UNORDERED)
    return [*_missing(pairs, ~has_rule, reference, candidate), *_wrong(pairs, has_rule, reference, candidate)]


def _missing(pairs: Table, among: Bools, reference: RunData, candidate: RunData) -> list[str]:
    found = dict(_transposed(pairs, among, reference, candidate))
    if not found:
        return []
    name, shapes = next(iter(found.items()))
    each = "is" if len(found) == 1 else "are"
    return [
        f"{counted(len(found), 'parameter')} {each} transposed in one of the runs, by shapes and statistics: "
        f"{_listed(found)} ({shapes}). If the candidate stores them so, say it in a mapping, such as: "
        f"layouts: {{'{name}': transpose}}. `astray map REFERENCE CANDIDATE` drafts it for all of them."
    ]


def _wrong(pairs: Table, among: Bools, reference: RunData, candidate: RunData) -> list[str]:
    found = dict(_transposed(pairs, among, reference, candidate))
    if not found:
        return []
    hold, their = ("holds", "its rule is") if len(found) == 1 else ("hold", "their rules are")
    return [
        f"{counted(len(found), 'parameter')} {hold} the reference's elements in another order than the mapping says, "
        f"by statistics: {_listed(found)}. Either the weights were loaded without being transposed, or {their} wrong."
    ]


def _listed(found: Collection[str]) -> str:
    return ", ".join([*list(found)[:_MOST], *(["…"] if len(found) > _MOST else [])])


def _with_reason(pairs: Table, *reasons: Reason) -> Bools:
    column = pairs.coded("reason")
    sentences = [explain(reason) for reason in reasons]
    codes = [code for code, text in enumerate(column.values) if any(sentence in text for sentence in sentences)]
    return np.isin(column.codes, codes)


def _transposed(pairs: Table, among: Bools, reference: RunData, candidate: RunData) -> Iterator[tuple[str, str]]:
    """The names, and shapes in words, of a module's or a checkpoint's tensors that are wrong and have equal statistics.

    Of the first step that has any.
    """
    role, kind = pairs.coded("role"), pairs.coded("kind")
    own = among & np.isin(pairs.coded("verdict").codes, BAD)
    own &= np.isin(role.codes, [role.code(name) for name in OWN if name in role.values])
    own &= np.isin(kind.codes, [kind.code(name) for name in ("module", "parameter") if name in kind.values])
    rows = np.flatnonzero(own)
    if not len(rows):
        return
    step = pairs.numbers("step")[rows]
    for row in rows[step == step.min()][:_MOST_EXAMINED].tolist():
        shapes = [tuple(pairs[f"shape_{side}"][row] or ()) for side in ("reference", "candidate")]
        if not len(shapes[0]) == len(shapes[1]) == 2 or TRANSPOSE.shape(shapes[1]) != shapes[0]:
            continue
        rank = int(pairs.numbers("rank")[row])
        sides = [
            Measured.of(run.ranks[rank].tensors, int(pairs.numbers(f"row_{side}")[row]))
            for side, run in (("reference", reference), ("candidate", candidate))
        ]
        if sides[0].has_elements_of(sides[1]):
            site, path = str(pairs["site"][row]), str(pairs["path"][row] or "")
            yield full_name(site, path) if path else site, f"{list(shapes[0])} against {list(shapes[1])}"
