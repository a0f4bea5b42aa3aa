"""Which call is which when one run has more of them, and when names say nothing."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from astray.comparison.comparison import compare


def program(builder, *calls: str, kind: str = "function", scale: float = 1.0) -> None:
    """Each call is `site` or `site:size`; calls of one site are numbered, as capture does."""
    numbers: dict[str, int] = {}
    for place, call in enumerate(calls):
        site, _, size = call.partition(":")
        number = numbers[site] = numbers.get(site, -1) + 1
        seq = builder.call(site, site.rpartition("/")[2], kind=kind, call=number)
        builder.tensor(seq, "output", "out", np.full(int(size or 4), scale * (place + 1.0)))


def paired(comparison) -> list[tuple[int, int]]:
    return list(
        zip(
            comparison.pairs.numbers("row_reference").tolist(),
            comparison.pairs.numbers("row_candidate").tolist(),
            strict=True,
        )
    )


def test_an_additional_function_call_does_not_shift_those_behind_it(runs):
    one, other = runs.Builder(), runs.Builder()
    program(one, "a/softmax", "a/matmul", "a/add", "a/matmul")
    program(other, "a/matmul", "a/relu", "a/softmax", "a/matmul", "a/add", "a/matmul", scale=2.0)
    assert paired(compare(one.run, other.run)) == [(-1, 0), (-1, 1), (0, 2), (1, 3), (2, 4), (3, 5)]


def test_as_many_calls_in_another_order_are_paired_by_their_neighbours_and_shapes(runs):
    """Attention as three functions, and as one: the second transpose of each is another one."""
    one, other = runs.Builder(), runs.Builder()
    program(one, "a/split", "a/transpose:8", "a/transpose:9", "a/bmm:9", "a/softmax:9", "a/transpose:12", "a/view")
    program(other, "a/split", "a/transpose:8", "a/attention:12", "a/transpose:12", "a/view", "a/transpose:99")
    found = compare(one.run, other.run)
    assert [pair for pair in paired(found) if min(pair) >= 0] == [(0, 0), (1, 1), (5, 3), (6, 4)]


def test_a_shape_that_is_wrong_between_calls_that_are_right_is_a_pair(runs):
    one, other = runs.Builder(), runs.Builder()
    program(one, "a/split", "a/mask:8", "a/add")
    program(other, "a/relu", "a/split", "a/mask:9", "a/add")
    assert paired(compare(one.run, other.run)) == [(-1, 0), (0, 1), (1, 2), (2, 3)]


def test_other_modules_and_modules_themselves_are_paired_by_number(runs):
    one, other = runs.Builder(), runs.Builder()
    program(one, "a/matmul", "b/matmul")
    program(other, "a/matmul", "a/matmul:7", "b/matmul")
    assert paired(compare(one.run, other.run)) == [(0, 0), (-1, 1), (1, 2)]
    one, other = runs.Builder(), runs.Builder()
    program(one, "a", "b", kind="module")
    program(other, "a:9", "a", "b", kind="module")
    assert paired(compare(one.run, other.run)) == [(0, 0), (-1, 1), (1, 2)]


def test_in_order_whatever_the_names(runs):
    one, other = runs.Builder(), runs.Builder()
    program(one, "h.0/linear:8", "h.0/gelu:8", "h.0/linear", "/cross_entropy:1")
    program(other, "net.3/linear:8", "net.3/dropout:8", "net.4/gelu:8", "net.5/linear", "/cross_entropy:1")
    assert compare(one.run, other.run).counts["only in reference"] == 3
    assert paired(compare(one.run, other.run, by="order")) == [(0, 0), (-1, 1), (1, 2), (2, 3), (3, 4)]


def test_in_order_no_step_phase_or_kind_is_crossed(runs):
    one, other = runs.Builder(), runs.Builder()
    for builder, names in ((one, "ab"), (other, "xy")):
        for step in (0, 1):
            for phase in ("forward", "backward"):
                for name in names[: 1 + step]:
                    seq = builder.call(name, "Linear", step=step, phase=phase)
                    builder.tensor(seq, "output", "out", np.ones(3))
    found = compare(one.run, other.run, by="order")
    assert found.same
    assert [found.pairs[name][2] for name in ("step", "phase", "site")] == [1, "forward", "a"]
    other.call("z", "Linear", kind="op")
    other.tensor(6, "output", "out", np.ones(3))
    assert compare(one.run, other.run, by="order").counts["only in candidate"] == 1


def test_only_some_ranks_sites_and_steps(runs):
    one, other = runs.Builder(world_size=2), runs.Builder(world_size=2)
    for builder, off in ((one, 0), (other, 3)):
        for rank in (0, 1):
            for step in (0, 1):
                for site in ("h.0", "h.1"):
                    seq = builder.rank(rank).call(site, step=step + off)
                    builder.rank(rank).tensor(seq, "output", "out", np.full(2, rank + step + off * 0.5))
    assert not compare(one.run, other.run, offset=-3).same
    found = compare(one.run, other.run, offset=-3, ranks=1, sites=r"1$", steps="1")
    assert [found.pairs[name].tolist() for name in ("rank", "step")] == [[1], [1]]
    assert found.pairs["site"][0] == "h.1"
    assert "candidate 0–1" not in " ".join(found.problems)


@pytest.mark.parametrize(
    ("shapes", "verdicts"),
    [
        ("judged", {"shape": 2}),
        ("same", {"only in reference": 2, "only in candidate": 2}),
        ("loose", {"identical": 1, "shape": 1}),
    ],
)
@pytest.mark.parametrize("keep", ["stats,fingerprint", "stats,tensors"])
def test_shapes(runs, shapes, verdicts, keep):
    one, other = runs.Builder(keep=keep), runs.Builder(keep=keep)
    for builder, forms in ((one, [(4, 1, 3), (12,)]), (other, [(4, 3), (3, 4)])):
        for place, form in enumerate(forms):
            builder.tensor(builder.call(f"m{place}"), "output", "out", np.arange(12.0).reshape(form))
    builder = [one, other]
    for side in builder:
        side.tensor(side.call("same"), "output", "out", np.ones(2))
    found = compare(one.run, other.run, shapes=shapes)
    expected = {"identical": 1} | {name: count + (name == "identical") for name, count in verdicts.items()}
    assert {name: count for name, count in found.counts.items() if count} == expected


# ---- calls of a module in another order ------------------------------------------------------------------------------


def rotary(runs: Any, *kinds: str | None, off: float = 0.0) -> Any:
    """A module that is called once for each kind of layer, with the kind as a plain argument."""
    builder = runs.Builder()
    sizes = {"full": 1.0, "sliding": 2.0, None: 3.0}
    for number, kind in enumerate(kinds):
        arguments = None if kind is None else json.dumps({"args": ["<tensor>", kind]})
        seq = builder.call("rotary", call=number, args=arguments)
        builder.tensor(seq, "input", "0", np.ones(8, np.float32))
        builder.tensor(seq, "output", "out", np.full(8, sizes[kind] * (1 + off * (kind == "full")), np.float32))
    return builder.run


@pytest.mark.parametrize(
    ("candidate", "agrees"),
    [
        (("full", "sliding"), True),
        (("sliding", "full"), True),  # as a set of names has them in another process
        (("sliding", "sliding"), False),  # arguments that do not tell one call from another
        (("sliding",), False),
    ],
)
def test_calls_of_a_module_are_told_by_their_arguments(runs: Any, candidate: tuple[str, ...], agrees: bool) -> None:
    reference = rotary(runs, "full", "sliding")
    assert (compare(reference, rotary(runs, *candidate)).first is None) == agrees
    if agrees:
        first = compare(reference, rotary(runs, *candidate, off=0.5)).first
        assert (first.site, first.call) == ("rotary", 0)


def test_a_backward_call_belongs_to_its_forward_call_whatever_its_order(runs):
    """Gradients of three branches arrive in another order; one run has a call more in each branch."""
    random = np.random.default_rng(0)
    given = [random.normal(size=4) for _ in range(3)]
    sent = [random.normal(size=4) for _ in range(3)]

    def branches(order: tuple[int, ...], extra: bool) -> Any:
        builder = runs.Builder()
        forward = []
        for number in range(3):
            if extra:
                view = builder.call("a/view", "view", kind="function", call=number)
                builder.tensor(view, "output", "out", given[number])
            forward.append(builder.call("a/turn", "turn", kind="function", call=number))
            builder.tensor(forward[-1], "output", "out", given[number])
        for number in order:
            back = builder.call(
                "a/turn", "turn", kind="function", call=number, phase="backward", parent=forward[number]
            )
            builder.tensor(back, "output", "0", sent[number])
        return builder.run

    diff = compare(branches((2, 0, 1), False), branches((0, 1, 2), True))
    assert (diff.counts["identical"], diff.counts["diverged"]) == (6, 0)


def test_calls_that_one_run_makes_in_groups_are_paired_by_number(runs):
    """One run reshapes and turns each of three tensors, the other reshapes all of them first. Their sizes tell."""
    random = np.random.default_rng(3)
    values = [random.normal(size=64) * scale for scale in (1.0, 1.003, 1.006)]

    def calls(names: list[tuple[str, int]], extra: bool) -> Any:
        builder = runs.Builder()
        for name, number in names:
            call = builder.call(f"a/{name}", name, kind="function", call=number)
            builder.tensor(call, "output", "out", values[number])
        if extra:
            builder.tensor(builder.call("a/softmax", "softmax", kind="function"), "output", "out", np.ones(3))
        return builder.run

    interleaved = [(name, number) for number in range(3) for name in ("reshape", "turn")]
    grouped = [(name, number) for name in ("reshape", "turn") for number in range(3)]
    diff = compare(calls(interleaved, False), calls(grouped, True))
    assert (diff.counts["identical"], diff.counts["only in candidate"], len(diff.pairs)) == (6, 1, 7)
