"""What is recorded of a Paddle program, under which names, and what the settings leave out; nothing remains of it."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import paddle.nn.functional as F  # noqa: E402
from paddle import _C_ops, nn  # noqa: E402
from paddle.optimizer import Optimizer  # noqa: E402

import astray  # noqa: E402
from astray.capture.paddle.calls.wrappers import optimizer_wrappers  # noqa: E402
from astray.capture.paddle.native.core import _paddle  # noqa: E402
from capture.paddle.paddle_programs import ConvNet, Transformer  # noqa: E402
from recorded_rows import outline, rows  # noqa: E402

pytestmark = pytest.mark.paddle


def two_layers() -> nn.Layer:
    paddle.seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def train(model: Any, recorder: Any, steps: int = 2, micro: int = 1) -> None:
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(steps):
        for _ in range(micro):
            model(paddle.randn([3, 4])).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        recorder.step()


def missed(path: Path) -> dict[str, str]:
    return {what: why for what, why, _ in json.loads((path / "rank0/end.json").read_text())["missed"]}


def test_calls_have_the_names_and_lines_of_the_program(tmp_path: Path) -> None:
    model = Transformer()
    with astray.record(tmp_path / "run", model, level="module,function"):
        model(paddle.randint(0, 32, [2, 8]))
    run = astray.open(tmp_path / "run")
    assert run.info.framework == "paddle"
    assert run.info.versions["paddle"] == paddle.__version__
    calls = run.ranks[0].calls
    kinds = {calls.row(i)["site"]: (calls.row(i)["type"], calls.row(i)["kind"]) for i in range(len(calls))}
    assert kinds["<root>"] == ("Transformer", "module")
    assert kinds["h.1.attn"] == ("Attention", "module")
    assert kinds["h.1.attn.qkv/linear"] == ("paddle._C_ops.linear", "function")
    assert kinds["h.0.attn/matmul"] == ("paddle.Tensor.__matmul__", "function")
    assert kinds["h.0.attn/softmax"][0] == "paddle._C_ops.softmax"
    (softmax,) = rows(run, site="h.0.attn/softmax", role="output")
    frames = run.ranks[0].stack(softmax["stack"])
    assert frames[0].code == "weights = self.drop(F.softmax(scores + mask))"
    assert not any("paddle/nn" in frame.file for frame in frames)


def test_every_number_is_that_of_numpy(tmp_path: Path) -> None:
    model = ConvNet()
    with astray.record(tmp_path / "run", model, level="module,function", keep="stats,tensors") as recorder:
        F.cross_entropy(model(paddle.randn([4, 3, 8, 8])), paddle.randint(0, 5, [4])).backward()
        recorder.step()
    run = astray.open(tmp_path / "run")
    checked = 0
    for row in rows(run):
        values = run.ranks[0].values(row["row"])
        if values is None or not values.size or row["dtype"] != "float32":
            continue
        exact = values.astype(np.float64)
        assert row["shape"] == values.shape
        np.testing.assert_allclose(row["mean"], exact.mean(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(row["std"], exact.std(), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(row["l2"], np.sqrt((exact**2).sum()), rtol=1e-12)
        assert (row["min"], row["max"]) == (exact.min(), exact.max())
        checked += 1
    assert checked > 40


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int32", "int64", "bool", "uint8", "complex64"])
def test_dtypes_and_strides(dtype: str, tmp_path: Path) -> None:
    values = paddle.arange(24, dtype="float32").reshape([4, 6]).astype(dtype)
    turned = values if dtype == "complex64" else values.transpose([1, 0])
    model = two_layers()
    with astray.record(tmp_path / "run", model, keep="stats,tensors") as recorder:
        recorder.save("plain", values)
        recorder.save("turned", turned)
    run = astray.open(tmp_path / "run")
    for name, tensor in (("plain", values), ("turned", turned)):
        (row,) = rows(run, site=name)
        assert row["dtype"] == dtype
        kept = run.tensor(astray_key(name))
        np.testing.assert_array_equal(kept, tensor.astype("float32").numpy() if dtype == "bfloat16" else tensor.numpy())


def astray_key(site: str) -> Any:
    from astray.records import Key

    return Key(0, 0, site, 0, "forward", "output", "out")


def test_what_is_written_past_every_counter_is_measured_again(tmp_path: Path) -> None:
    """Running statistics, `set_value` and optimizers do not raise a tensor's version."""
    model = ConvNet()
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    images = paddle.randn([4, 3, 8, 8])
    with astray.record(tmp_path / "run", model, keep="stats,tensors", optimizer="weight") as recorder:
        for _ in range(2):
            model(images).square().mean().backward()
            model.head.weight.set_value(model.head.weight * 0.5)
            model(images)
            optimizer.step()
            recorder.step()
    run = astray.open(tmp_path / "run")
    (means,) = [[run.ranks[0].values(r["row"]) for r in rows(run, site="norm", role="state", path="_mean")]]
    assert len({mean.tobytes() for mean in means}) == len(means) == 4
    heads = [run.ranks[0].values(row["row"]) for row in rows(run, site="head", role="parameter", path="weight", step=0)]
    assert len(heads) == 2
    np.testing.assert_array_equal(heads[1], heads[0] * np.float32(0.5))
    numbers = [row["value"] for row in rows(run, path="weight") if row["site"] in ("head", "head.weight")]
    assert len(set(numbers)) > 3


