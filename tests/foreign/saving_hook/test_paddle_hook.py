"""A program of Paddle that was written for the saving hook runs with the import changed and nothing else."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import astray
from astray.compat.saving_hook import register_hook, register_saving_hook, remove_saving_hook
from astray.foreign.saving_hook.files import FileName, FolderName, parse

pytestmark = pytest.mark.paddle
paddle = pytest.importorskip("paddle")

from paddle import nn  # noqa: E402
from paddle.distributed.fleet.utils import recompute  # noqa: E402
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer  # noqa: E402

from foreign.saving_hook.paddle_llama import (  # noqa: E402
    CLASSES,
    Llama,
    LlamaRMSNorm,
    Trainer,
    batch,
    build,
    gradients_of,
    parameters_of,
)  # fmt: skip

CASES = Path(__file__).parents[2] / "cases" / "precision_checker"
PATCHED = [
    paddle.base.core.eager,
    paddle.Tensor,
    nn.Layer,
    paddle.optimizer.Optimizer,
    paddle.optimizer.AdamW,
    paddle.amp.GradScaler,
]


class Recomputed(Llama):
    """A Llama whose decoder layers are computed again in the backward pass."""

    def forward(self, ids: Any) -> Any:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = recompute(layer, x)
        return nn.functional.cross_entropy(self.lm_head(self.norm(x))[:, :-1], ids[:, 1:])


@pytest.fixture
def model() -> Iterator[Any]:
    one = build()
    yield one
    remove_saving_hook(one)


def files(path: Path, folder: FolderName, rank: int = 0) -> dict[FileName, np.ndarray[Any, Any]]:
    """What was saved, in order."""
    found = {}
    for file in (path / folder / f"rank_{rank}").iterdir():
        saved = parse(folder, file.name)
        assert saved is not None, file
        found[saved] = np.load(file)
    return dict(sorted(found.items()))


def hooks_of(model: Any) -> list[Any]:
    layers = [model, *model.sublayers()]
    return [
        hook for layer in layers for hook in (*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values())
    ]


def test_names_and_shapes_are_those_of_the_original(tmp_path: Path) -> None:
    """The case was made by the original tool, on these layers."""
    with paddle.utils.unique_name.guard():
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    register_saving_hook(model, path=str(tmp_path), target_class_names=["Linear", "LayerNorm"])
    for _ in range(3):
        model(paddle.ones([2, 4])).sum().backward()
    remove_saving_hook(model)
    for folder in ("tensors", "grads"):
        expected = {file.name: np.load(file) for file in (CASES / "A" / folder / "rank_0").iterdir()}
        there = {file.name: np.load(file) for file in (tmp_path / folder / "rank_0").iterdir()}
        assert there.keys() == expected.keys()
        for name, values in there.items():
            assert (values.shape, values.dtype) == (expected[name].shape, expected[name].dtype), name


def test_the_example_of_the_documentation(model: Any, tmp_path: Path) -> None:
    before = [gradients_of(model, micro) for micro in range(2)]
    model = register_saving_hook(
        model,
        path=str(tmp_path / "tmp_tensors"),
        target_class_names=["ColumnSequenceParallelLinear", "RowSequenceParallelLinear", "LlamaRMSNorm"],
        max_saved_tensors=100,
        max_saved_grads=200,
    )
    Trainer(model).train()
    remove_saving_hook(model)
    tensors, gradients = files(tmp_path / "tmp_tensors", "tensors"), files(tmp_path / "tmp_tensors", "grads")
    of_layer = ["llama_rms_norm_{0}", "column_sequence_parallel_linear_{0}", "row_sequence_parallel_linear_{0}"]
    order = [name.format(number) for number in range(4) for name in of_layer] + ["llama_rms_norm_4"]
    assert [saved.site for saved in tensors] == 4 * order
    assert [(saved.idx, saved.micro) for saved in tensors] == [(at, at // 13) for at in range(52)]
    assert {saved.type for saved in tensors} == set(CLASSES)
    assert [(saved.idx, saved.micro) for saved in gradients] == [(at, at // 21) for at in range(84)]
    assert {saved.site for saved in gradients if saved.micro == 3} == {
        *(f"llama_rms_norm_{number}.w_0" for number in range(5)),
        *(f"{kind}_sequence_parallel_linear_{number}.{name}" for kind in ("column", "row") for number in range(4)
          for name in ("w_0", "b_0")),
    }  # fmt: skip
    for saved, values in gradients.items():  # not what has accumulated
        if saved.micro < 2:
            assert np.array_equal(2 * values, before[saved.micro][saved.site]), saved


@pytest.mark.parametrize("registered", ["before", "after"])
def test_gradients_are_those_before_main_grad_accumulates(registered: str, tmp_path: Path) -> None:
    """Whether mixed precision has put its hooks on the parameters before ours or after."""
    plain = build()
    expected = [gradients_of(plain, micro) for micro in range(3)]
    model = build()
    if registered == "before":
        register_saving_hook(model, tmp_path, CLASSES)
    mixed = MixPrecisionLayer(model, dtype="bfloat16")
    if registered == "after":
        register_saving_hook(model, tmp_path, CLASSES)
    for micro in range(3):
        mixed(batch(micro)).backward()
    remove_saving_hook(model)
    gradients = files(tmp_path, "grads")
    assert len(gradients) == 3 * 21
    for saved, values in gradients.items():
        assert np.array_equal(values, expected[saved.micro][saved.site]), saved
    for parameter in model.parameters():
        assert parameter.grad is None
        sums = sum(of_micro[parameter.name].astype(np.float64) for of_micro in expected)
        assert np.allclose(parameter.main_grad.numpy(), sums, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_the_tmp_gradient_has_its_own_dtype(registered: str, tmp_path: Path) -> None:
    """float16 stays float16, and bfloat16 becomes float32, while `main_grad` is float32 from the start."""

    class Scale(nn.Layer):
        def __init__(self, dtype: str) -> None:
            super().__init__()
            self.weight = self.create_parameter([3], dtype=dtype, default_initializer=nn.initializer.Constant(1.0))

        def forward(self, x: Any) -> Any:
            return self.weight.astype("float32") * x

    with paddle.utils.unique_name.guard():
        model = nn.Sequential(Scale("float16"), Scale("bfloat16"))
    if registered == "before":
        register_saving_hook(model, tmp_path, "Scale")
    mixed = MixPrecisionLayer(model, dtype="float16")
    if registered == "after":
        register_saving_hook(model, tmp_path, "Scale")
    x = paddle.to_tensor(np.array([1.0, 2.0, 1 / 3], np.float32))
    for _ in range(2):
        mixed(x).sum().backward()
    remove_saving_hook(model)
    third = {"scale_0.w_0": np.float16(1 / 3), "scale_1.w_0": np.float32(0.333984375)}
    gradients = files(tmp_path, "grads")
    assert [saved.micro for saved in gradients] == [0, 0, 1, 1]
    for saved, values in gradients.items():
        assert values.dtype == third[saved.site].dtype
        assert values.tolist() == [1.0, 2.0, float(third[saved.site])]


def test_main_grad_after_a_backward_pass_inside_the_backward_pass(tmp_path: Path) -> None:
    """Recompute runs one for each layer. The embedding's gradient arrives after them."""
    expected = gradients_of(build(), 0)["embedding_0.w_0"]
    model = build(Recomputed)
    mixed = MixPrecisionLayer(model, dtype="bfloat16")
    register_saving_hook(model, tmp_path, "Embedding")
    mixed(batch(0)).backward()
    remove_saving_hook(model)
    (values,) = files(tmp_path, "grads").values()
    assert np.allclose(values, expected, rtol=1e-4, atol=1e-6)
    assert np.abs(values).max() > 0.01


