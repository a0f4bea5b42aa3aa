"""`astray.experiment.without_dropout`: nothing is dropped, no random number is drawn, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import astray

X = torch.arange(1.0, 65.0).reshape(2, 4, 8)

FUNCTIONS: dict[str, Callable[[], torch.Tensor]] = {
    "F.dropout": lambda: F.dropout(X),
    "F.dropout by position": lambda: F.dropout(X, 0.5, True),
    "F.dropout in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "F.dropout1d": lambda: F.dropout1d(X),
    "F.dropout2d": lambda: F.dropout2d(X[None])[0],
    "F.dropout3d": lambda: F.dropout3d(X[None, None])[0, 0],
    "F.alpha_dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "F.feature_alpha_dropout": lambda: F.feature_alpha_dropout(X, 0.5, training=True),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "torch.dropout by name": lambda: torch.dropout(X, p=0.5, train=True),
    "torch.dropout_": lambda: torch.dropout_(X.clone(), 0.5, True),
    "torch.alpha_dropout_": lambda: torch.alpha_dropout_(X.clone(), 0.5, True),
    "torch.feature_dropout": lambda: torch.feature_dropout(X, 0.5, True),
    "torch.feature_alpha_dropout_": lambda: torch.feature_alpha_dropout_(X.clone(), 0.5, True),
    "torch.native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "torch.ops.aten.native_dropout": lambda: torch.ops.aten.native_dropout(X, 0.5, True)[0],
    "torch.ops.aten.native_dropout.default": lambda: torch.ops.aten.native_dropout.default(X, 0.5, True)[0],
    "nn.Dropout": lambda: nn.Dropout(0.5)(X),
    "nn.Dropout2d": lambda: nn.Dropout2d(0.5)(X[None])[0],
    "nn.AlphaDropout": lambda: nn.AlphaDropout(0.5)(X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dropout_is_the_identity_and_draws_nothing(name: str) -> None:
    torch.manual_seed(0)
    assert not torch.equal(FUNCTIONS[name](), X)  # else this shows nothing
    before = torch.get_rng_state()
    with astray.experiment.without_dropout():
        dropped = FUNCTIONS[name]()
    assert torch.equal(dropped, X)
    assert torch.equal(torch.get_rng_state(), before)


def attended(dropout: float) -> torch.Tensor:
    return F.scaled_dot_product_attention(X, X, X, None, dropout)


def recurrent(kind: type[nn.RNNBase], packed: bool) -> tuple[nn.RNNBase, Any]:
    given = pack_padded_sequence(X, torch.tensor([2, 2, 1, 1])) if packed else X
    return kind(8, 8, 2, dropout=0.5), given


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "attention": lambda: (nn.MultiheadAttention(8, 2, dropout=0.5), (X, X, X)),
    "attention without weights": lambda: (nn.MultiheadAttention(8, 2, dropout=0.5), (X, X, X, None, False)),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5), (X,)),
    "decoder layer": lambda: (nn.TransformerDecoderLayer(8, 2, 16, dropout=0.5), (X, X)),
    **{
        f"{kind.__name__}{' packed' if packed else ''}": lambda kind=kind, packed=packed: (
            (made := recurrent(kind, packed))[0],
            (made[1],),
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for packed in (False, True)
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_training_computes_what_it_does_without_its_dropout(name: str) -> None:
    torch.manual_seed(0)
    layer, args = LAYERS[name]()
    before = torch.get_rng_state()
    with astray.experiment.without_dropout():
        found = first_tensor(layer(*args))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first_tensor(layer(*args)), found)
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    assert torch.equal(first_tensor(layer(*args)), found)


def first_tensor(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def test_attention_by_position() -> None:
    with astray.experiment.without_dropout():
        assert torch.equal(attended(0.5), attended(0.0))


def test_gradients_and_recomputation_are_without_dropout_too() -> None:
    x = X.clone().requires_grad_()
    with astray.experiment.without_dropout():
        checkpoint(lambda x: F.dropout(x * 2), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 2.0))


def test_nothing_is_replaced() -> None:
    dropout, layer = F.dropout, nn.Dropout(0.5)
    with astray.experiment.without_dropout():
        assert F.dropout is dropout
        assert layer.training
        assert layer.p == 0.5


def test_it_ends_with_the_block_also_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), astray.experiment.without_dropout():
        1 / 0  # noqa: B018
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.equal(F.dropout(X), X)


def test_it_decorates_a_function() -> None:
    @astray.experiment.without_dropout()
    def forward() -> torch.Tensor:
        return F.dropout(X)

    assert torch.equal(forward(), X)
    assert torch.equal(forward(), X)


def test_what_was_compiled_before_is_without_dropout_inside_and_with_it_after() -> None:
    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)

    assert not torch.equal(forward(X), X)
    with astray.experiment.without_dropout():
        assert torch.equal(forward(X), X)
    assert not torch.equal(forward(X), X)
