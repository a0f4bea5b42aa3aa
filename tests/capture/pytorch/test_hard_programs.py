"""Programs that are hard to record: each was once recorded wrongly, or crashed because of the recorder."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import astray
from astray.capture.pytorch.calls.modes import InferenceFastPaths
from recorded_rows import hooks_of, rows
from small_models import Residual, build, same_bits, train


class Calling(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def test_tensors_without_memory_are_rows_with_a_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    zeros = Calling(lambda x: torch._efficientzerotensor(x.shape))
    with astray.record(tmp_path / "run", {"m": model, "z": zeros}):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model(fake.from_tensor(torch.ones(2, 3)))
        zeros(torch.ones(2, 3))
        freed = torch.ones(2, 3)
        freed.untyped_storage().resize_(0)
        Calling(lambda x: 0)(freed)
        zeros(freed)
    notes = {row["note"] for row in rows(astray.open(tmp_path / "run")) if row["note"]}
    assert notes == {
        "a fake tensor has no numbers",
        "it stands for zeros and has no memory",
        "it has no memory (freed, or never filled)",
    }


def test_nested_tensors_and_transforms_are_rows_with_a_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, and say so
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    with astray.record(tmp_path / "run", model):
        model(nested)
        torch.func.vmap(model)(torch.ones(4, 2, 3))
    run = astray.open(tmp_path / "run")
    notes = [row["note"] for row in rows(run, site="<root>", role="input")]
    assert notes == ["nested tensors have no single memory to read", "it is inside a functorch transform"]
    assert all("Error" not in missed.why for missed in run.ranks[0].end.missed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_in_eval_mode_stays_on_its_fast_path(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 133, batch_first=True, activation="gelu", norm_first=True)
    model = nn.Sequential(Calling(lambda x: x), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).to(dtype)
    model.eval()
    x, mask = torch.randn(3, 10, 64, dtype=dtype), nn.Transformer.generate_square_subsequent_mask(10, dtype=dtype)
    with torch.no_grad():
        bare = model[1](x, mask=mask)
        with astray.record(tmp_path / "run", model) as rec:
            watched = model[1](x, mask=mask)
            rec.step()
            model.train()
            model(x)
    assert same_bits(bare.view(torch.uint8), watched.view(torch.uint8))
    run = astray.open(tmp_path / "run")
    assert rows(run, step=0, site="1.layers.0") == []
    assert rows(run, step=1, site="1.layers.0.linear1")
    assert any("in one piece" in missed.why for missed in run.ranks[0].end.missed)
    assert hooks_of(model) == 0


def test_tracing_sees_no_hooks(tmp_path: Path) -> None:
    model = build(Residual)
    x = torch.randn(2, 6)
    with astray.record(tmp_path / "run", model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out, and says so
        traced = torch.jit.trace(model, x)
    assert same_bits(traced(x).detach(), model(x).detach())


def test_hooks_that_another_tool_moved_do_nothing_wrong(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    moved = nn.Linear(6, 6)
    with astray.record(tmp_path / "run", model):
        for hook in model[0]._forward_pre_hooks.values():
            moved.register_forward_pre_hook(hook)
        for hook in model[0]._forward_hooks.values():
            moved.register_forward_hook(hook)
        moved(torch.ones(1, 6))
    moved(torch.ones(1, 6))


def test_lazy_modules_are_recorded_once_they_know_their_shape(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with astray.record(tmp_path / "run", model):
            model(torch.ones(2, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert {row["site"] for row in rows(run, role="gradient")} == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_parameters_unfrozen_or_replaced_while_recording_are_seen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    with astray.record(tmp_path / "run", model) as rec:
        model(torch.ones(2, 6)).sum().backward()
        rec.step()
        model[0].requires_grad_(True)
        model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
        model(torch.ones(2, 6)).sum().backward()
    run = astray.open(tmp_path / "run")
    seen = [{row["site"] for row in rows(run, role="gradient", step=step)} for step in (0, 1)]
    assert seen == [{"1.weight", "1.bias"}, {"0.weight", "0.bias", "1.weight", "1.bias"}]


def test_weights_swapped_within_a_step_are_recorded_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with astray.record(tmp_path / "run", model):
        for scale in (1.0, 2.0):
            weights = {name: p.detach() * scale for name, p in model.named_parameters()}
            torch.func.functional_call(model, weights, (torch.ones(1, 2),))
    first, second = rows(astray.open(tmp_path / "run"), role="parameter", path="weight")
    assert second["l2"] == pytest.approx(2 * first["l2"])


@pytest.mark.slow
def test_models_that_come_and_go_keep_all_their_gradients(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "for _ in range(6):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=.1)\n"
        "    for _ in range(2):\n"
        "        model(torch.ones(1, 4)).sum().backward(); optimizer.step()\n"
    )
    subprocess.run(
        [sys.executable, "-m", "astray", "run", "-o", tmp_path / "run", script], check=True, capture_output=True
    )
    assert len(rows(astray.open(tmp_path / "run"), path="grad")) == 6 * 2 * 4


def test_a_module_that_returns_its_weight_is_recorded_once_a_step(tmp_path: Path) -> None:
    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.w

    model = Giving()
    with astray.record(tmp_path / "run", model) as rec:
        for _ in range(4):
            model().square().sum().backward()
            rec.step()
    run = astray.open(tmp_path / "run")
    assert [row["step"] for row in rows(run, phase="backward", role="input")] == [0, 1, 2, 3]
    assert not model.w._backward_hooks


def test_an_output_that_nobody_uses_does_not_hold_up_the_gradient(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.two, self.after = nn.Linear(4, 4), Two(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.two(self.before(x))[0])

    model = Net()
    with astray.record(tmp_path / "run", model, keep="tensors") as rec:
        model(torch.ones(2, 4)).sum().backward()
        rec.step()
    run = astray.open(tmp_path / "run")
    order = [(row["site"], row["role"]) for row in rows(run, phase="backward", kind="module")]
    assert order.index(("two", "output")) < order.index(("before", "input"))
    (arriving,) = rows(run, site="two", phase="backward", role="input")
    (sent,) = rows(run, site="two", phase="backward", role="output")
    np.testing.assert_array_equal(run.values(0, sent["row"]), 2 * run.values(0, arriving["row"]))
    assert run.ranks[0].end.missed == []


def test_both_an_identity_and_a_computed_output(tmp_path: Path) -> None:
    model = Calling(lambda x: (x, x * 2))
    x = torch.ones(3, requires_grad=True)
    with astray.record(tmp_path / "run", model, keep="tensors"):
        first, second = model(x)
        (first.sum() + 5 * second.sum()).backward()
    run = astray.open(tmp_path / "run")
    (sent,) = rows(run, phase="backward", role="output")
    np.testing.assert_array_equal(run.values(0, sent["row"]), x.grad.numpy())


def test_an_lstm_of_which_only_the_state_is_used(tmp_path: Path) -> None:
    model = nn.LSTM(4, 5)
    with astray.record(tmp_path / "run", model):
        _, (hidden, _) = model(torch.randn(3, 2, 4))
        hidden.sum().backward()
    run = astray.open(tmp_path / "run")
    assert run.ranks[0].end.missed == []
    assert [row["path"] for row in rows(run, phase="backward", kind="module", role="input")] == ["out.1.0"]


def test_a_gradient_taken_away_by_an_earlier_hook_is_noted(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)

    def take(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(take)
    with astray.record(tmp_path / "run", model):
        model(torch.ones(1, 3)).sum().backward()
    missed = astray.open(tmp_path / "run").ranks[0].end.missed
    assert [(item.what, item.why) for item in missed] == [("the gradient of weight", "another hook took it away first")]


def test_an_interrupt_that_the_program_survives_leaves_no_open_call(tmp_path: Path) -> None:
    interrupted = [True]

    def work(x: torch.Tensor) -> torch.Tensor:
        if interrupted.pop() if interrupted else False:
            raise KeyboardInterrupt
        return x

    model = nn.Sequential(nn.Linear(2, 2), Calling(work))
    with astray.record(tmp_path / "run", model) as rec:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        rec.step()
        model(torch.ones(1, 2))
    calls = astray.open(tmp_path / "run").ranks[0].calls
    roots = [calls.row(i) for i in range(len(calls)) if calls.row(i)["site"] == "<root>"]
    assert [root["parent"] for root in roots] == [None, None]


def test_none_returned_inside_an_except_block_is_not_an_exception(tmp_path: Path) -> None:
    model = Calling(lambda x: None)
    with astray.record(tmp_path / "run", model):
        try:
            {}["nothing"]
        except KeyError:
            model(torch.ones(1))
    assert astray.open(tmp_path / "run").ranks[0].end.missed == []


def test_a_recording_in_which_no_module_ran_says_so(tmp_path: Path) -> None:
    with astray.record(tmp_path / "run", nn.Linear(2, 2)):
        pass
    (missed,) = astray.open(tmp_path / "run").ranks[0].end.missed
    assert missed.what == "any call of a module"


def test_a_recorder_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(Residual)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(InferenceFastPaths, "check", fail)  # after the hooks were put in place
    with pytest.raises(OSError, match="no"):
        astray.record(tmp_path / "run", model)
    monkeypatch.undo()
    assert hooks_of(model) == 0


def test_recording_keeps_no_graph_alive(tmp_path: Path) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model) as rec:
        train(model, steps=3, after_step=rec.step)
        gc.collect()
        living = [thing for thing in gc.get_objects() if type(thing).__name__ == "CallGradients"]
        assert len(living) == 0


@pytest.mark.parametrize("phases", [("forward", "backward", "update"), ("forward",)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_two_backwards_keep_their_micro_steps(
    reentrant: bool, phases: tuple[str, ...], tmp_path: Path
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant).square()

    model = Checkpointed()
    with astray.record(tmp_path / "run", model, phases=phases):
        losses = [model(torch.randn(2, 6, requires_grad=True)).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
    run = astray.open(tmp_path / "run")
    inputs = rows(run, site="inner", phase="forward", role="input")
    assert [(row["micro"], row["call"], row["recompute"]) for row in inputs] == [
        (0, 0, False), (1, 0, False), (0, 0, True), (1, 0, True),
    ]  # fmt: skip
    gradients = [row["micro"] for row in rows(run, site="inner.weight", path="grad")]
    assert gradients == ([0, 1] if "backward" in phases else [])


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)])
@pytest.mark.parametrize("level", ["module", "function", "op"])
def test_running_statistics_are_read_again_after_each_training_call(
    level: str, norm: nn.Module, tmp_path: Path
) -> None:
    model, now = nn.Sequential(deepcopy(norm)), []
    with astray.record(tmp_path / "run", model, level=level):
        for i in range(4):
            model.train(i != 3)
            now.append(model[0].running_var.max().item())
            model(torch.randn(2, 3, 5) * (i + 2))
    run = astray.open(tmp_path / "run")
    if level == "module":
        found = rows(run, role="state", path="running_var")
    elif level == "function":
        given = [row for row in rows(run, role="input") if row["type"].startswith("torch.nn.functional")]
        found = [row for row in given if row["path"] in ("2", "kwargs.running_var")]
    else:  # an instance norm repeats its statistics before
        found = [row for row in rows(run, role="input", path="4") if "native_batch_norm" in row["type"]]
    assert len(found) == len(set(now)) == 4
    if level != "op" or isinstance(norm, nn.BatchNorm1d):
        assert [row["max"] for row in found] == now


def test_a_buffer_whose_changes_cannot_be_told_is_recorded_each_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.inference_mode():
        model[0].register_buffer("cache", torch.zeros(2))
        with astray.record(tmp_path / "run", model):
            for _ in range(2):
                model(torch.ones(1, 2))
                model[0].cache.add_(1)
    found = rows(astray.open(tmp_path / "run"), role="state", path="cache")
    assert [row["max"] for row in found] == [0, 1]


@pytest.mark.parametrize("models", [{0: nn.Linear(2, 2)}, {"a\nb": nn.Linear(2, 2)}, {"": nn.Linear(2, 2)}])
def test_names_of_models_that_cannot_be_printed_are_refused(models: Any, tmp_path: Path) -> None:
    with pytest.raises(astray.errors.RecordError, match="A model is named"):
        astray.record(tmp_path / "run", models)


def test_names_of_models_that_clash_are_refused_and_nothing_remains(tmp_path: Path) -> None:
    models = {"a": nn.Sequential(nn.Linear(2, 2)), "a.0": nn.Linear(2, 2)}
    with pytest.raises(astray.errors.RecordError, match=r"both be recorded as 'a\.0'"):
        astray.record(tmp_path / "run", models)
    assert sum(map(hooks_of, models.values())) == 0
    assert not (tmp_path / "run").exists()


def test_a_failure_at_the_end_of_a_step_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(Residual)
    with astray.record(tmp_path / "run", model) as rec:
        monkeypatch.setattr("astray.capture.pytorch.gradients.LiveGradients.finish", lambda _: 1 / 0)
        train(model, steps=2, after_step=rec.step)
    assert hooks_of(model) == 0
    run = astray.open(tmp_path / "run")
    assert run.complete
    assert {missed.what for missed in run.ranks[0].end.missed} == {"the end of a step", "the end of the recording"}
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_ranks_of_a_program_that_starts_its_processes_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, torch.multiprocessing as mp, astray\n"
        "def work(rank, folder):\n"
        "    dist.init_process_group('gloo', init_method=f'file://{folder}/rendezvous', rank=rank, world_size=2)\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    with astray.record(folder + '/run', model):\n"
        "        model(torch.full((1, 2), float(rank)))\n"
        "    dist.destroy_process_group()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, (sys.argv[1],), nprocs=2)\n"
    )
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    run = astray.open(tmp_path / "run")
    assert sorted(run.ranks) == [0, 1]
    assert run.info.world_size == 2
