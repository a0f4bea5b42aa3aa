"""For a draft of a mapping: names of parameters, buffers and states that differ, and weights that lie otherwise.

Reads the own tensors of two runs whose modules are paired. A weight is transposed where its shape says so; of a square
one its statistics say so, or other layers of its class, or what is known of two frameworks. Whatever says so stands
behind the rule.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as Dictionary
from typing import NamedTuple

from astray.comparison.pair.framework_names import Equivalents
from astray.comparison.pair.layouts import TRANSPOSE, Layout, fitting_layout
from astray.comparison.pair.mapping import LayoutRule
from astray.comparison.pair.own_tensors import Measured, OwnTensor
from astray.comparison.pair.renaming import last_part

TensorPairs = list[tuple[OwnTensor, OwnTensor]]
"""Of the reference and of the candidate."""


# -- names -------------------------------------------------------------------------------------------------------------


def pair_own(
    reference: list[OwnTensor], candidate: list[OwnTensor], known: Equivalents | None
) -> Iterator[tuple[OwnTensor, OwnTensor]]:
    """The tensors of two modules that belong together: by name, by what frameworks call them, by shape."""
    by_name = {last_part(tensor.name): tensor for tensor in reference}
    rest = []
    for tensor in candidate:
        partner = by_name.pop(last_part(tensor.name), None)
        if partner is None:
            rest.append(tensor)
        else:
            yield partner, tensor
    for tensor in list(rest):
        words = known.tensors(last_part(tensor.name)) if known is not None else []
        word = next((word for word in words if word in by_name), None)
        if word is not None:
            rest.remove(tensor)
            yield by_name.pop(word), tensor
    for tensor in rest:
        alike = [name for name, other in by_name.items() if sorted(other.shape) == sorted(tensor.shape)]
        others = [other for other in rest if sorted(other.shape) == sorted(tensor.shape)]
        if len(alike) == len(others) == 1:
            yield by_name[alike[0]], tensor


def renamed_last_parts(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What the last part of names of the candidate is in the reference, where it differs and is always the same."""
    votes: dict[str, set[str]] = defaultdict(set)
    for of_reference, of_candidate in pairs:
        votes[last_part(of_candidate)].add(last_part(of_reference))
    return {name: next(iter(targets)) for name, targets in votes.items() if len(targets) == 1 and name not in targets}


def renamed_states(reference: set[str], candidate: set[str], known: Equivalents | None) -> dict[str, str]:
    """What the states of the candidate's optimizers are called in the reference."""
    free = reference - candidate
    found = {}
    for name in sorted(candidate - reference):
        word = next((word for word in (known.tensors(name) if known is not None else ()) if word in free), None)
        if word is not None:
            found[name] = word
            free.discard(word)
    return found


# -- layouts -----------------------------------------------------------------------------------------------------------


def drafted_layouts(pairs: TensorPairs, read: ReadMeasured, known: Equivalents | None) -> DraftedLayouts:
    """The rules for tensors of the candidate, each with its reason; and sentences about those without any."""
    found: dict[str, tuple[Layout, str]] = {}
    reasons: list[str] = []
    unknown, squares = [], []
    for of_reference, of_candidate in pairs:
        shapes = f"{list(of_candidate.shape)} here and {list(of_reference.shape)} in the reference"
        layout = fitting_layout(of_candidate.shape, of_reference.shape)
        if layout is not None:
            found[of_candidate.name] = layout, shapes
            reasons += _known_reason(of_candidate, known)
        elif of_reference.shape != of_candidate.shape:
            unknown.append(f"{of_candidate.name} is {shapes}, and not one order of its dimensions fits.")
        elif _is_square(of_candidate.shape):
            squares.append((of_reference, of_candidate))
    conventions = _conventions(pairs, found)
    for of_reference, of_candidate in squares:
        is_transposed, why = _of_square(*read(of_reference, of_candidate), of_candidate, conventions, known)
        if is_transposed is None:
            unknown.append(f"{of_candidate.name} is {list(of_candidate.shape)}: {why}.")
        elif is_transposed:
            found[of_candidate.name] = TRANSPOSE, f"{list(of_candidate.shape)}, {why}"
            reasons += _known_reason(of_candidate, known)
    rules = list(_grouped(found, [of_candidate.name for _, of_candidate in pairs]))
    return DraftedLayouts(rules, list(dict.fromkeys(reasons)), unknown, _shown(pairs, conventions))