def test_settings_select(tmp_path: Path) -> None:
    def recorded(**settings: Any) -> Any:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        model = two_layers()
        with astray.record(path, model, **settings) as recorder:
            train(model, recorder, steps=3)
        return astray.open(path)

    assert {row["site"] for row in rows(recorded(match="^2"))} == {"2", "2.weight", "2.bias"}
    assert {row["site"] for row in rows(recorded(classes="ReLU"), kind="module")} == {"1"}
    assert {row["step"] for row in rows(recorded(steps="1:2"))} == {1}
    assert {row["phase"] for row in rows(recorded(phases="forward"))} == {"forward"}
    assert {row["role"] for row in rows(recorded(roles="output"))} == {"output"}
    assert {row["site"] for row in rows(recorded(scope=("1", "1")), phase="forward")} == {"1"}
    assert len(rows(recorded(max_tensors=5))) == 5
    sampled = recorded(keep="sample", samples=4)
    assert all(sampled.ranks[0].values(row["row"]).size <= 4 for row in rows(sampled, role="input"))
    named = recorded(level="module,function", functions=["relu", "paddle.Tensor.__add__"])
    assert {row["site"] for row in rows(named, kind="function")} == {"1/relu"}


def test_pauses_and_saved_values(tmp_path: Path) -> None:
    model = two_layers()
    x = paddle.randn([3, 4])
    with astray.record(tmp_path / "run", model, keep="tensors") as recorder:
        with recorder.pause():
            model(x)
        hidden = model[0](x)
        recorder.save("nest", {"hidden": hidden, "number": 3.5, "array": np.arange(3)})
        model[2](model[1](hidden)).sum().backward()
    run = astray.open(tmp_path / "run")
    assert outline(run, site="nest") == [
        "nest forward output out.hidden", "nest forward output out.number", "nest forward output out.array",
        "nest backward input out.hidden",
    ]  # fmt: skip
    assert len(rows(run, site="0", phase="forward", role="output")) == 1


