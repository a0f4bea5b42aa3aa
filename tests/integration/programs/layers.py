"""torch's own larger layers: recurrent, convolutional with running statistics, attention, transformer encoders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from integration.programs.program import STEPS, Setup, Steps, program


def _trained(model: nn.Module, batch: Callable[[], torch.Tensor]) -> Steps:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        loss = model(batch()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class Recurrent(nn.Module):
    """A whole LSTM, a GRU over a packed sequence, and a cell that is called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.1, bidirectional=True)
        self.gru = nn.GRU(10, 5, batch_first=False)
        self.cell = nn.RNNCell(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (hidden, _) = self.lstm(x)
        packed = nn.utils.rnn.pack_padded_sequence(y, [3, 2], enforce_sorted=True)
        z, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0])
        state = hidden[-1]
        for moment in z:
            state = self.cell(moment, state)
        return state


@program
def recurrent() -> Steps:
    yield from _trained(Recurrent(), lambda: torch.randn(3, 2, 4))


@program
def convolution_and_batch_norm() -> Steps:
    """In training, then a look at held-out data in eval mode without gradients."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(0.2),
        nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        model.train()
        loss = criterion(model(torch.randn(4, 2, 8, 8)), torch.randint(3, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            yield loss.detach(), model(torch.randn(2, 2, 8, 8))


class Attending(nn.Module):
    """Attention over itself, and over something of other width."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.cross = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.own(x, x, x, average_attn_weights=False)
        z, nothing = self.cross(y, x[..., :4], x[..., :6], need_weights=False)
        assert nothing is None
        return z + weights.mean()


@program
def attention() -> Steps:
    yield from _trained(Attending(), lambda: torch.randn(2, 5, 8))


def _encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 2)


@program
def transformer_encoder() -> Steps:
    yield from _trained(_encoder(), lambda: torch.randn(2, 5, 8))


@program(warns=("The PyTorch API of nested tensors is in prototype stage",))
def transformer_encoder_in_eval_mode() -> Steps:
    """torch has a faster way for this, with other roundings, and takes another when it sees a hook."""
    model = _encoder().eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    yield Setup(model)
    for _ in range(STEPS):
        with torch.no_grad():
            yield model(torch.randn(2, 5, 8)), model(torch.randn(2, 5, 8), src_key_padding_mask=padding)


@program
def transformer_encoder_in_turns() -> Steps:
    """Trained, and looked at in eval mode after each step."""
    model = _encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield Setup(model, optimizer)
    for _ in range(STEPS):
        model.train()
        loss = model(torch.randn(2, 5, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            yield loss.detach(), model(torch.randn(2, 5, 8)).clone()


@program
def attention_in_eval_mode() -> Steps:
    """MultiheadAttention has such a way of its own."""
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    yield Setup(model)
    for _ in range(STEPS):
        x = torch.randn(2, 5, 8)
        with torch.no_grad():
            yield model(x, x, x), model(x, x, x, need_weights=False)


@program
def transformer() -> Steps:
    """Encoder and decoder, with a causal mask."""

    class Translating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(3)
            return self.whole(x, x[:, :3], tgt_mask=mask, tgt_is_causal=True)

    yield from _trained(Translating(), lambda: torch.randn(2, 5, 8))
