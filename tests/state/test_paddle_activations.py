"""Activations of Paddle's layers and their gradients: what passed, under which names, and that no hook remains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import astray
from astray.errors import StateError

pytestmark = pytest.mark.paddle
paddle = pytest.importorskip("paddle")


class Net(paddle.nn.Layer):  # type: ignore[misc]
    """A layer that is called twice, one that returns a tuple, and a result of both."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = paddle.nn.Linear(4, 4)
        self.lstm = paddle.nn.LSTM(4, 3)
        self.head = paddle.nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        x = self.fc(paddle.nn.functional.relu(self.fc(x)))
        return {"logits": self.head(self.lstm(x)[0])}


@pytest.fixture
def model() -> Any:
    paddle.seed(0)
    return Net()


def test_outputs_are_collected_in_order_and_share_memory(model: Any) -> None:
    x = paddle.randn([2, 5, 4])
    with astray.state.from_activation(model) as acts:
        logits = model(x)["logits"]
    assert list(acts) == ["fc", "fc#1", "lstm.0", "lstm.1.0", "lstm.1.1", "head", "<root>.logits"]
    assert np.array_equal(acts["head"].numpy(), logits.numpy())
    assert acts["<root>.logits"].data_ptr() == logits.data_ptr()
    assert np.allclose(acts["fc"].numpy(), (x @ model.fc.weight + model.fc.bias).numpy())
    assert acts.norm2() > 0
    model(x * 2)
    assert np.array_equal(acts["head"].numpy(), logits.numpy())  # the hooks are gone
    for layer in model.sublayers(include_self=True):
        assert not layer._forward_pre_hooks
        assert not layer._forward_post_hooks


def test_gradients_of_outputs(model: Any) -> None:
    seen = []
    with astray.state.from_activation_grad(model, "(?!lstm)", clone=True) as grads:
        logits = model(paddle.randn([2, 5, 4]))["logits"]
        logits.register_hook(lambda gradient: seen.append(gradient.numpy().copy()))
        (logits * logits).sum().backward()
    assert list(grads) == ["fc", "fc#1", "head", "<root>.logits"]
    assert np.array_equal(grads["head"].numpy(), seen[0])
    assert np.allclose(grads["head"].sum((0, 1)).numpy(), model.head.bias.grad.numpy(), rtol=1e-5)


def test_a_forward_inside_of_a_backward_is_not_another_one(model: Any) -> None:
    from paddle.distributed.fleet.utils import recompute

    class Outer(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inside = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.ReLU())

        def forward(self, x: Any) -> Any:
            return recompute(self.inside, x)

    outer, x = Outer(), paddle.randn([2, 4])
    x.stop_gradient = False
    with astray.state.from_activation(outer) as acts:
        outer(x).sum().backward()
        assert set(acts) == {"inside.0", "inside.1", "inside", "<root>"}


def test_bfloat16_and_what_is_no_model() -> None:
    layer = paddle.nn.Flatten()  # a CPU has no product of matrices in bfloat16
    with astray.state.from_activation(layer) as acts:
        layer(paddle.ones([1, 2], "bfloat16"))
    assert acts["<root>"].dtype == torch.bfloat16
    with pytest.raises(StateError, match="A int was given"):
        astray.state.from_activation(3)
