"""What the kept values of a row tell: compared where both sides have them, or of one side alone; and why not more.

Reads `elements`, feeds `detail`. Whatever keeps two tensors from being laid side by side is a sentence.
"""

from __future__ import annotations

from typing import NamedTuple

from astray.errors import RunError
from astray.formatting import figures
from astray.records import Statistics
from astray.web.contrasting import Contrasted, contrast, describe
from astray.web.elements import Elements
from astray.web.views import Tensor

_SIDES = ("reference", "candidate")
_WITHOUT_VALUES = "Record with keep='tensors' to see histograms, the worst elements and where in the tensor they are."


class Told(NamedTuple):
    """What was kept of a row (all, a slice, a sample, or what else is known), what that tells, and what is lacking."""

    kept: str
    found: Contrasted | None
    lacking: str | None


def values_of(one: Tensor | None, other: Tensor | None, alone: bool = False) -> Told:
    """What the values of a row tell. `alone`: there is only one run, so that nothing is missing on the other side."""
    try:
        sides = [None if side is None else Elements.read(side.rank, side.row) for side in (one, other)]
        return _compared(sides[0], sides[1], (one, other), alone)
    except RunError as error:
        return Told(_recorded(one or other), None, str(error))


def _compared(
    left: Elements | None, right: Elements | None, tensors: tuple[Tensor | None, Tensor | None], alone: bool
) -> Told:
    if left is not None and right is not None:
        common = left.kept.both(right.kept)
        one, other = left.narrowed(common), right.narrowed(common)
        if one.size == other.size and one.complex == other.complex and one.kept == other.kept:
            return Told(_kept(one), contrast(one, other), _partial(one))
        return Told(_kept(left), _one_sided(left, 0), _apart(left, right))
    there = left or right
    if there is None:
        return Told(_recorded(tensors[0] or tensors[1]), None, f"No values were kept. {_WITHOUT_VALUES}")
    side = 0 if left is not None else 1
    if alone:
        return Told(_kept(there), _one_sided(there, side), _partial(there))
    missing = _SIDES[1 - side]
    why = f"The {missing} has no such tensor." if tensors[1 - side] is None else f"The {missing} kept no values."
    return Told(_kept(there), _one_sided(there, side), f"{why} What is shown is the {_SIDES[side]} alone.")


def _one_sided(values: Elements, side: int) -> Contrasted:
    """One side alone, in the place of its side."""
    found = describe(values)
    if side == 0:
        return found
    swapped = {"a": "b", "b": "a"}
    worst = [{swapped.get(name, name): value for name, value in one.items()} for one in found.worst]
    shown = None
    if found.histograms is not None:
        shown = {swapped.get(name, name): value for name, value in found.histograms.items()}
        shown["nonfinite"] = {swapped.get(name, name): value for name, value in shown["nonfinite"].items()}
    return Contrasted(shown, worst, found.heat)


def _kept(values: Elements) -> str:
    return "sample" if values.kept.sampled >= 0 else "whole" if values.kept.part is None else "slice"


def _partial(values: Elements) -> str | None:
    if values.kept.sampled >= 0:
        return f"{values.kept.sampled:,} sampled values of each were kept: they have no map, and others may be worse."
    return None if values.kept.part is None else f"Only the slice [{values.kept.part}] was kept and is shown."


def _apart(left: Elements, right: Elements) -> str:
    """Why the values of two tensors cannot be laid side by side."""
    if left.tensor != right.tensor:
        shapes = " against ".join(figures.shape(side.tensor) for side in (left, right))
        return f"The shapes differ, {shapes}: no element has a partner. What is shown is the reference alone."
    if left.complex != right.complex:
        return f"{left.dtype} against {right.dtype}: no number has a partner. What is shown is the reference alone."
    return "Each run kept other values of this tensor. What is shown is the reference alone."


def _recorded(tensor: Tensor | None) -> str:
    """What is known of a tensor without values."""
    cells = {} if tensor is None else tensor.cells()
    if cells and Statistics.of(cells) is not None:
        return "statistics"
    return "fingerprint" if cells.get("fingerprint") is not None else "nothing"
