"""What the recordings of real programs say: numbers of calls, micro steps, nesting, and what could not be seen.

`tests/integration/programs` has the programs; that recording changes nothing in them is in test_programs.py.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import astray
from astray.store import RunData
from integration.programs import PROGRAMS, STEPS, checkpointing, compiled, precision
from integration.programs.recordings import Recordings
from recorded_rows import rows

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("module", "function", "op")
MODULE = ("module",)


def missed(run: RunData) -> dict[str, tuple[str, int]]:
    end = run.ranks[0].end
    assert end is not None
    return {item.what: (item.why, item.count) for item in end.missed}


def places(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in found]


def test_accumulated_gradients_are_told_apart_by_micro_step(recorded: Callable[..., RunData]) -> None:
    run = recorded("gradient_accumulation")
    every = [(step, micro) for step in range(STEPS) for micro in range(3)]
    assert places(rows(run, site="lm_head", phase="forward", role="output"), "step", "micro") == every
    assert places(rows(run, site="lm_head", phase="backward", role="input"), "step", "micro") == every
    assert sorted(set(places(rows(run, site="lm_head.weight", role="gradient"), "step", "micro"))) == every


@pytest.mark.parametrize("name", ["checkpointing", "reentrant_checkpointing"])
def test_recomputed_calls_are_marked_and_agree_with_the_first(name: str, recorded: Callable[..., RunData]) -> None:
    run = recorded(name)
    for role in ("input", "output"):
        found = rows(run, site="blocks.1.linear", phase="forward", role=role, step=2)
        assert places(found, "micro", "call", "recompute") == [
            (0, 0, False), (1, 0, False), (0, 0, True), (1, 0, True),
        ]  # fmt: skip
        assert found[0]["fingerprint"] == found[2]["fingerprint"]
        assert found[1]["fingerprint"] == found[3]["fingerprint"]
    backward = rows(run, site="blocks.1.linear", phase="backward", role="input", step=2)
    assert places(backward, "micro", "call") == [(0, 0), (1, 0)]


@pytest.mark.parametrize("level", [MODULE, ALL], ids="+".join)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_disturbs_no_number(reentrant: bool, level: tuple[str, ...], tmp_path: Path) -> None:
    """The same model with and without: what is not marked as work done again is the same, call for call."""

    def found(checkpointed: bool) -> dict[Any, Any]:
        torch.manual_seed(0)
        model = checkpointing.Checkpointed(reentrant)
        x = torch.randn(3, 6)
        path = tmp_path / str(checkpointed)
        with pytest.MonkeyPatch.context() as patch:
            if not checkpointed:
                patch.setattr(checkpointing, "checkpoint", lambda function, *args, use_reentrant: function(*args))
            with astray.record(path, model, level=level):
                for _ in range(2):
                    model(x).square().mean().backward()
        kept = [row for row in rows(astray.open(path), phase="forward", recompute=False) if row["site"][0] != "/"]
        names = ("micro", "site", "call", "role", "path")
        return {tuple(row[name] for name in names): row["fingerprint"] for row in kept}

    plain = found(False)
    assert len(plain) > 40
    differing = {key for key, value in found(True).items() if plain.get(key) != value}
    assert {site for _, site, *_ in differing} <= {"<root>/apply"}  # the checkpoint itself, a function of autograd


def test_exceptions_are_noted_as_missed_outputs(recorded: Callable[..., RunData]) -> None:
    run = recorded("exceptions_in_forward")
    assert missed(run) == {
        "the output of fragile": ("it raised ValueError", 2 * 3),  # in the odd ones of five steps
        "the output of <root>": ("it raised RuntimeError", STEPS),
    }
    outputs = rows(run, site="<root>", phase="forward", role="output")
    assert places(outputs, "step", "micro") == [(step, micro) for step in range(STEPS) for micro in (0, 2)]
    assert places(rows(run, site="sound", phase="forward", role="input", step=0), "micro", "call") == [(0, 0), (2, 0)]
    assert len(rows(run, site="fragile.inner", phase="backward", role="input", step=1)) == 0


def test_both_adversaries_are_recorded_under_their_names(recorded: Callable[..., RunData]) -> None:
    run = recorded("adversaries")
    sites = {row["site"] for row in rows(run, kind="module")}
    assert sites == {f"{name}{part}" for name in ("generator", "discriminator") for part in ("", ".0", ".1", ".2")}
    assert places(rows(run, site="discriminator", phase="forward", role="input", step=3), "micro") == [(0,), (1,), (2,)]
    assert places(rows(run, site="generator.2", phase="backward", role="input", step=3), "micro") == [(0,)]
    weights = rows(run, site="discriminator.0", phase="forward", role="parameter", path="weight", step=3)
    assert len({row["fingerprint"] for row in weights}) == 2  # before and after its optimizer


@pytest.mark.parametrize("level", [MODULE, ALL], ids="+".join)
def test_threads_keep_their_own_nesting(level: tuple[str, ...], recorded: Callable[..., RunData]) -> None:
    calls = recorded("two_threads", level).ranks[0].calls
    sites = dict(zip(calls["seq"], calls["site"], strict=True))
    found = Counter()
    for site, parent, phase in zip(calls["site"], calls["parent"], calls["phase"], strict=True):
        if phase == "forward" and parent >= 0:
            assert site.split(".")[0].split("/")[0] == sites[parent].split(".")[0].split("/")[0]
            found[site] += 1
    assert found["left.0"] == found["right.0"] == 2 * STEPS
    if "function" in level:
        assert found["left.0/linear"] == found["right.1/tanh"] == 2 * STEPS


def test_a_pool_of_threads_loses_no_call(recordings: Recordings) -> None:
    program = PROGRAMS["forwards_in_a_pool_of_threads"]
    seen = []
    for take in (0, 1):
        run = astray.open(recordings.get(program, MODULE, take=take).path)
        outputs = rows(run, site="<root>", role="output")
        assert sorted(places(outputs, "step", "micro")) == [
            (step, micro) for step in range(STEPS) for micro in range(6)
        ]
        seen.append(sorted(places(outputs, "step", "fingerprint")))
        assert len(rows(run, site="1", role="output")) == 6 * STEPS
    assert seen[0] == seen[1]


@pytest.mark.parametrize("level", [MODULE, ALL], ids="+".join)
def test_workers_of_a_data_loader_record_nothing(level: tuple[str, ...], recorded: Callable[..., RunData]) -> None:
    run = recorded("forked_workers", level)
    assert places(rows(run, site="0", phase="forward", role="output"), "step") == [(step,) for step in range(STEPS)]


def test_autocast_is_seen_in_the_dtypes(recorded: Callable[..., RunData]) -> None:
    run = recorded("autocast_bfloat16")
    (output,) = rows(run, site="transformer.h.0.mlp.c_fc", phase="forward", role="output", step=0)
    (weight,) = rows(run, site="transformer.h.0.mlp.c_fc", phase="forward", role="parameter", path="weight", step=0)
    (arriving,) = rows(run, site="transformer.h.0.mlp.c_fc", phase="backward", role="input", step=0)
    assert (output["dtype"], weight["dtype"], arriving["dtype"]) == ("bfloat16", "float32", "bfloat16")


def test_a_skipped_step_has_infinite_gradients_and_moves_no_weight(recorded: Callable[..., RunData]) -> None:
    run = recorded("autocast_float16_with_a_skipped_step")
    broken = {row["step"] for row in rows(run, role="gradient", site="3.weight") if row["inf"] + row["nan"]}
    assert broken == {precision.SKIPPED}
    weights = [row["fingerprint"] for row in rows(run, site="3", role="parameter", path="weight")]
    moved = [step for step in range(1, STEPS) if weights[step] != weights[step - 1]]
    assert moved == [step for step in range(1, STEPS) if step != precision.SKIPPED + 1]


def test_a_shared_module_is_one_site_called_twice(recorded: Callable[..., RunData]) -> None:
    run = recorded("shared_modules_and_tied_weights")
    assert places(rows(run, site="first", phase="forward", role="output", step=1), "call") == [(0,), (1,)]
    assert sorted(places(rows(run, site="first", phase="backward", role="input", step=1), "call")) == [(0,), (1,)]
    assert rows(run, site="second") == []
    tied = [row["site"] for row in rows(run, role="gradient", step=1)]
    assert sorted(set(tied)) == ["embedding.weight", "first.bias", "first.weight"]


def test_a_loop_counts_the_calls_of_its_body(recorded: Callable[..., RunData]) -> None:
    run = recorded("modules_in_loops")
    found = places(rows(run, site="block.0", phase="forward", role="output", step=0), "micro", "call")
    assert found == [(0, number) for number in range(9)]
    assert places(rows(run, site="halt", phase="forward", role="output", step=0), "micro", "call")[-1] == (1, 0)


def test_what_is_changed_in_place_was_recorded_as_it_was(recorded: Callable[..., RunData]) -> None:
    run = recorded("in_place", keep="tensors")
    (given,) = rows(run, site="act", phase="forward", role="input", step=4)
    (made,) = rows(run, site="act", phase="forward", role="output", step=4)
    before, after = run.values(0, given["row"]), run.values(0, made["row"])
    assert (before < 0).any()
    np.testing.assert_array_equal(after, np.maximum(before, 0))
    seen = [row["fingerprint"] for row in rows(run, site="<root>", role="state", path="seen")]
    assert len(set(seen)) == STEPS


def test_views_are_recorded_with_their_own_shape_and_numbers(recorded: Callable[..., RunData]) -> None:
    run = recorded("view_outputs", keep="tensors")
    (whole,) = rows(run, site="linear", phase="forward", role="output", step=2)
    left, right = rows(run, site="halves", phase="forward", role="output", step=2)
    assert (left["path"], right["path"]) == ("out.0", "out.1")
    np.testing.assert_array_equal(
        np.concatenate([run.values(0, row["row"]) for row in (left, right)], axis=1), run.values(0, whole["row"])
    )
    (turned,) = rows(run, site="turned", phase="forward", role="output", step=2)
    np.testing.assert_array_equal(run.values(0, turned["row"])[1], run.values(0, left["row"]).T)


def test_nested_results_are_recorded_under_the_paths_of_their_parts(recorded: Callable[..., RunData]) -> None:
    run = recorded("structured_outputs")
    outputs = places(rows(run, phase="forward", role="output", step=0), "site", "path")
    assert [path for site, path in outputs if site == "give"] == [
        "out.logits", "out.parts.halves.0", "out.parts.halves.1",
    ]  # fmt: skip
    assert [path for site, path in outputs if site == "take"] == ["out.loss", "out.logits"]
    assert [path for site, path in outputs if site == "<root>"] == ["out.answer.loss", "out.answer.logits", "out.x"]


def test_what_cannot_be_read_is_a_row_and_a_note(recorded: Callable[..., RunData]) -> None:
    transformed = recorded("transforms_of_functions")
    assert "it is inside a functorch transform" in {row["note"] for row in rows(transformed)}
    sparse = recorded("sparse_gradients")
    notes = {row["note"] for row in rows(sparse, role="gradient", path="grad")}
    assert notes == {"its layout is sparse_coo"}
    assert {why for why, _ in missed(sparse).values()} == notes


def test_a_fast_path_is_left_alone_and_said_to_be_unseen(recorded: Callable[..., RunData]) -> None:
    evaluated = recorded("transformer_encoder_in_eval_mode")
    assert {what: why for what, (why, _) in missed(evaluated).items()} == {
        f"calls of layers.{i} and inside it": "in eval mode torch computes it in one piece, unless there are hooks"
        for i in (0, 1)
    }
    assert {row["site"] for row in rows(evaluated)} == {"<root>"}
    in_turns = recorded("transformer_encoder_in_turns")
    assert len(rows(in_turns, site="layers.1.linear2", phase="forward", role="output")) == STEPS


COMPILED = {
    "compiled_model_by_aot_eager": {"<root>"},
    "compiled_after_all_by_aot_eager": set(),
    "compiled_in_place_by_aot_eager": {"<root>"},
    "compiled_function_by_aot_eager": set(),
    "compiled_block_by_aot_eager": {"<root>", "first", "block", "last"},
    "compiled_block_as_a_wrapper_by_aot_eager": {"<root>", "first", "block", "last"},
}
"""The sites whose calls can be seen at least, for each way of compiling."""


@pytest.mark.parametrize("name", COMPILED)
def test_the_boundaries_of_compiled_code_are_recorded_and_the_rest_is_said_to_be_unseen(
    name: str, recorded: Callable[..., RunData]
) -> None:
    run = recorded(name)
    assert COMPILED[name] <= {row["site"] for row in rows(run, kind="module")}
    assert any("compile" in why for why, _ in missed(run).values())


@pytest.mark.parametrize("name", [name for name, sites in COMPILED.items() if sites])
def test_compiled_and_eager_runs_compare(name: str, recorded: Callable[..., RunData], tmp_path: Path) -> None:
    """aot_eager computes what eager does, so whatever is in both runs is the same to the last bit."""
    torch.manual_seed(0)
    model = compiled.Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with astray.record(tmp_path / "eager", model) as recorder:
        for _ in range(STEPS):
            loss = model(torch.randn(3, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step()
    diff = astray.compare(tmp_path / "eager", recorded(name))
    pairs = diff.pairs
    both = {site for site, there in zip(pairs["site"], diff.matched, strict=True) if there}
    assert COMPILED[name] <= both
    assert diff.first is None
    assert not {"rounding", "drifting", "diverged"} & {verdict for verdict, count in diff.counts.items() if count}


def test_a_graph_that_outlives_the_recording_carries_nothing_of_it(tmp_path: Path) -> None:
    def ours() -> set[int]:
        return {id(thing) for thing in gc.get_objects() if "astray.capture.pytorch.gradients" in str(type(thing))}

    torch.manual_seed(0)
    gc.collect()
    before = ours()  # what a failed test may have left behind
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    kept = {}
    handle = model[1].register_forward_hook(lambda module, args, output: kept.update(given=args[0], made=output))
    with astray.record(tmp_path / "run", model, level=ALL) as recorder:
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward(retain_graph=True)
        recorder.step()
    handle.remove()
    written = len(astray.open(tmp_path / "run").ranks[0].tensors)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    engine = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert engine() is None
    assert not any(tensor._backward_hooks for tensor in (loss, *kept.values()))
    loss.backward()
    assert all(
        torch.equal(parameter.grad, wanted) for parameter, wanted in zip(model.parameters(), expected, strict=True)
    )
    assert len(astray.open(tmp_path / "run").ranks[0].tensors) == written
    assert ours() <= before