class DraftedLayouts(NamedTuple):
    """The rules, each with what shows it; what is known of frameworks; and what no rule was found for, in sentences."""

    rules: list[tuple[LayoutRule, str]]
    reasons: list[str]
    unknown: list[str]
    shown: frozenset[str]  # tensors whose kind shows whether it is transposed


ReadMeasured = Callable[[OwnTensor, OwnTensor], tuple[Measured, Measured]]
"""Reads what is known of the values of a pair."""

_Kind = tuple[str, str]


def _kind(tensor: OwnTensor) -> _Kind:
    """What has one layout throughout a model: a parameter of one name in modules of one class."""
    return tensor.type, last_part(tensor.name)


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1] > 1


def _conventions(pairs: TensorPairs, found: Dictionary[str, object]) -> dict[_Kind, bool]:
    """Whether parameters of a kind are transposed, where others of it that are not square show it, all alike."""
    shown: dict[_Kind, set[bool]] = defaultdict(set)
    for _, of_candidate in pairs:
        if len(of_candidate.shape) == 2 and not _is_square(of_candidate.shape) and of_candidate.type:
            shown[_kind(of_candidate)].add(of_candidate.name in found)
    return {kind: next(iter(answers)) for kind, answers in shown.items() if len(answers) == 1}


def _shown(pairs: TensorPairs, conventions: Dictionary[_Kind, bool]) -> frozenset[str]:
    return frozenset(of_candidate.name for _, of_candidate in pairs if _kind(of_candidate) in conventions)


def _known_reason(tensor: OwnTensor, known: Equivalents | None) -> list[str]:
    """Why frameworks store a parameter transposed, where that is known of it."""
    why = known.is_transposed(*_kind(tensor)) if known is not None else ""
    return [why] if why else []


def _of_square(
    reference: Measured,
    candidate: Measured,
    tensor: OwnTensor,
    conventions: Dictionary[_Kind, bool],
    known: Equivalents | None,
) -> tuple[bool | None, str]:
    """Whether a square weight is transposed, None where nothing shows it; and why."""
    if reference.has_bits_of(candidate):
        is_usual = conventions.get(_kind(tensor), bool(_known_reason(tensor, known)))
        return is_usual, f"as others of {tensor.type}, though it has the reference's bits: was it loaded as it is?"
    if reference.has_elements_of(candidate):
        return True, "with the reference's statistics and other bits"
    if _kind(tensor) in conventions:
        return conventions[_kind(tensor)], f"as others of {tensor.type}"
    if _known_reason(tensor, known):
        return True, f"as every {tensor.type}"
    return (False, "") if known is None else (None, "its shape does not show whether it is transposed")


def _grouped(found: Dictionary[str, tuple[Layout, str]], names: list[str]) -> Iterator[tuple[LayoutRule, str]]:
    """One expression for names that differ only in their numbers, where all of them have the same rule."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\b\d+\b", "#", name)].append(name)
    for pattern, members in groups.items():
        rules = [found[name][0] for name in members if name in found]
        if len(members) > 1 and len(rules) == len(members) and len(set(rules)) == 1:
            expression = re.escape(pattern).replace(r"\#", "#").replace("#", r"\d+")
            why = found[members[0]][1]
            yield LayoutRule(expression, rules[0]), f"{len(members)} of them, {members[0]}: {why}"
        else:
            yield from (
                (LayoutRule(_listed(name), found[name][0]), found[name][1]) for name in members if name in found
            )


def _listed(name: str) -> str:
    """A name as it is, or with what an expression needs escaped where it would not be one."""
    try:
        re.compile(name)
    except re.error:
        return re.escape(name)
    return name