def test_a_model_may_change_while_it_is_recorded(tmp_path: Path) -> None:
    class Growing(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.LayerList([nn.Linear(4, 4)])

        def forward(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    model = Growing()
    x = paddle.ones([2, 4])
    with astray.record(tmp_path / "run", model) as recorder:
        model(x)
        model.parts.append(nn.Linear(4, 4))
        recorder.step()
        model(x).sum().backward()
        recorder.step()
        model.parts[0] = nn.ReLU()
        model(x)
    run = astray.open(tmp_path / "run")
    assert outline(run, step=0, role="output") == ["parts.0 forward output out", "<root> forward output out"]
    assert outline(run, step=1, role="output", phase="forward") == [
        "parts.0 forward output out", "parts.1 forward output out", "<root> forward output out",
    ]  # fmt: skip
    assert "parts.1.weight backward gradient grad" in outline(run, step=1)
    assert rows(run, step=2, site="parts.0")[0]["type"] == "ReLU"


def test_programs_of_to_static_are_left_alone(tmp_path: Path) -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(4, 4)
            self.static = paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

        def forward(self, x: Any) -> Any:
            return self.static(self.plain(x))

    numbers = []
    for path in (None, tmp_path / "run"):
        paddle.seed(0)
        model = Model()
        recorder = astray.record(path, model, level="module,function") if path else None
        for _ in range(2):
            loss = model(paddle.randn([2, 4])).sum()
            loss.backward()
            numbers.append(loss.numpy().tobytes())
        numbers.append(model.static[0].weight.grad.numpy().tobytes())
        if recorder is not None:
            recorder.stop()
    assert numbers[:3] == numbers[3:]
    run = astray.open(tmp_path / "run")
    assert {row["site"].partition("/")[0] for row in rows(run, kind="module")} == {"<root>", "plain", "static"}
    assert missed(tmp_path / "run")["calls inside static"] == "paddle.jit.to_static runs it as one program"


def test_a_copy_takes_nothing_of_a_recording_along(tmp_path: Path) -> None:
    model = two_layers()
    kept: list[Any] = []
    model[0].register_forward_pre_hook(lambda layer, inputs: kept.append(1))
    with astray.record(tmp_path / "run", model):
        copied = copy.deepcopy(model)
        copied(paddle.ones([2, 4]))
    assert [len(layer._forward_pre_hooks) for layer in copied.sublayers(include_self=True)] == [0, 1, 0, 0]
    assert "__reduce_ex__" not in vars(nn.Layer)
    assert len(kept) == 1
    assert len(rows(astray.open(tmp_path / "run"))) == 0


def _state_of_paddle() -> list[Any]:
    """Everything in Paddle that a recording replaces."""
    watched = [vars(_C_ops).items(), vars(paddle.Tensor).items(), vars(nn.Layer).items(), vars(F).items()]
    watched += [vars(paddle.distributed).items(), vars(paddle.amp.AmpScaler).items()]
    watched += [vars(kind).items() for kind in (Optimizer, *Optimizer.__subclasses__(), *optimizer_wrappers())]
    return [(name, id(value)) for items in watched for name, value in list(items)]


def test_nothing_remains_after_the_end(tmp_path: Path) -> None:
    before = _state_of_paddle()
    model = two_layers()
    recorder = astray.record(
        tmp_path / "run", model, level="module,function", optimizer="gradient,state,update,weight", keep="stats,tensors"
    )
    assert _state_of_paddle() != before
    train(model, recorder)
    loss = model(paddle.randn([3, 4])).sum()  # a graph that outlives the recording
    recorder.stop()
    engine = weakref.ref(recorder._adapter._engine)
    del recorder
    gc.collect()
    assert _state_of_paddle() == before
    assert engine() is None
    layers = model.sublayers(include_self=True)
    assert not any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in layers)
    loss.backward()
    del loss
    gc.collect()
    assert _paddle.living() == 0


def test_steps_that_are_not_recorded_have_no_hooks(tmp_path: Path) -> None:
    model = two_layers()
    before = _state_of_paddle()
    with astray.record(tmp_path / "run", model, level="module,function", steps="1") as recorder:
        hooked = []
        for _ in range(3):
            hooked.append((len(model._forward_pre_hooks), dict(_state_of_paddle()) != dict(before)))
            model(paddle.ones([2, 4]))
            recorder.step()
    assert [count for count, _ in hooked] == [0, 1, 0]


def test_what_raises_is_said_and_passed_on(tmp_path: Path) -> None:
    class Raising(nn.Layer):
        def forward(self, x: Any) -> Any:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(4, 4), Raising())
    with astray.record(tmp_path / "run", model, level="module,function"):
        with pytest.raises(ZeroDivisionError):
            model(paddle.ones([2, 4]))
        with pytest.raises(ValueError, match=r"matmul|shape|Width|dimension"):
            model[0](paddle.ones([2, 5]))
        model[0](paddle.ones([2, 4]))
    found = missed(tmp_path / "run")
    assert found["the output of 1"] == "it raised ZeroDivisionError"
    assert found["the output of <root>"] == "it raised ZeroDivisionError"


def test_models_of_two_frameworks_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(astray.errors.RecordError, match="of torch and of Paddle"):
        astray.record(tmp_path / "run", {"one": two_layers(), "other": torch.nn.Linear(2, 2)})
    with pytest.raises(astray.errors.RecordError, match=r"torch\.nn\.Module or a paddle\.nn\.Layer"):
        astray.record(tmp_path / "run", 3)


def test_two_models_by_name(tmp_path: Path) -> None:
    models = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)}
    with astray.record(tmp_path / "run", models):
        models["second"](models["first"](paddle.ones([1, 2])))
    assert outline(astray.open(tmp_path / "run"), role="output") == [
        "first forward output out", "second forward output out",
    ]  # fmt: skip


