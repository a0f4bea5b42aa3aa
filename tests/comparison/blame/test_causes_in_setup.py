"""Which differences could explain a wrong result, and in which order."""

from __future__ import annotations

from typing import Any

from astray.comparison.blame.setup_causes import causes_of
from astray.comparison.setup.setup_difference import SetupDifference


def difference(kind: Any, *sites: str, name: str = "eps", step: int | None = None, **more: Any) -> SetupDifference:
    fields: dict[str, Any] = {"expected_effect": "changes results", "subject": kind, "sentence": name, **more}
    return SetupDifference(
        0, step, site=sites[0] if sites else "", name=name, reference=1, candidate=2, kind=kind, sites=sites, **fields
    )


NORM = difference("module", "h.3.norm")
ATTENTION = difference("module", "h.3.attn", name="scale")
BLOCK = difference("module", "h.3", name="dropout")
ROOT = difference("module", "<root>", name="rope_theta")
TF32 = difference("precision", name="matmul", expected_effect="changes rounding")
SDPA = difference("kernel", "<root>", name="_attn_implementation", expected_effect="changes rounding")
THREADS = difference("kernel", name="interop_threads", expected_effect="none known")
LR = difference("optimizer", "h.3.fc.weight", "h.3.norm.weight", name="lr")
CAST = difference("data type", "h.3.fc.weight", "h.9.fc.weight", name="dtype", expected_effect="changes rounding")
SOFTMAX = difference("argument", "h.3.attn/softmax", name="dim")

ALL = (LR, NORM, ATTENTION, BLOCK, ROOT, SOFTMAX, CAST, TF32, SDPA, THREADS)


def names(found: list[SetupDifference]) -> list[str]:
    return [one.name for one in found]


def test_the_sites_own_come_first_then_what_is_around_it_then_what_holds_everywhere() -> None:
    found = causes_of(ALL, site="h.3.norm", phase="forward", step=0)
    assert names(found) == ["eps", "dropout", "rope_theta", "matmul", "_attn_implementation"]


def test_a_function_has_those_of_its_module_too() -> None:
    found = causes_of(ALL, site="h.3.attn/softmax", phase="forward", step=0)
    assert names(found)[:2] == ["scale", "dim"]
    assert "eps" not in names(found)


def test_a_module_has_those_of_its_own_parameters_and_of_what_is_inside_it() -> None:
    assert names(causes_of(ALL, site="h.3.fc", phase="backward", step=0))[0] == "dtype"
    assert names(causes_of(ALL, site="h.3", phase="forward", step=0))[:2] == ["dropout", "eps"]


def test_nothing_explains_what_came_before_it() -> None:
    late = difference("module", "h.3.norm", step=5)
    assert causes_of([late], site="h.3.norm", phase="forward", step=4) == []
    assert causes_of([late], site="h.3.norm", phase="forward", step=5) == [late]


def test_an_optimizer_explains_updates_and_the_weights_that_it_has_updated() -> None:
    update = causes_of(ALL, site="AdamW", phase="update", step=0, parameter="h.3.fc.weight")
    assert names(update)[0] == "lr"
    assert causes_of([LR], site="AdamW", phase="update", step=0, parameter="h.0.fc.weight") == []
    assert causes_of([LR], site="h.3.fc", phase="forward", step=1, parameter="h.3.fc.weight") == [LR]
    assert causes_of([LR], site="h.3.fc", phase="forward", step=0, parameter="h.3.fc.weight") == []  # no update yet
    assert causes_of([LR], site="h.3.fc", phase="forward", step=1) == []


def test_an_optimizer_of_another_class_is_that_of_every_parameter() -> None:
    other = difference("optimizer", name="class")
    assert causes_of([other], site="AdamW", phase="update", step=0, parameter="h.0.fc.weight") == [other]
    assert causes_of([other], site="h.0.fc", phase="forward", step=3, parameter="h.0.fc.weight") == [other]


def test_what_has_no_known_effect_explains_nothing() -> None:
    assert causes_of([THREADS], site="h.3", phase="forward", step=0) == []
