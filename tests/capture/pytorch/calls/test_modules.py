"""Recording a torch model: which calls and tensors, in which order, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import astray
from recorded_rows import hooks_of, outline, rows
from small_models import MODELS, Attending, InPlace, Nested, Noisy, Residual, Shared, build, same_bits, train


def test_one_step_of_a_residual_block_in_the_order_it_happened(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.randn(2, 6)).sum().backward()
        rec.step()
    run = astray.open(tmp_path / "run")
    assert outline(run) == [
        "<root> forward input 0",
        "norm forward input 0",
        "norm forward parameter weight",
        "norm forward parameter bias",
        "norm forward output out",
        "inner forward input 0",
        "inner forward parameter weight",
        "inner forward parameter bias",
        "inner forward output out",
        "<root> forward output out",
        "<root> backward input out",
        "inner backward input out",
        "inner backward output 0",
        "inner.bias backward gradient grad",
        "inner.weight backward gradient grad",
        "norm backward input out",
        "norm.weight backward gradient grad",
        "norm.bias backward gradient grad",
    ]
    assert run.complete
    calls = run.ranks[0].calls
    assert [calls.row(i)["parent"] for i in range(5)] == [None, 0, 0, 0, 2]


def test_the_gradient_sent_to_an_input_is_the_calls_own_and_not_the_sum(tmp_path: Path) -> None:
    model = build(Residual)
    x = torch.randn(2, 6, requires_grad=True)
    with astray.record(tmp_path / "run", model, keep="tensors"):
        model(x).square().sum().backward()
    run = astray.open(tmp_path / "run")

    h = x.detach().requires_grad_()
    normed = model.norm(h)
    y = x.detach() + model.inner(normed)
    (own,) = torch.autograd.grad(y, h, 2 * y.detach())
    (row,) = rows(run, site="norm", phase="backward", role="output", path="0")
    np.testing.assert_array_equal(run.values(0, row["row"]), own.numpy())
    (whole,) = rows(run, site="<root>", phase="backward", role="output", path="0")
    np.testing.assert_array_equal(run.values(0, whole["row"]), x.grad.numpy())


@pytest.mark.parametrize("keep", ["stats", "fingerprint", "sample", "tensors"])
@pytest.mark.parametrize("kind", MODELS)
def test_recording_changes_no_bit_and_leaves_nothing_behind(kind: type[nn.Module], keep: str, tmp_path: Path) -> None:
    bare = train(build(kind))
    model = build(kind)
    before = threading.active_count()
    with astray.record(tmp_path / "run", model, keep=keep) as rec:
        watched = train(model, after_step=rec.step)
    assert same_bits(bare, watched)
    assert hooks_of(model) == 0
    assert threading.active_count() == before
    run = astray.open(tmp_path / "run")
    assert run.steps == [0, 1, 2, 3, 4]
    assert run.problems == []
    assert run.ranks[0].end is not None
    assert run.ranks[0].end.missed == []


@pytest.mark.parametrize("kind", MODELS)
def test_every_gradient_of_every_layer_is_there(kind: type[nn.Module], tmp_path: Path) -> None:
    model = build(kind)
    with astray.record(tmp_path / "run", model) as rec:
        train(model, steps=1, after_step=rec.step)
    run = astray.open(tmp_path / "run")
    leaves = {name for name, module in model.named_modules() if not list(module.children()) and name != "attn.out_proj"}
    assert {row["site"] for row in rows(run, phase="backward", role="input")} >= leaves
    assert {row["site"] for row in rows(run, role="gradient")} == {name for name, _ in model.named_parameters()}


def test_the_numbers_are_those_of_the_tensors(tmp_path: Path) -> None:
    model = build(InPlace)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, y, name=name: seen.update({name: y.detach().clone()}))
    with astray.record(tmp_path / "run", model, keep="tensors"):
        model(torch.randn(3, 6))
    run = astray.open(tmp_path / "run")
    for row in rows(run, role="output"):
        expected = seen[row["site"] if row["site"] != "<root>" else ""]
        np.testing.assert_array_equal(run.values(0, row["row"]), expected.numpy())
        assert row["mean"] == pytest.approx(expected.double().mean().item(), rel=1e-12)
        assert row["l2"] == pytest.approx(expected.double().norm().item(), rel=1e-12)


def test_a_tensor_changed_in_place_is_seen_before_and_after(tmp_path: Path) -> None:
    model = build(InPlace)
    with astray.record(tmp_path / "run", model, keep="tensors"):
        model(torch.randn(3, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    (before,) = rows(run, site="act", phase="forward", role="input")
    (after,) = rows(run, site="act", phase="forward", role="output")
    assert before["min"] < 0 <= after["min"]
    (arriving,) = rows(run, site="act", phase="backward", role="input")
    (sent,) = rows(run, site="act", phase="backward", role="output")
    mask = run.values(0, after["row"]) > 0
    np.testing.assert_array_equal(run.values(0, sent["row"]), run.values(0, arriving["row"]) * mask)


def test_a_shared_layer_is_one_site_called_three_times(tmp_path: Path) -> None:
    model = build(Shared)
    with astray.record(tmp_path / "run", model) as rec:
        train(model, steps=2, after_step=rec.step)
    run = astray.open(tmp_path / "run")
    outputs = rows(run, site="layer", phase="forward", role="output")
    assert [(row["step"], row["call"]) for row in outputs] == [(s, c) for s in (0, 1) for c in (0, 1, 2)]
    arriving = rows(run, site="layer", phase="backward", role="input", step=0)
    assert [row["call"] for row in arriving] == [2, 1, 0]


def test_nested_arguments_and_results_have_paths_and_other_values_are_written_down(tmp_path: Path) -> None:
    model = build(Nested)
    with astray.record(tmp_path / "run", model):
        model(torch.randn(3, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert outline(run, site="give", phase="forward", role="output") == [
        f"give forward output out.{path}" for path in ("logits", "extras.pair.0", "extras.parts.0", "extras.parts.1")
    ]
    taken = rows(run, site="take", phase="forward", role="input")
    assert [row["path"] for row in taken] == ["0.logits", "0.extras.pair.0", "0.extras.parts.0", "0.extras.parts.1"]
    assert json.loads(taken[0]["args"]) == {
        "args": [{"logits": "<tensor>", "extras": {"pair": ["<tensor>", None], "count": 3, "parts": ["<tensor>"] * 2}}],
        "kwargs": {"scale": 2.0, "mask": None},
    }
    assert len(rows(run, site="take", phase="backward", role="output")) == 4


def test_tensors_given_by_keyword_are_inputs_too(tmp_path: Path) -> None:
    model = build(Attending)
    with astray.record(tmp_path / "run", model):
        model(torch.randn(3, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert [r["path"] for r in rows(run, site="attn", phase="forward", role="input")] == ["0", "1", "kwargs.value"]
    assert [r["path"] for r in rows(run, site="attn", phase="forward", role="output")] == ["out.0", "out.1"]


def test_buffers_are_part_of_what_a_call_starts_from(tmp_path: Path) -> None:
    model = build(Noisy)
    with astray.record(tmp_path / "run", model) as rec:
        train(model, steps=2, after_step=rec.step)
    run = astray.open(tmp_path / "run")
    names = {row["path"] for row in rows(run, site="norm", phase="forward", role="state")}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}
    first, second = rows(run, site="norm", role="state", path="num_batches_tracked")
    assert (first["max"], second["max"]) == (0, 1)


def test_samples_are_the_same_positions_in_every_run(tmp_path: Path) -> None:
    kept = []
    for name in ("a", "b"):
        model = build(Residual)
        with astray.record(tmp_path / name, model, keep="sample", samples=5):
            model(torch.arange(60.0).view(10, 6))
        run = astray.open(tmp_path / name)
        (row,) = rows(run, site="<root>", role="input")
        assert row["sampled"] == 5
        kept.append(run.values(0, row["row"]))
    np.testing.assert_array_equal(*kept)
    assert len(set(kept[0].tolist())) == 5


def test_only_the_steps_asked_for_are_recorded(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model, steps="1:6:2") as rec:
        train(model, steps=5, after_step=rec.step)
    assert astray.open(tmp_path / "run").steps == [1, 3]


def test_micro_steps_count_the_forwards_of_one_step(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(2, 6)).sum().backward()
            rec.step()
    run = astray.open(tmp_path / "run")
    assert [(r["step"], r["micro"], r["call"]) for r in rows(run, site="inner", phase="forward", role="output")] == [
        (step, micro, 0) for step in (0, 1) for micro in (0, 1, 2)
    ]
    gradients = rows(run, site="inner.weight", role="gradient", step=0)
    assert [(row["micro"], row["path"]) for row in gradients] == [
        (0, "grad"), (1, "added"), (1, "grad"), (2, "added"), (2, "grad"),
    ]  # fmt: skip
    assert gradients[0]["l2"] < gradients[4]["l2"]


def test_an_exception_in_forward_ends_the_calls_it_left_and_the_next_ones_are_numbered_rightly(tmp_path: Path) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.fail:
                raise ValueError("on purpose")
            return y

    model = nn.Sequential(Failing())
    with astray.record(tmp_path / "run", model):
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.randn(2, 6))
        model[0].fail = False
        model(torch.randn(2, 6))
    run = astray.open(tmp_path / "run")
    assert [(r["site"], r["micro"]) for r in rows(run, role="output")] == [
        ("0.inner", 0),
        ("0.inner", 1),
        ("0", 1),
        ("<root>", 1),
    ]
    calls = run.ranks[0].calls
    parents = {calls.row(i)["seq"]: calls.row(i)["parent"] for i in range(len(calls))}
    assert parents[3] is None
    assert {missed.why for missed in run.ranks[0].end.missed} == {"it raised ValueError"}
    assert hooks_of(model) == 0


def test_an_exception_in_the_with_block_is_written_down_and_hooks_are_gone(tmp_path: Path) -> None:
    model = build(Residual)

    def fail() -> None:
        with astray.record(tmp_path / "run", model):
            model(torch.randn(2, 6))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert hooks_of(model) == 0
    assert astray.open(tmp_path / "run").ranks[0].end.ended == "RuntimeError: boom"


def test_hooks_on_a_graph_that_outlives_the_recording_are_removed(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model):
        loss = model(torch.randn(2, 6)).sum()
    loss.backward()
    run = astray.open(tmp_path / "run")
    assert rows(run, phase="backward") == []
    assert run.complete


def test_two_recorders_at_once_on_two_models_and_on_the_same(tmp_path: Path) -> None:
    one, other = build(Residual), build(Shared)
    with (
        astray.record(tmp_path / "one", one),
        astray.record(tmp_path / "other", other),
        astray.record(tmp_path / "one too", one),
    ):
        one(torch.ones(2, 6)).sum().backward()
        other(torch.ones(2, 6)).sum().backward()
    sites = [{r["site"] for r in rows(astray.open(tmp_path / n))} for n in ("one", "other", "one too")]
    assert "norm" in sites[0]
    assert "layer" in sites[1]
    assert sites[2] == sites[0]
    assert not sites[0] & {"layer"}
    assert astray.compare(tmp_path / "one", tmp_path / "one too").same


def test_models_given_by_name_carry_it_in_their_sites(tmp_path: Path) -> None:
    models = {"gen": build(Residual), "disc": build(Shared)}
    with astray.record(tmp_path / "run", models):
        models["disc"](models["gen"](torch.ones(2, 6))).sum().backward()
    sites = {row["site"] for row in rows(astray.open(tmp_path / "run"))}
    assert {"gen", "gen.norm", "gen.inner.weight", "disc", "disc.layer"} <= sites


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_done_again_are_marked_and_do_not_disturb_numbering(reentrant: bool, tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Residual(), Residual()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=reentrant)
            return checkpoint(self.second, x, use_reentrant=reentrant)

    model = build(Checkpointed)
    bare = build(Checkpointed)
    x = torch.randn(2, 6, requires_grad=True)
    bare(x.detach().requires_grad_()).sum().backward()
    with astray.record(tmp_path / "run", model):
        model(x).sum().backward()
    run = astray.open(tmp_path / "run")
    forwards = rows(run, site="first.inner", phase="forward", role="input")
    assert [(r["call"], r["recompute"], r["micro"]) for r in forwards] == [(0, False, 0), (0, True, 0)]
    assert forwards[0]["fingerprint"] == forwards[1]["fingerprint"]
    assert run.ranks[0].end.missed == []
    assert len(rows(run, site="first.inner", phase="backward", role="input")) == 1
    assert all(same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), bare.parameters(), strict=True))


def test_a_second_backward_through_one_graph_is_a_second_row(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model):
        loss = model(torch.randn(2, 6)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    run = astray.open(tmp_path / "run")
    assert len({row["seq"] for row in rows(run, site="inner", phase="backward")}) == 2
    assert len(rows(run, site="norm", phase="backward", role="input")) == 2


def test_inference_without_gradients(tmp_path: Path) -> None:
    model = build(Noisy).eval()
    with torch.inference_mode(), astray.record(tmp_path / "run", model):
        for _ in range(3):
            model(torch.randn(2, 6))
    run = astray.open(tmp_path / "run")
    assert {row["micro"] for row in rows(run)} == {0, 1, 2}
    assert run.ranks[0].end.missed == []


def test_a_model_copied_or_saved_while_recording_takes_nothing_along(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model):
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        twin(torch.ones(2, 6))
    assert rows(astray.open(tmp_path / "run")) == []
    assert b"astray" not in saved.getvalue()
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert same_bits(again(torch.ones(2, 6)).detach(), model(torch.ones(2, 6)).detach())


def test_two_threads_each_with_their_own_model(tmp_path: Path) -> None:
    models = [build(Residual, seed) for seed in (1, 2)]
    with astray.record(tmp_path / "run", {"a": models[0], "b": models[1]}):
        threads = [threading.Thread(target=train, args=(model, 20)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = astray.open(tmp_path / "run")
    calls = run.ranks[0].calls
    site_of = {calls.row(i)["seq"]: calls.row(i)["site"] for i in range(len(calls))}
    for i in range(len(calls)):
        row = calls.row(i)
        if row["phase"] == "forward" and row["site"] in ("a.norm", "b.norm"):
            assert site_of[row["parent"]] == row["site"][0]
    assert len(rows(run, site="a.inner", phase="forward", role="output")) == 20
    assert len({row["seq"] for row in rows(run)}) <= len(calls)


def test_workers_of_a_data_loader_do_not_record(tmp_path: Path) -> None:
    model = build(Residual)

    class Data(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            with torch.no_grad():
                return model(torch.full((1, 6), float(index)))[0]

    with astray.record(tmp_path / "run", model):
        batches = list(torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))
        model(torch.cat(batches))
    assert len(batches) == 4
    run = astray.open(tmp_path / "run")
    assert len(rows(run, site="<root>", role="output")) == 1
    assert run.complete


def test_tensors_that_cannot_be_read_are_rows_with_a_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity())
    with astray.record(tmp_path / "run", model):
        model(torch.eye(3).to_sparse())
        model(torch.empty(2, 2, device="meta"))
        model(torch.ones(3, dtype=torch.complex64).conj() * 1j)
    run = astray.open(tmp_path / "run")
    notes = [row["note"] for row in rows(run, site="<root>", role="input")]
    assert notes == ["its layout is sparse_coo", "a meta tensor has no numbers", None]
    assert sum(missed.count for missed in run.ranks[0].end.missed) >= 2


def test_the_source_line_of_a_call_is_where_the_model_calls_it(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model):
        model(torch.randn(2, 6))
    rank = astray.open(tmp_path / "run").ranks[0]
    (inner,) = [i for i in range(len(rank.calls)) if rank.calls.row(i)["site"] == "inner"]
    frames = rank.stack(rank.calls.row(inner)["stack"])
    assert frames[0].code == "return x + self.inner(self.norm(x))"
    assert frames[0].function.endswith("forward")
    assert frames[1].code == "model(torch.randn(2, 6))"
    assert not any("torch/nn" in frame.file or "astray/capture" in frame.file for frame in frames)


def test_bad_settings_are_answered_with_the_right_word(tmp_path: Path) -> None:
    model = build(Residual)
    for settings, said in [
        ({"keep": "stat"}, "'stats'"),
        ({"level": "modul"}, "'module'"),
        ({"steps": "a:b"}, "begin:end"),
        ({"samples": 0}, "at least 1"),
        ({"keep": []}, "empty"),
    ]:
        with pytest.raises(astray.AstrayError, match=said):
            astray.record(tmp_path / "run", model, **settings)
    with pytest.raises(astray.errors.RecordError, match="A list was given"):
        astray.record(tmp_path / "run", [model])
    with pytest.raises(astray.errors.RecordError, match="before start"):
        astray.Recorder(tmp_path / "run", model).step()
    assert not (tmp_path / "run").exists()


def test_an_existing_run_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    model = build(Residual)
    for _ in range(2):
        with astray.record(tmp_path / "run", model, overwrite=True):
            model(torch.randn(2, 6))
    with pytest.raises(astray.errors.RunExists, match="overwrite=True"):
        astray.record(tmp_path / "run", model)
    assert hooks_of(model) == 0


def test_a_failure_inside_the_recorder_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(Residual)
    monkeypatch.setattr("astray.stats.kernels.measuring", None)  # else the next line would not be asked
    with astray.record(tmp_path / "run", model):
        monkeypatch.setattr("astray.capture.observer.measure", lambda *_, **__: 1 / 0)
        model(torch.randn(2, 6)).sum().backward()
    assert len(caplog.records) == 1
    assert "The program is not affected" in caplog.text
    missed = astray.open(tmp_path / "run").ranks[0].end.missed
    assert missed
    assert all("ZeroDivisionError" in item.why for item in missed)


@pytest.mark.parametrize(("package", "is_shown"), [("torch", False), ("torchvision", True), ("torch_npu", True)])
def test_packages_whose_names_begin_like_torchs_are_shown(tmp_path: Path, package: str, is_shown: bool) -> None:
    folder = Path(torch.__file__).parent
    file = str(folder.with_name(package) / "ops" / "call.py")
    namespace: dict[str, Any] = {}
    exec(compile("def call(model, x):\n    return model(x)\n", file, "exec"), namespace)
    model = nn.Linear(2, 2)
    with astray.record(tmp_path / "run", model):
        namespace["call"](model, torch.ones(1, 2))
    rank = astray.open(tmp_path / "run").ranks[0]
    files = {frame.file for frame in rank.stack(int(rank.calls["stack"][0]))}
    assert (file in files) is is_shown