def test_setup_names_what_layers_and_optimizers_are_set_to(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, epsilon=1e-3), nn.Dropout(0.25))
    optimizer = paddle.optimizer.AdamW(
        1e-2, beta1=0.8, parameters=model.parameters(), grad_clip=nn.ClipGradByNorm(0.5), weight_decay=0.1
    )
    with astray.record(tmp_path / "run", model) as recorder:
        model(paddle.ones([2, 4])).sum().backward()
        optimizer.step()
        recorder.step()
    notes = {(note.subject, note.site): note.values for note in astray.open(tmp_path / "run").ranks[0].setup}
    assert notes["module", "1"]["epsilon"] == 1e-3
    assert notes["module", "2"]["p"] == 0.25
    group = notes["optimizer", "AdamW/param_groups.0"]
    assert (group["lr"], group["class"], group["parameters"][0]) == (0.01, "AdamW", "0.weight")
    assert group["grad_clip"] == "ClipGradByNorm(clip_norm=0.5)"
    assert notes["paddle", ""]["default_dtype"] == "float32"


def test_sub_classes_of_tensors_and_empty_ones(tmp_path: Path) -> None:
    model = two_layers()
    with astray.record(tmp_path / "run", model, level="module,function") as recorder:
        recorder.save("empty", paddle.zeros([0, 3]))
        recorder.save("scalar", paddle.to_tensor(2.0))
        recorder.save("sparse", paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], [2, 2]))
        recorder.save("none", [None, "text"])
    run = astray.open(tmp_path / "run")
    assert [row["shape"] for row in rows(run, site="empty")] == [(0, 3)]
    assert rows(run, site="scalar")[0]["mean"] == 2.0
    assert rows(run, site="sparse")[0]["note"] == "its layout is sparse"
    assert "paddle" in sys.modules


@pytest.mark.parametrize("first_ends", [True, False])
def test_two_recordings_at_once(first_ends: bool, tmp_path: Path) -> None:
    before = _state_of_paddle()
    models = two_layers(), two_layers()
    names = "one", "other"
    recorders = [
        astray.record(tmp_path / name, model, level="module,function", optimizer="weight")
        for name, model in zip(names, models, strict=True)
    ]
    for model, recorder in zip(models, recorders, strict=True):
        train(model, recorder)
    for recorder in recorders if first_ends else recorders[::-1]:
        recorder.stop()
    assert _state_of_paddle() == before
    seen = [
        {row["site"] for row in rows(astray.open(tmp_path / name)) if row["site"].partition("/")[0]} for name in names
    ]
    assert seen[0] == seen[1] == {
        "<root>", "0", "1", "2", "0/linear", "1/relu", "2/linear", "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip


def test_labels_of_a_loss_outside_of_all_layers(tmp_path: Path) -> None:
    model = two_layers()
    labels = paddle.to_tensor([1, 0, 1])
    with astray.record(tmp_path / "run", model):
        F.cross_entropy(model(paddle.randn([3, 4])), labels).backward()
        nn.CrossEntropyLoss()(model(paddle.randn([3, 4])), label=labels)
    found = rows(astray.open(tmp_path / "run"), site="/cross_entropy")
    assert [(row["path"], row["dtype"], row["mean"]) for row in found] == [("label", "int64", 2 / 3)] * 2


def test_limits_of_clipping_are_settings_of_the_optimizer(tmp_path: Path) -> None:
    model = two_layers()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with astray.record(tmp_path / "run", model) as recorder:
        model(paddle.randn([3, 4])).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        recorder.step()
    notes = {(note.subject, note.site): note.values for note in astray.open(tmp_path / "run").ranks[0].setup}
    group = notes["optimizer", "SGD/param_groups.0"]
    assert (group["clip_grad_norm"], group["clip_grad_value"]) == (0.25, "off")


def test_a_number_that_is_read_is_no_call(tmp_path: Path) -> None:
    """It would begin a step of its own after the last one has ended."""
    model = two_layers()
    with astray.record(tmp_path / "run", model, level="module,function") as recorder:
        loss = model(paddle.randn([3, 4])).sum()
        recorder.step()
        assert loss.item() == float(loss)
    assert astray.open(tmp_path / "run").steps == [0]


def test_what_works_with_pytorch_alone_is_refused(tmp_path: Path) -> None:
    model = two_layers()
    with pytest.raises(astray.errors.RecordError, match=r"perturb= works with PyTorch so far"):
        astray.record(tmp_path / "run", model, perturb=True)
    assert not (tmp_path / "run").exists()
    with (
        pytest.raises(astray.errors.UsageError, match="a layer of Paddle"),
        astray.experiment.swap(model, "0", to="float64"),
    ):
        pass
    with astray.record(tmp_path / "run", model, keep="tensors"):
        model(paddle.randn([3, 4]))
    with pytest.raises(astray.errors.RunError, match="only calls of PyTorch can be replayed"):
        astray.open(tmp_path / "run").replay()
