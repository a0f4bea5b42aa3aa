"""Weights into layers of Paddle, and out of them: what they are called there, and how they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

import torch  # noqa: E402

import astray  # noqa: E402
from astray.errors import StateError  # noqa: E402
from frameworks import paddle_twins, torch_twins  # noqa: E402

pytestmark = pytest.mark.paddle


def twins(kind: str, seed: int = 0) -> tuple[Any, Any]:
    """A model of torch, and the same one of Paddle with other weights. Running statistics are not 0 and 1."""
    torch.manual_seed(seed)
    paddle.seed(seed + 1)
    model, layer = getattr(torch_twins, kind)(), getattr(paddle_twins, kind)()
    if kind == "ConvNet":
        model(torch.randn(4, 3, 10, 10))
    return model.eval(), layer.eval()


def results(kind: str, model: Any, layer: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    given = (
        random.integers(0, 13, (2, 6))
        if kind == "Transformer"
        else random.normal(size=(2, 3, 10, 10)).astype("float32")
    )
    return model(torch.tensor(given)).detach().numpy(), layer(paddle.to_tensor(given)).numpy()


@pytest.mark.parametrize("kind", ["Transformer", "ConvNet"])
@pytest.mark.parametrize("source", ["model", "state_dict", "checkpoint", "safetensors", "run"])
def test_weights_of_torch_into_a_layer(tmp_path: Path, kind: str, source: str) -> None:
    model, layer = twins(kind)
    given: Any = model if source == "model" else model.state_dict()
    if source == "checkpoint":
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        given = tmp_path / "weights.pt"
    elif source == "safetensors":
        from safetensors.torch import save_file

        save_file(model.state_dict(), tmp_path / "weights.safetensors")
        given = tmp_path / "weights.safetensors"
    elif source == "run":
        with astray.record(tmp_path / "run", model, keep="tensors") as rec:
            results(kind, model, layer)
            rec.step()
        given = tmp_path / "run"
    loaded = astray.load_from(given, layer)
    one, other = results(kind, model, layer)
    assert np.allclose(one, other, atol=1e-6)
    assert {*loaded.layouts.values()} == {"transpose"}
    unused = {name.rpartition(".")[2] for name in loaded.unused}
    assert unused == ({"num_batches_tracked"} if kind == "ConvNet" else set())


@pytest.mark.parametrize("kind", ["Transformer", "ConvNet"])
@pytest.mark.parametrize("source", ["layer", "pdparams", "run"])
def test_weights_of_paddle_into_a_module(tmp_path: Path, kind: str, source: str) -> None:
    model, layer = twins(kind)
    given: Any = layer
    if source == "pdparams":
        paddle.save(layer.state_dict(), str(tmp_path / "weights.pdparams"))
        given = tmp_path / "weights.pdparams"
    elif source == "run":
        with astray.record(tmp_path / "run", layer, keep="tensors") as rec:
            results(kind, model, layer)
            rec.step()
        given = tmp_path / "run"
    loaded = astray.load_from(given, model)
    one, other = results(kind, model, layer)
    assert np.allclose(one, other, atol=1e-6)
    kept = {name.rpartition(".")[2] for name in loaded.kept}
    assert kept == ({"num_batches_tracked"} if kind == "ConvNet" else set())


def test_weights_go_there_and_come_back_as_they_were() -> None:
    model, layer = twins("Transformer")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    astray.load_from(model, layer)
    fresh, _ = twins("Transformer", seed=5)
    astray.load_from(layer, fresh)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_layers_keep_their_tensors_dtypes_and_gradients() -> None:
    model, layer = twins("Transformer")
    layer.to(dtype="bfloat16")
    tensors = {name: id(value) for name, value in layer.named_parameters()}
    loaded = astray.load_from(model, layer)
    for name, value in layer.named_parameters():
        assert (id(value), str(value.dtype)) == (tensors[name], "paddle.bfloat16")
        assert not value.stop_gradient
        wanted = dict(model.named_parameters())[name].detach()
        wanted = wanted.T if name in loaded.layouts else wanted
        assert np.array_equal(value.astype("float32").numpy(), wanted.bfloat16().float().numpy()), name
    assert loaded.converted["head.weight"] == "float32 to bfloat16"


def test_a_draft_of_a_comparison_serves_in_both_directions(tmp_path: Path) -> None:
    from astray.cli import main

    model, layer = twins("ConvNet")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    paddle.save(layer.state_dict(), str(tmp_path / "b.pdparams"))
    file = str(tmp_path / "map.yaml")
    assert main(["map", str(tmp_path / "a.pt"), str(tmp_path / "b.pdparams"), "-o", file]) == 0
    astray.load_from(model, layer, map=file)
    one, other = results("ConvNet", model, layer)
    assert np.allclose(one, other, atol=1e-6)
    paddle.save(layer.state_dict(), str(tmp_path / "b.pdparams"))
    assert astray.compare(tmp_path / "a.pt", tmp_path / "b.pdparams", mapping=file).same
    fresh, _ = twins("ConvNet", seed=7)
    astray.load_from(tmp_path / "b.pdparams", fresh, map=file)
    assert np.allclose(results("ConvNet", fresh, layer)[0], other, atol=1e-6)


def test_nothing_is_written_into_a_layer_that_does_not_fit() -> None:
    model, layer = twins("Transformer")
    before = {name: value.numpy().copy() for name, value in layer.state_dict().items()}
    state = dict(model.state_dict())
    del state["norm.weight"]
    with pytest.raises(StateError, match=r"Nothing was loaded: norm.weight \[16\] is not in the source"):
        astray.load_from(state, layer)
    for name, value in layer.state_dict().items():
        assert np.array_equal(value.numpy(), before[name]), name