def test_a_recording_has_both_gradients_with_main_grad(tmp_path: Path) -> None:
    expected = [gradients_of(build(), micro)["linear_0.w_0"] for micro in range(2)]
    model = build()
    mixed = MixPrecisionLayer(model, dtype="bfloat16")
    with astray.record(tmp_path / "run", model, keep="tensors"):
        for micro in range(2):
            mixed(batch(micro)).backward()
    run = astray.open(tmp_path / "run")
    for micro in range(2):
        key = astray.Key(0, micro, "lm_head.weight", 0, "backward", "gradient", "added")
        assert np.array_equal(run.tensor(key), expected[micro])
        assert np.array_equal(run.tensor(key._replace(path="grad")), sum(expected[: micro + 1]))


def test_what_a_layer_adds_to_main_grad_itself_is_not_taken_for_a_gradient(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Fused(paddle.autograd.PyLayer):
        @staticmethod
        def forward(context: Any, x: Any, weight: Any) -> Any:
            context.x, context.weight = x, weight
            return x * weight

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            with paddle.no_grad():
                context.weight.main_grad.add_((gradient * context.x).sum(0))
            return gradient * context.weight, None

    class Scale(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([3])
            self.weight.main_grad = paddle.zeros([3])

        def forward(self, x: Any) -> Any:
            return Fused.apply(x, self.weight)

    with paddle.utils.unique_name.guard():
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    register_saving_hook(model, tmp_path)
    for _ in range(2):
        model(paddle.ones([2, 3])).sum().backward()
    with caplog.at_level(logging.WARNING, "astray"):
        remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "grads")} == {"linear_0.w_0", "linear_0.b_0"}
    assert caplog.messages == [
        f"Not saved in {tmp_path}: what a backward pass has added to the gradient of 1.weight (a layer or another hook "
        "added it to main_grad where it cannot be seen), 2 times."
    ]


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ("Linear", ["linear_0"]),  # and not the classes made of it
        (["Linear", "LlamaDecoderLayer"], ["linear_0"]),  # a decoder layer is not a leaf
        (["Embedding", "Linear"], ["embedding_0", "linear_0"]),
    ],
)
def test_classes_are_matched_exactly(model: Any, tmp_path: Path, classes: Any, names: list[str]) -> None:
    assert register_hook(model, tmp_path, classes) is model
    Trainer(model).train(1)
    remove_saving_hook(model)
    assert [saved.site for saved in files(tmp_path, "tensors")] == names
    assert {saved.site.partition(".")[0] for saved in files(tmp_path, "grads")} == set(names)


