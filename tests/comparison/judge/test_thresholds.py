"""Every number by which a verdict is decided is in one module, with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from astray.comparison.judge import thresholds
from astray.comparison.verdict import MEASURES

FOLDER = Path(thresholds.__file__).parent
PLAIN = {-1, 0, 1, 2, 3, 4, 0.5, 32, 2**32 - 1}
"""Numbers of arrays, planes and formulas: places, counts, halves, squares and the bits of an integer."""


def numbers(file: Path) -> set[float]:
    """The numbers that a module computes with."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {value for value in found if isinstance(value, int | float) and not isinstance(value, bool)}


def test_no_other_module_holds_a_number() -> None:
    enums = {"provenance.py", "calls.py"}  # which number kinds of provenance and planes
    for file in sorted(FOLDER.glob("*.py")):
        if file.name not in {"thresholds.py", *enums}:
            assert numbers(file) <= PLAIN, file.name


def test_each_has_its_reason() -> None:
    body = ast.parse((FOLDER / "thresholds.py").read_text(encoding="utf-8")).body
    for number, node in enumerate(body):
        if isinstance(node, ast.Assign):
            following = next(one for one in body[number:] if not isinstance(one, ast.Assign))
            assert isinstance(following, ast.Expr)
            assert isinstance(following.value, ast.Constant)
            assert len(following.value.value) > 40


def test_each_is_used() -> None:
    used = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.py"))
    for name in vars(thresholds):
        if name.isupper():
            assert re.search(rf"\bt\.{name}\b|= {name}\b|\b{name} \*|/ {name}\b", used), name


def test_the_numbers_of_measures_are_there_for_each_of_them() -> None:
    t = thresholds
    for table in (
        t.SIBLING_GAIN,
        t.DRIFTED_GAIN,
        t.GRADIENT_GAIN,
        t.MIN_SIBLING_GAIN,
        t.OTHER_PRECISION_NOISE_GAIN,
        t.NOISE_GAIN,
        t.MODEL_GAIN,
    ):
        assert tuple(table) == MEASURES
        assert all(number > 0 for number in table.values())


def test_siblings_allow_more_than_a_plain_rounding_and_less_than_anything() -> None:
    for measure in MEASURES:
        assert (
            1
            < thresholds.SIBLING_GAIN[measure] * thresholds.MIN_SIBLING_GAIN[measure]
            <= thresholds.MODEL_GAIN[measure]
        )
        assert (
            1 < thresholds.NOISE_GAIN[measure] * thresholds.MIN_SIBLING_GAIN[measure] <= thresholds.MODEL_GAIN[measure]
        )
