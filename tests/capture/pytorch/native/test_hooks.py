"""torch calls a native hook directly, and through Python while a compiler is active."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import astray
from astray.capture.pytorch import gradients
from astray.capture.pytorch.calls import modules
from recorded_rows import rows

BY_WAY_OF_PYTHON = {"_call_before", "_call_after", "_call_tensor_hook", "_call_node_hook"}


def entered(action: Callable[[], Any]) -> set[str]:
    """The names of our functions that are called."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return names & BY_WAY_OF_PYTHON


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))


def step(layers: nn.Module) -> None:
    layers(torch.ones(2, 2, 3)).sum().backward()


def test_no_python_is_called(tmp_path: Path) -> None:
    layers = model()
    with astray.record(tmp_path / "run", layers, level="module"):
        assert entered(lambda: step(layers)) == set()
    found = {(row["site"], row["phase"]) for row in rows(astray.open(tmp_path / "run"))}
    assert {("1.1", "forward"), ("1.1", "backward"), ("0.weight", "backward")} <= found


def test_it_is_while_something_is_traced_and_then_nothing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = model()
    with astray.record(tmp_path / "run", layers, level="module"):
        result = layers(torch.ones(2, 2, 3)).sum()
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        assert entered(result.backward) == {"_call_tensor_hook", "_call_node_hook"}
        assert entered(lambda: layers(torch.ones(2, 2, 3))) == {"_call_before", "_call_after"}
        monkeypatch.undo()
    assert {row["phase"] for row in rows(astray.open(tmp_path / "run"))} == {"forward"}


def test_it_is_where_dynamo_waits_for_functions_and_the_same_is_seen(tmp_path: Path) -> None:
    found = []
    for name, disabled in (("beside", True), ("alone", False)):
        layers = model()
        with astray.record(tmp_path / name, layers, level="module"):
            old = torch._C._dynamo.eval_frame.set_eval_frame(False) if disabled else None  # runs what is compiled alone
            try:
                called = entered(partial(step, layers))
            finally:
                if disabled:
                    torch._C._dynamo.eval_frame.set_eval_frame(old)
        assert called == (BY_WAY_OF_PYTHON if disabled else set())
        found.append(rows(astray.open(tmp_path / name)))
    for row in found[0] + found[1]:
        del row["stack"]  # the steps were made in other lines
    assert len(found[0]) > 20
    assert found[0] == found[1]


def test_dynamo_finds_python(tmp_path: Path) -> None:
    layers = nn.Linear(3, 3)
    with astray.record(tmp_path / "run", layers, level="module"):
        (before,), (after,) = layers._forward_pre_hooks.values(), layers._forward_hooks.values()
        assert type(before).__call__ is modules._call_before
        assert type(after).__call__ is modules._call_after
        hooks = layers.weight._backward_hooks
        assert hooks is not None
        assert type(next(iter(hooks.values()))).__call__ is gradients._call_tensor_hook


def test_a_parameter_that_is_unfrozen_is_seen_from_then_on(tmp_path: Path) -> None:
    layers = model()
    weight = layers[0].weight.requires_grad_(False)
    with astray.record(tmp_path / "run", layers, level="module") as rec:
        step(layers)
        rec.step()
        weight.requires_grad_(True)
        step(layers)
        rec.step()
        layers[0].weight = nn.Parameter(torch.ones(3, 3))
        step(layers)
        step(layers)
    seen = [(row["step"], row["path"]) for row in rows(astray.open(tmp_path / "run")) if row["site"] == "0.weight"]
    assert seen == [(1, "grad"), (2, "grad"), (2, "added"), (2, "grad")]


def test_nodes_do_not_become_python_objects(tmp_path: Path) -> None:
    layers = model()

    def nodes() -> list[Any]:
        return [one for one in gc.get_objects() if type(one).__name__.endswith(("Backward0", "AccumulateGrad"))]

    of_others = nodes()
    x = torch.ones(2, 2, 3, requires_grad=True) * 2
    held = x.grad_fn
    with astray.record(tmp_path / "run", layers, level="module"):
        result = layers(x)
        assert [one for one in nodes() if one not in of_others] == [held]
        result.sum().backward()


def test_hooks_of_the_program_on_the_same_node_have_their_handles(tmp_path: Path) -> None:
    layers, called = model(), []
    with (
        astray.record(tmp_path / "outer", layers, level="module"),
        astray.record(tmp_path / "run", layers, level="module"),
    ):
        result = layers(torch.ones(2, 3, requires_grad=True))
        handles = [result.grad_fn.register_hook(lambda *_, name=name: called.append(name)) for name in "ab"]
        handles[0].remove()
        result.sum().backward(retain_graph=True)
    result.sum().backward()
    assert called == ["b", "b"]
    for name in ("outer", "run"):
        found = {(row["site"], row["phase"], row["role"]) for row in rows(astray.open(tmp_path / name))}
        assert {("1.1", "backward", "input"), ("1.1", "backward", "output")} <= found
