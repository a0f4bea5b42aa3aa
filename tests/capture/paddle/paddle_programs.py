"""Small programs that train a Paddle model, each with something of its own. They return all the numbers they made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils import recompute
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

STEPS = 3

Program = Callable[[Callable[[Any], None], Callable[[], None]], list[Any]]
"""Calls the first function with the model before it trains, the second after each step."""


def numbers_of(model: nn.Layer, losses: list[Any]) -> list[Any]:
    """The losses, the parameters and buffers, and what the random generator gives next."""
    kept = [np.asarray(loss) for loss in losses]
    kept += [tensor.astype("float32").numpy() for tensor in model.state_dict().values()]
    return [*kept, paddle.randn([4]).numpy()]


def multilayer(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """Its backward pass runs twice through the same graph."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    begin(model)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(paddle.randn([6, 8])), paddle.randn([6, 4]))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


class ConvNet(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2D(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2D(8)
        self.pool = nn.MaxPool2D(2)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        features = self.pool(F.relu(self.norm(self.conv(images))))
        return self.head(features.flatten(1))


def convolutional(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    model = ConvNet()
    begin(model)
    schedule = paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5)
    optimizer = paddle.optimizer.Momentum(schedule, parameters=model.parameters(), weight_decay=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(paddle.randn([4, 3, 8, 8])), paddle.randint(0, 5, [4]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        losses.append(float(loss))
        step()
    model.eval()
    losses.append(float(model(paddle.ones([2, 3, 8, 8])).sum()))
    return numbers_of(model, losses)


class Attention(nn.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = hidden.shape
        shape = [batch, length, self.heads, width // self.heads]
        q, k, v = (part.reshape(shape).transpose([0, 2, 1, 3]) for part in paddle.split(self.qkv(hidden), 3, axis=-1))
        scores = q @ k.transpose([0, 1, 3, 2]) * (width // self.heads) ** -0.5
        mask = paddle.triu(paddle.full([length, length], float("-inf")), 1)
        weights = self.drop(F.softmax(scores + mask))
        return self.proj((weights @ v).transpose([0, 2, 1, 3]).reshape([batch, length, width]))


class Block(nn.Layer):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        hidden = hidden + self.attn(self.ln1(hidden))
        return hidden + self.down(F.gelu(self.up(self.ln2(hidden))))


class Transformer(nn.Layer):
    """With a tied head, and blocks that may be recomputed."""

    def __init__(self, words: int = 32, width: int = 16, blocks: int = 2, recomputed: bool | None = None) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.wpe = nn.Embedding(16, width)
        self.h = nn.LayerList([Block(width) for _ in range(blocks)])
        self.ln = nn.LayerNorm(width)
        self.recomputed = recomputed  # None: not at all; else whether by a reentrant backward

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        hidden = self.wte(ids) + self.wpe(paddle.arange(ids.shape[1]))
        for block in self.h:
            hidden = (
                block(hidden)
                if self.recomputed is None
                else recompute(block, hidden, use_reentrant=self.recomputed, preserve_rng_state=True)
            )
        return paddle.matmul(self.ln(hidden), self.wte.weight, transpose_y=True)


def _train_transformer(
    model: Transformer, begin: Callable[[Any], None], step: Callable[[], None], micro: int = 1
) -> list[Any]:
    begin(model)
    optimizer = paddle.optimizer.AdamW(
        1e-2, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0), weight_decay=0.1
    )
    losses = []
    for _ in range(STEPS):
        for _ in range(micro):
            ids = paddle.randint(0, 32, [2, 8])
            loss = F.cross_entropy(model(ids).reshape([-1, 32]), ids.reshape([-1])) / micro
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
        step()
    return numbers_of(model, losses)


def transformer(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    return _train_transformer(Transformer(), begin, step)


def accumulated(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    return _train_transformer(Transformer(), begin, step, micro=3)


def recomputed_reentrant(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    return _train_transformer(Transformer(recomputed=True), begin, step)


def recomputed(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    return _train_transformer(Transformer(recomputed=False), begin, step)


class Product(nn.Layer):
    """A linear layer by sums, since Paddle has no product of matrices in bfloat16 on every CPU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([inputs, outputs])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (x.unsqueeze(-1) * self.weight).sum(axis=1)


def mixed_precision(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """Weights in bfloat16, with copies in float32 that the optimizer keeps, and a scaler."""
    model = nn.Sequential(Product(8, 16), nn.Silu(), Product(16, 4))
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), multi_precision=True)
    model, optimizer = paddle.amp.decorate(model, optimizer, level="O2", dtype="bfloat16", master_weight=True)
    begin(model)
    scaler = paddle.amp.GradScaler(init_loss_scaling=1024)
    losses = []
    for _ in range(STEPS):
        with paddle.amp.auto_cast(level="O2", dtype="bfloat16"):
            loss = F.mse_loss(model(paddle.randn([6, 8]).astype("bfloat16")).astype("float32"), paddle.randn([6, 4]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


def main_gradients(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """Mixed precision of fleet, which adds gradients up in float32, and hands them to the optimizer by itself."""
    model = nn.Sequential(Product(8, 16), nn.Silu(), Product(16, 4))
    begin(model)
    wrapped = MixPrecisionLayer(model, dtype="bfloat16")
    clip = nn.ClipGradByGlobalNorm(0.1)
    optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(1e-2, parameters=wrapped.parameters(), grad_clip=clip))
    losses = []
    for _ in range(STEPS):
        for _ in range(2):
            loss = F.mse_loss(wrapped(paddle.randn([6, 8])), paddle.randn([6, 4]))
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
        step()
    return numbers_of(model, losses)


class Recurrent(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2)
        self.gru = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        hidden, _ = self.lstm(words)
        last, _ = self.gru(hidden[:, -1])
        return self.head(last)


def recurrent(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    model = Recurrent()
    begin(model)
    optimizer = paddle.optimizer.RMSProp(1e-2, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(paddle.randn([4, 5, 6])), paddle.randint(0, 3, [4]))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


class Cube(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, arrived: paddle.Tensor) -> paddle.Tensor:
        (x,) = ctx.saved_tensor()
        return arrived * 3.0 * x * x


class Unusual(nn.Layer):
    """A PyLayer, writes in place, hooks of the program's own, a result of several parts, a value used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        for parameter in self.frozen.parameters():
            parameter.stop_gradient = True

    def forward(self, x: paddle.Tensor, scale: float = 0.5) -> dict[str, Any]:
        hidden = self.inner(x)
        hidden.register_hook(lambda gradient: gradient * 2.0)
        cubed = Cube.apply(hidden) * scale
        changed = cubed.clone()
        changed[:, 0] = 0.0
        F.relu_(changed)
        parts = paddle.split(self.frozen(changed) + hidden, 2, axis=1)
        return {"both": [self.outer(cubed), paddle.concat(parts[::-1], axis=1)], "none": None}


def unusual(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    model = Unusual()
    begin(model)
    optimizer = paddle.optimizer.Adam(1e-2, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        outputs = model(paddle.randn([4, 6]), scale=0.25)
        loss = sum((part * part).mean() for part in outputs["both"])
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


def second_order(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """A gradient penalty: the backward pass is differentiated itself."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    begin(model)
    optimizer = paddle.optimizer.Adagrad(1e-2, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        x = paddle.randn([5, 4])
        x.stop_gradient = False
        value = model(x)
        (slope,) = paddle.grad(value.sum(), [x], create_graph=True)
        loss = value.mean() + ((slope * slope).sum(axis=1) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


def grouped(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """Two optimizers, one of them with groups; gradients of an embedding that hold its used rows alone."""
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 6), nn.Linear(6, 2))
    begin(model)
    optimizer = paddle.optimizer.Adam(
        1e-2,
        parameters=[
            {"params": model[1].parameters()},
            {"params": model[2].parameters(), "learning_rate": 0.1, "weight_decay": 0.01},
        ],
    )
    rows = paddle.optimizer.SGD(0.1, parameters=model[0].parameters())
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(paddle.randint(0, 20, [7])), paddle.randint(0, 2, [7]))
        loss.backward()
        for one in (optimizer, rows):
            one.step()
            one.clear_grad()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


def minimized(begin: Callable[[Any], None], step: Callable[[], None]) -> list[Any]:
    """LBFGS with a closure, then an optimizer that is told to minimize."""
    model = nn.Linear(4, 1)
    begin(model)
    x, y = paddle.randn([8, 4]), paddle.randn([8, 1])
    optimizer = paddle.optimizer.LBFGS(0.5, max_iter=3, parameters=model.parameters())

    def closure() -> paddle.Tensor:
        loss = F.mse_loss(model(x), y)
        optimizer.clear_grad()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure))]
    step()
    second = paddle.optimizer.Adamax(1e-2, parameters=model.parameters())
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        second.minimize(loss)
        model.clear_gradients()
        losses.append(float(loss))
        step()
    return numbers_of(model, losses)


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        multilayer, convolutional, transformer, accumulated, recomputed_reentrant, recomputed, mixed_precision,
        main_gradients, recurrent, unusual, second_order, grouped, minimized,
    )
}  # fmt: skip