def test_without_classes_all_leaf_layers_are_saved(model: Any, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path)
    Trainer(model).train(1)
    remove_saving_hook(model)
    assert len(files(tmp_path, "tensors")) == 13 + 2
    assert len(files(tmp_path, "grads")) == 21 + 3


def test_a_class_that_is_not_there_is_said(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "astray"):
        register_saving_hook(model, tmp_path / "a", ["LlamaRMSnorm"])
    assert caplog.messages == [
        "No leaf layer of the Llama is of the class 'LlamaRMSnorm'. Did you mean 'LlamaRMSNorm'?",
    ]
    assert hooks_of(model) == []


@pytest.mark.parametrize(("tensors", "gradients"), [(9, 30), (30, 9)])
def test_limits_end_the_recording(model: Any, tmp_path: Path, tensors: int, gradients: int) -> None:
    """Whichever limit is reached first, nothing of ours remains."""
    before = [dict(vars(kind)) for kind in PATCHED]
    register_saving_hook(model, tmp_path, max_saved_tensors=tensors, max_saved_grads=gradients)
    for _ in range(500):  # the recorder's thread writes them in its own time
        Trainer(model).train(2)
        if not hooks_of(model):
            break
    assert hooks_of(model) == []
    assert [saved.idx for saved in files(tmp_path, "tensors")] == list(range(tensors))
    assert [saved.idx for saved in files(tmp_path, "grads")] == list(range(gradients))
    assert [dict(vars(kind)) for kind in PATCHED] == before
    register_saving_hook(model, tmp_path / "again")  # and another can begin


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_above_zero_is_none(model: Any, tmp_path: Path, limit: int) -> None:
    register_saving_hook(model, tmp_path, None, limit, limit)
    Trainer(model).train(8)
    remove_saving_hook(model)
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (15 * 8, 24 * 8)


