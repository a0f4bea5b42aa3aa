"""Collectives as calls: which functions they are, and how those are recorded whose results cannot be read at once.

Two processes that really talk are in tests/integration/distributed; here one process talks to itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import astray
from astray.capture.pytorch.calls.collectives import Collective, describe, describe_op, unseen_collectives
from recorded_rows import rows

pytestmark = pytest.mark.skipif(
    bool(unseen_collectives()), reason="this version of torch hides some collectives from modes"
)


class Talking(nn.Module):
    """A module that applies a function to its input."""

    def __init__(self, talk: Any) -> None:
        super().__init__()
        self.talk = talk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.talk(x)
        return x


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def record(path: Path, talk: Any, level: str = "function") -> astray.Run:
    model = Talking(talk)
    with astray.record(path, model, level=level, keep="tensors") as recorder:
        model(torch.arange(4.0))
        recorder.step()
    return astray.open(path)


def missed(run: astray.Run) -> dict[str, str]:
    end = run.ranks[0].end
    assert end is not None
    return {one.what: one.why for one in end.missed}


def test_every_collective_that_tells_a_mode_is_known() -> None:
    telling = {
        name
        for name in dist.distributed_c10d.__all__
        if type(func := getattr(dist, name, None)) is FunctionType
        and "has_torch_function" in inspect.unwrap(func).__code__.co_names
    }
    assert {"all_reduce", "broadcast", "all_to_all", "isend"} <= telling
    assert {name for name in telling if not isinstance(describe(getattr(dist, name)), Collective)} == set()
    assert unseen_collectives() == []


def test_other_functions_are_no_collectives() -> None:
    assert describe(torch.relu) is describe(dist.get_rank) is describe(torch.ops.aten.relu) is None
    assert describe_op(torch.ops.aten.relu.default) is None


def test_a_collective_that_torch_has_renamed_keeps_its_site() -> None:
    names = [describe(func).name for func in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor)]  # type: ignore[union-attr]
    assert names == ["all_gather_single", "reduce_scatter_single"]


class Endless(dist.Work):
    """A `Work` that never completes."""

    def is_completed(self) -> bool:
        return False


def endless(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> dist.Work:
    """An all_reduce in which no other rank takes part."""
    if torch.overrides.has_torch_function((tensor,)):
        return torch.overrides.handle_torch_function(endless, (tensor,), tensor, group=group, async_op=async_op)
    return Endless()


endless.__module__, endless.__name__ = "torch.distributed.distributed_c10d", "all_reduce"


@pytest.mark.usefixtures("alone")
def test_a_result_that_never_comes_is_said_to_be_missing(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda x: endless(x, async_op=True))
    assert missed(run) == {"the output of <root>/all_reduce": "it was still under way when the recording ended"}
    assert [row["role"] for row in rows(run, kind="collective")] == ["input"]


@pytest.mark.usefixtures("alone")
def test_a_result_nobody_waits_for_is_recorded_once_it_is_there(tmp_path: Path) -> None:
    def talk(x: torch.Tensor) -> None:
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        x.mul_(2)

    run = record(tmp_path / "run", talk)
    assert missed(run) == {}
    (row,) = rows(run, kind="collective", role="output")
    assert run.values(0, row["row"]).tolist() == [0, 1, 2, 3]
    (doubled,) = rows(run, site="<root>/mul_", role="output")
    assert run.values(0, doubled["row"]).tolist() == [0, 2, 4, 6]


@pytest.mark.usefixtures("alone")
def test_collectives_put_off_to_be_made_together_say_so(tmp_path: Path) -> None:
    def talk(x: torch.Tensor) -> None:
        with dist._coalescing_manager():
            dist.all_reduce(x)

    run = record(tmp_path / "run", talk)
    assert missed(run) == {"the output of <root>/all_reduce": "it is carried out later, together with others"}


@pytest.mark.usefixtures("alone")
def test_what_a_collective_has_written_is_measured_again(tmp_path: Path) -> None:
    """Gloo writes without changing the version counter of the tensor."""

    def talk(x: torch.Tensor) -> None:
        y = torch.zeros(4)
        torch.sin(y)
        dist.scatter(y, [x], src=0)
        torch.cos(y)

    run = record(tmp_path / "run", talk)
    (before,), (after,) = (rows(run, site=f"<root>/{name}", role="input") for name in ("sin", "cos"))
    assert run.values(0, before["row"]).tolist() == [0, 0, 0, 0]
    assert run.values(0, after["row"]).tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("level", "site"), [("function", "<root>/functional."), ("op", "<root>/_c10d_functional.")])
def test_functional_collectives_have_their_result_where_it_is_waited_for(level: str, site: str, tmp_path: Path) -> None:
    def talk(x: torch.Tensor) -> None:
        pending = functional.all_reduce(x, "sum", dist.group.WORLD)
        functional.wait_tensor(pending.elem)
        torch.sin(pending)

    run = record(tmp_path / "run", talk, level)
    (why,) = set(missed(run).values())
    assert why == "it is under way when the operator returns; wait_tensor has it"
    assert [row["role"] for row in rows(run, site=f"{site}all_reduce")] == ["input"]
    (waited,) = rows(run, site=f"{site}wait_tensor")
    assert (waited["role"], run.values(0, waited["row"]).tolist()) == ("output", [0, 1, 2, 3])


@pytest.mark.usefixtures("alone")
def test_operators_behind_the_functions_leave_their_results_to_the_functions(tmp_path: Path) -> None:
    run = record(tmp_path / "run", lambda x: dist.all_gather([torch.empty(4)], x), "op")
    assert [(row["role"], row["path"]) for row in rows(run, site="<root>/c10d.allgather_")] == [("input", "1.0")]
    assert missed(run) == {
        "the output of c10d.allgather_.default": "it is under way when the operator returns; the function level has it"
    }
