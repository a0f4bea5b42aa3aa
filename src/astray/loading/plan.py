"""Which weight goes where, and how it is laid out: by a mapping, or by what names, shapes and frameworks show.

Reads the weights of a source and the tensors of a model, feeds `load`. Everything that is missing or does not fit is
found here, so that nothing is written before all of it is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from typing import NamedTuple

from astray.comparison.pair.checkpoints import find_renaming
from astray.comparison.pair.drafted_tensors import drafted_layouts
from astray.comparison.pair.framework_names import ONLY_IN, Equivalents, equivalents
from astray.comparison.pair.layouts import Layout
from astray.comparison.pair.mapping import Mapping
from astray.comparison.pair.mapping_draft import TensorSignature, pair_renamed
from astray.comparison.pair.own_tensors import Measured, OwnTensor
from astray.comparison.pair.renaming import last_part
from astray.errors import StateError
from astray.stats.dtypes import DTYPES
from astray.wording import counted

_MOST = 8


class Assignment(NamedTuple):
    """One tensor of the model and what is written into it.

    is_from_model: whether the layout is said of the model's tensor, as in a mapping whose candidate the model is; else
    it is said of the source's. how: how the two were paired.
    """

    target: OwnTensor
    source: OwnTensor
    layout: Layout | None
    is_from_model: bool = True
    how: str = "by name"

    @property
    def laid_out(self) -> OwnTensor:
        """The tensor that the layout is said of."""
        return self.target if self.is_from_model else self.source


class Plan(NamedTuple):
    """What is written, what of the model stays as it is, and what of the source is not used."""

    assignments: list[Assignment]
    kept: list[str]
    unused: list[str]


def plan_by_mapping(source: Dictionary[str, OwnTensor], model: Dictionary[str, OwnTensor], mapping: Mapping) -> Plan:
    """By a mapping between the two, in whichever direction it was made."""
    forward = {name: mapping.tensor(name) for name in model}
    backward = {mapping.tensor(name): name for name in source}
    hits = sum(name in source for name in forward.values()), sum(name in model for name in backward)
    if hits[0] >= hits[1]:
        pairs = {name: old for name, old in forward.items() if old in source}
        alone = mapping.only_in_candidate
    else:
        pairs = {name: old for name, old in backward.items() if name in model}
        alone = mapping.only_in_reference
    is_from_model = hits[0] >= hits[1]
    assignments = []
    for name, old in pairs.items():
        place = mapping.layout_rule(name if is_from_model else old)
        layout = None if place is None else mapping.layouts[place].layout
        assignments.append(Assignment(model[name], source[old], layout, is_from_model, "by the mapping"))
    return _completed(assignments, source, model, alone)


def plan_by_looks(
    source: Dictionary[str, OwnTensor],
    model: Dictionary[str, OwnTensor],
    frameworks: tuple[str | None, str],
) -> Plan:
    """By names, by what frameworks call the same, by names without wrappers, and what is left by shapes.

    frameworks: of the source and of the model. Raises StateError where nothing shows how a weight is laid out.
    """
    known = equivalents(*frameworks)
    pairs = dict(_pairs(source, model, known))
    tensors = [(source[old], model[name]) for name, (old, _) in pairs.items()]
    drafted = drafted_layouts(tensors, lambda *_: (_NOT_MEASURED, _NOT_MEASURED), known)
    open_squares = [sentence for sentence in drafted.unknown if "does not show" in sentence]
    if known is None and frameworks[0] is None:
        open_squares += _squares_of_unknown_order(tensors, drafted.shown)
    if open_squares:
        raise StateError(
            f"Nothing shows how {counted(len(open_squares), 'weight')} of the source are laid out: "
            f"{' '.join(open_squares[:_MOST])} Say it in a mapping: load_from(..., map='map.yaml')."
        )
    rules = Mapping(layouts=[rule for rule, _ in drafted.rules])
    assignments = []
    for name, (old, how) in pairs.items():
        place = rules.layout_rule(name)
        layout = None if place is None else rules.layouts[place].layout
        assignments.append(Assignment(model[name], source[old], layout, True, how))
    alone = ONLY_IN.get(frameworks[1], ()) if frameworks[0] != frameworks[1] else ()
    return _completed(assignments, source, model, alone)


_NOT_MEASURED = Measured.nothing()


def _pairs(
    source: Dictionary[str, OwnTensor], model: Dictionary[str, OwnTensor], known: Equivalents | None
) -> Iterator[tuple[str, tuple[str, str]]]:
    """For each tensor of the model that has one, the source's, and how they were paired: the surest way first."""
    free_source, free_model = dict(source), dict(model)

    def take(name: str, old: str, how: str) -> tuple[str, tuple[str, str]]:
        del free_source[old], free_model[name]
        return name, (old, how)

    for name in list(free_model):
        if name in free_source:
            yield take(name, name, "by name")
    for name in list(free_model):
        words = known.tensors(last_part(name)) if known is not None else []
        outer, dot, _ = name.rpartition(".")
        old = next((f"{outer}{dot}{word}" for word in words if f"{outer}{dot}{word}" in free_source), None)
        if old is not None:
            yield take(name, old, "by what the frameworks call them")
    for name, old in find_renaming(list(free_source), list(free_model)).names.items():
        yield take(name, old, "by name without wrappers")
    signatures = [
        [TensorSignature(name, tensor.shape, None) for name, tensor in side.items()]
        for side in (free_source, free_model)
    ]
    for at_source, at_model in pair_renamed(*signatures):
        yield take(signatures[1][at_model].name, signatures[0][at_source].name, "by shape and likeness of names")