def test_limits_of_each_micro_step(model: Any, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path, max_saved_tensors_per_step=2, max_saved_grads_per_step=3)
    Trainer(model).train(8)
    remove_saving_hook(model)
    assert [saved.micro for saved in files(tmp_path, "tensors")] == [at // 2 for at in range(16)]
    assert [saved.micro for saved in files(tmp_path, "grads")] == [at // 3 for at in range(24)]


@pytest.mark.parametrize("main_grad", [False, True])
def test_no_bit_of_the_training_changes(main_grad: bool, tmp_path: Path) -> None:
    bare, watched = build(), build()
    Trainer(bare, main_grad=main_grad).train(6)
    register_saving_hook(watched, tmp_path, max_saved_tensors=7, max_saved_grads=-1)
    Trainer(watched, main_grad=main_grad).train(6)
    remove_saving_hook(watched)
    for (name, one), (_, other) in zip(parameters_of(bare), parameters_of(watched), strict=True):
        assert one.tobytes() == other.tobytes(), name
    assert hooks_of(watched) == []


def test_tuples_are_taken_apart(tmp_path: Path) -> None:
    with paddle.utils.unique_name.guard():
        model = nn.Sequential(nn.Linear(4, 3), nn.SimpleRNN(3, 2))
    register_saving_hook(model, tmp_path, ["Linear", "SimpleRNN", "SimpleRNNCell"])
    model(paddle.ones([1, 5, 4]))
    remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "tensors")} >= {"linear_0"}

    class Pair(nn.Layer):
        def forward(self, x: Any) -> Any:
            return x * 2, {"k": x + 1}

    with paddle.utils.unique_name.guard():
        model = nn.Sequential(Pair())
    register_saving_hook(model, tmp_path / "pair")
    model(paddle.ones([2]))
    remove_saving_hook(model)
    assert [(saved.site, saved.path) for saved in files(tmp_path / "pair", "tensors")] == [
        ("pair_0", "out.0"), ("pair_0", "out.1.k"),
    ]  # fmt: skip


def test_a_parameter_that_another_layer_has_too_is_saved_once(tmp_path: Path) -> None:
    class Tied(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.norm = LlamaRMSNorm()
            self.head = nn.Linear(5, 3, bias_attr=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Any) -> Any:
            return self.head(paddle.matmul(self.embedding(ids), self.embedding.weight, transpose_y=True))

    with paddle.utils.unique_name.guard():
        model = Tied()
    register_saving_hook(model, tmp_path, "Linear")
    model(paddle.to_tensor([1, 2])).sum().backward()
    remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "tensors")} == {"linear_0"}
    ((saved, values),) = files(tmp_path, "grads").items()
    assert saved.site == "embedding_0.w_0"
    assert np.array_equal(values, model.embedding.weight.grad.numpy())


def test_a_gradient_of_some_rows_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with paddle.utils.unique_name.guard():
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    register_saving_hook(model, tmp_path)
    model(paddle.to_tensor([1, 2])).sum().backward()
    with caplog.at_level(logging.WARNING, "astray"):
        remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "grads")} == {"linear_0.w_0", "linear_0.b_0"}
    assert [message.partition(": ")[2][:38] for message in caplog.messages] == [
        "a gradient that holds only some rows ("
    ]


def test_a_model_that_is_a_leaf_itself(tmp_path: Path) -> None:
    with paddle.utils.unique_name.guard():
        model = nn.Linear(4, 3)
    register_saving_hook(model, tmp_path)
    model(paddle.ones([2, 4])).sum().backward()
    remove_saving_hook(model)
    assert {saved.site for saved in files(tmp_path, "tensors")} == {"linear_0"}
    assert {saved.site for saved in files(tmp_path, "grads")} == {"linear_0.w_0", "linear_0.b_0"}


