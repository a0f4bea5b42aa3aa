"""`RecordingSelection`, `Scope` and `Quota`: the selected sites, the calls between two sites, and the limits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from astray.capture.selection import Quota, RecordingSelection, Scope
from astray.capture.settings import Settings

SITES: list[tuple[str, str, Any]] = [
    ("<root>", "GPT", "module"),
    ("h.0.attn", "Attention", "module"),
    ("h.0.attn.proj", "Linear", "module"),
    ("h.0.attn/softmax", "torch.nn.functional.softmax", "function"),
    ("h.0.attn/_softmax", "aten._softmax.default", "op"),
    ("h.1.mlp", "MLP", "module"),
    ("h.1.mlp.proj", "Linear", "module"),
    ("h.1.mlp/add", "aten::add.Tensor", "op"),
    ("h.1.mlp.proj.weight", "Parameter", "parameter"),
    ("AdamW", "AdamW", "optimizer"),
    ("/all_reduce", "torch.distributed.all_reduce", "collective"),
    ("anything", "saved", "custom"),
]


def wanted(**settings: Any) -> list[str]:
    selection = RecordingSelection(Settings.check(**settings))
    return [site for site, type, kind in SITES if selection.wants_site(site, type, kind)]


def test_everything_is_wanted_when_nothing_is_asked() -> None:
    assert wanted() == [site for site, _, _ in SITES]


@pytest.mark.parametrize(
    ("settings", "sites"),
    [
        ({"match": "attn"}, ["h.0.attn", "h.0.attn.proj", "h.0.attn/softmax", "h.0.attn/_softmax"]),
        ({"match": [r"attn$", "mlp$"]}, ["h.0.attn", "h.1.mlp"]),
        ({"match": "^proj"}, []),
        ({"match": "proj", "ignore": r"^h\.0"}, ["h.1.mlp.proj", "h.1.mlp.proj.weight"]),
        ({"ignore": ["h", "root", "reduce"]}, ["AdamW"]),
        ({"classes": "Linear"}, ["h.0.attn.proj", "h.1.mlp.proj", "h.1.mlp.proj.weight", "AdamW"]),
        ({"classes": "Linea"}, ["h.1.mlp.proj.weight", "AdamW"]),
        ({"classes": "torch.nn.Linear", "match": r"0"}, ["h.0.attn.proj"]),
        ({"classes": "softmax", "match": "attn"}, ["h.0.attn/softmax"]),
        ({"classes": "torch.nn.functional.softmax", "match": "attn"}, ["h.0.attn/softmax"]),
        ({"classes": "torch.softmax", "match": "attn"}, []),
        ({"classes": "_softmax,add", "match": "/"}, ["h.0.attn/_softmax", "h.1.mlp/add"]),
        ({"classes": "aten.add", "match": "/"}, ["h.1.mlp/add"]),
        ({"classes": "add.Tensor", "match": "/"}, ["h.1.mlp/add"]),
        ({"classes": "aten::add.Tensor", "match": "/"}, ["h.1.mlp/add"]),
        ({"classes": "Tensor,default", "match": "/"}, []),
        ({"classes": "all_reduce", "match": "/"}, ["/all_reduce"]),
    ],
)
def test_sites_by_name_and_class(settings: dict[str, Any], sites: list[str]) -> None:
    assert wanted(**settings) == [*sites, "anything"]  # what is saved by hand is always wanted


def test_phases_roles_and_scope_are_passed_on() -> None:
    selection = RecordingSelection(Settings.check(phases="backward", roles=["output", "gradient"]))
    assert (selection.phases, selection.roles) == ({"backward"}, {"output", "gradient"})


def inside(scope: Scope, *events: str) -> str:
    """The calls that belong to the scope. An event is `a(` for the start of a call, `)a` for its end."""
    found = []
    for event in events:
        if event.endswith("("):
            scope.on_call_start(event[:-1])
            found += [event[:-1]] * scope.is_open
        else:
            scope.on_call_end(event[1:])
    return " ".join(found)


def test_a_scope_includes_both_its_sites_and_what_is_between_and_inside() -> None:
    calls = [
        "root(",
        "a(",
        ")a",
        "b(",
        "b.0(",
        ")b.0",
        ")b",
        "c(",
        ")c",
        "d(",
        "d.0(",
        ")d.0",
        ")d",
        "e(",
        ")e",
        ")root",
    ]
    assert inside(Scope("b", "d"), *calls) == "b b.0 c d d.0"


def test_a_scope_opens_again_whenever_its_first_site_starts() -> None:
    scope = Scope("a", "b")
    once = ["a(", ")a", "b(", ")b", "c(", ")c"]
    assert inside(scope, *once, *once) == "a b a b"
    scope.reset()
    assert not scope.is_open
    assert inside(scope, *once) == "a b"


def test_a_scope_whose_end_never_comes_stays_open_until_the_next_micro_step() -> None:
    scope = Scope("b", "nowhere")
    assert inside(scope, "a(", ")a", "b(", ")b", "c(", ")c") == "b c"
    scope.reset()
    assert inside(scope, "a(", ")a", "c(", ")c") == ""


def test_a_scope_whose_first_site_comes_again_before_its_end_goes_on() -> None:
    assert inside(Scope("a", "b"), "a(", ")a", "c(", ")c", "a(", ")a", "b(", ")b", "c(", ")c") == "a c a b"


def test_a_scope_may_end_inside_its_first_site() -> None:
    assert inside(Scope("a", "a.1"), "a(", "a.0(", ")a.0", "a.1(", ")a.1", "a.2(", ")a.2", ")a", "b(") == "a a.0 a.1"


def test_a_scope_may_be_one_site() -> None:
    assert inside(Scope("a", "a"), "b(", ")b", "a(", "a.0(", ")a.0", ")a", "c(", ")c") == "a a.0"


def test_an_end_before_the_beginning_closes_nothing() -> None:
    assert inside(Scope("b", "a"), "a(", ")a", "b(", ")b", "c(", ")c") == "b c"


def test_sites_of_a_scope_are_compared_exactly() -> None:
    assert inside(Scope("h.1", "h.1"), "h.10(", ")h.10", "xh.1(", ")xh.1") == ""


def test_without_limits_everything_goes_through() -> None:
    quota = Quota(Settings())
    assert all(quota.row() and quota.values(1 << 40) for _ in range(1000))
    assert quota.left_out() == []


def test_limits_on_tensors() -> None:
    quota = Quota(Settings.check(max_tensors=5, max_tensors_per_step=3))
    assert [quota.row() for _ in range(4)] == [True, True, True, False]
    quota.next_step()
    assert [quota.row() for _ in range(4)] == [True, True, False, False]
    quota.next_step()
    assert not quota.row()
    assert quota.left_out() == [
        ("tensors", "beyond max_tensors_per_step=3", 1),
        ("tensors", "beyond max_tensors=5", 3),
    ]


def test_a_budget_of_bytes_takes_what_fits() -> None:
    quota = Quota(Settings.check(max_bytes=1000))
    assert [quota.values(nbytes) for nbytes in (600, 500, 400, 1, 0)] == [True, False, True, False, True]
    quota.next_step()  # the budget is for the whole recording
    assert not quota.values(1)
    assert quota.left_out() == [("the values of tensors", "beyond max_bytes=1,000", 3)]


def test_other_limits_count_what_came_before() -> None:
    quota = Quota(Settings())
    assert all(quota.row() and quota.values(10) for _ in range(4))
    quota.change(Settings.check(max_tensors=5, max_bytes=45))
    assert [quota.row(), quota.row(), quota.values(5), quota.values(1)] == [True, False, True, False]
    quota.change(Settings.check(max_tensors=6))
    assert [quota.row(), quota.row(), quota.values(1 << 30)] == [True, False, True]
    assert quota.left_out() == [
        ("tensors", "beyond max_tensors=5", 1),
        ("the values of tensors", "beyond max_bytes=45", 1),
        ("tensors", "beyond max_tensors=6", 1),
    ]


def test_threads_share_one_quota() -> None:
    quota = Quota(Settings.check(max_tensors=5000))
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(sum(quota.row() for _ in range(2000)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 5000
    assert quota.left_out() == [("tensors", "beyond max_tensors=5,000", 3000)]