def _squares_of_unknown_order(tensors: list[tuple[OwnTensor, OwnTensor]], shown: frozenset[str]) -> list[str]:
    """Square weights of linear layers, where it is not known which framework the source is of."""
    return [
        f"{target.name} is {list(target.shape)}, and it is not known which framework saved {of_source.name}."
        for of_source, target in tensors
        if target.type == "Linear" and len(target.shape) == 2 and target.shape[0] == target.shape[1] > 1
        and target.name not in shown
    ]  # fmt: skip


def _completed(
    assignments: list[Assignment],
    source: Dictionary[str, OwnTensor],
    model: Dictionary[str, OwnTensor],
    alone: Sequence[str],
) -> Plan:
    """With what is left on either side. Raises StateError for everything that is missing or does not fit, at once."""
    given = {assignment.target.name for assignment in assignments}
    rest = [name for name in model if name not in given]
    kept = [name for name in rest if last_part(name) in alone]
    missing = [f"{name} {list(model[name].shape)} is not in the source" for name in rest if name not in kept]
    wrong = [text for assignment in assignments if (text := _why_not(assignment))]
    taken = {assignment.source.name for assignment in assignments}
    unused = [name for name in source if name not in taken]
    if missing or wrong:
        sentences = [*wrong, *missing]
        more = f"; and {len(sentences) - _MOST:,} more" if len(sentences) > _MOST else ""
        listed = ", ".join([*unused[:_MOST], *(["…"] if len(unused) > _MOST else [])])
        left = f" The source also has {listed}." if unused else ""
        raise StateError(
            f"Nothing was loaded: {'; '.join(sentences[:_MOST])}{more}.{left} A mapping says what belongs together and "
            "how it is laid out: load_from(..., map='map.yaml')."
        )
    return Plan(assignments, kept, unused)


def _why_not(assignment: Assignment) -> str:
    """Why a tensor does not fit; empty where it does."""
    target, source = assignment.target, assignment.source
    shapes = target.shape, source.shape
    if assignment.layout is not None:
        laid_out = assignment.laid_out
        try:
            made = assignment.layout.shape(laid_out.shape)
        except ValueError as error:
            return f"the layout of {laid_out.name}, {assignment.layout}, does not fit: {error}"
        shapes = (made, source.shape) if assignment.is_from_model else (target.shape, made)
    if shapes[0] != shapes[1]:
        by = f" (by the layout {assignment.layout})" if assignment.layout is not None else ""
        return f"{target.name} is {list(shapes[0])} and {source.name} is {list(shapes[1])}{by}"
    kinds = [DTYPES[one.dtype].kind if one.dtype in DTYPES else one.dtype for one in (target, source)]
    return "" if kinds[0] == kinds[1] else f"{target.name} is {target.dtype} and {source.name} is {source.dtype}"