def test_forwards_before_their_backwards(model: Any, tmp_path: Path) -> None:
    """Gradients belong to the micro step whose forward they come from, in whatever order backwards run."""
    register_saving_hook(model, tmp_path, ["Linear"])
    losses = [model(batch(micro)) for micro in range(3)]
    for loss in reversed(losses):
        loss.backward()
    remove_saving_hook(model)
    gradients = files(tmp_path, "grads")
    assert [saved.micro for saved in gradients if saved.site == "linear_0.w_0"] == [2, 1, 0]


def test_limits_end_the_recording_of_a_pipeline(model: Any, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path, max_saved_tensors=9, max_saved_grads=30)
    for micro in range(500):
        model.forward(batch(micro)).backward()
        if not hooks_of(model):
            break
    assert hooks_of(model) == []
    assert (len(files(tmp_path, "tensors")), len(files(tmp_path, "grads"))) == (9, 30)


def test_forwards_of_pipelines_are_counted(model: Any, tmp_path: Path) -> None:
    """They call `forward` itself, past the hooks on the model; several forwards may come before their backwards."""
    expected = [gradients_of(model, micro) for micro in range(4)]
    register_saving_hook(model, tmp_path, [*CLASSES, "Embedding"], -1, -1)
    for first in (0, 2):
        losses = [model.forward(batch(micro)) for micro in (first, first + 1)]
        for loss in losses:
            loss.backward()
    remove_saving_hook(model)
    assert [saved.micro for saved in files(tmp_path, "tensors")] == [at // 14 for at in range(56)]
    gradients = files(tmp_path, "grads")
    assert [saved.micro for saved in gradients] == [at // 22 for at in range(88)]
    for saved, values in gradients.items():
        assert np.array_equal(values, expected[saved.micro][saved.site]), saved


def test_what_recompute_computes_again_is_saved_once(tmp_path: Path) -> None:
    model = build(Recomputed)
    register_saving_hook(model, tmp_path, CLASSES, -1, -1)
    for micro in range(2):
        model(batch(micro)).backward()
    remove_saving_hook(model)
    assert [saved.micro for saved in files(tmp_path, "tensors")] == [at // 13 for at in range(26)]
    assert [saved.micro for saved in files(tmp_path, "grads")] == [at // 21 for at in range(42)]


def test_a_copy_takes_no_hook_along(model: Any, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path / "a", CLASSES)
    other = copy.deepcopy(model)
    Trainer(other).train(1)
    Trainer(model).train(1)
    remove_saving_hook(model)
    assert len(files(tmp_path / "a", "tensors")) == 13
    register_saving_hook(other, tmp_path / "b", CLASSES)
    Trainer(other).train(1)
    remove_saving_hook(other)
    assert len(files(tmp_path / "b", "tensors")) == 13


def test_a_path_is_for_one_model(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    register_saving_hook(model, tmp_path / "a")
    with pytest.raises(astray.errors.RecordError, match=r"The tensors of a Llama are being saved in .*a already\."):
        register_saving_hook(build(), tmp_path / "a")
    Trainer(model).train(1)
    remove_saving_hook(model)
    remove_saving_hook(model)  # which does no harm
    with caplog.at_level(logging.WARNING, "astray"):
        register_saving_hook(model, tmp_path / "a", "Linear")
    home = tmp_path / "a" / "tensors" / "rank_0"
    assert caplog.messages[0] == f"{home} held 15 files of an earlier recording, which are replaced."


def test_a_dump_is_a_run(model: Any, tmp_path: Path) -> None:
    register_saving_hook(model, tmp_path, CLASSES)
    Trainer(model).train(2)
    remove_saving_hook(model)
    run = astray.open(tmp_path)
    assert run.problems == []
    values = run.tensor(astray.Key(0, 1, "llama_rms_norm_0", 0, "forward", "output", "out"))
    assert values.shape == (2, 5, 8)
