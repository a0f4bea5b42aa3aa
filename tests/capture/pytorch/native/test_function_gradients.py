"""The gradients recorded for a function call are its own: those of `torch.autograd.grad` on that call alone.

Every input is also used by something else, so a sum over all its consumers would be another number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import astray
from recorded_rows import rows


def floats(*shape: int, positive: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    values = torch.randn(*shape, generator=generator)
    return values.abs() + 0.5 if positive else values


LABELS = torch.tensor([1, 0, 2, 3])
PAIRS = torch.tensor([[0, 2], [1, 1], [2, 0]])
MASK = floats(3, 4) > 0

CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "linear": (F.linear, [floats(2, 3, 4), floats(5, 4), floats(5)]),
    "linear without bias": (F.linear, [floats(3, 4), floats(5, 4)]),
    "bilinear": (F.bilinear, [floats(3, 4), floats(3, 2), floats(5, 4, 2), floats(5)]),
    "conv1d": (F.conv1d, [floats(2, 3, 8), floats(4, 3, 3), floats(4)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [floats(2, 3, 6, 6), floats(4, 3, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [floats(2, 3, 4, 4), floats(3, 2, 3, 3)]),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [floats(1, 2, 4, 4)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), [floats(1, 2, 4, 4)]),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), [floats(1, 2, 4, 4)]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), [floats(1, 2, 3, 3)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [floats(3, 4), floats(4), floats(4)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [floats(2, 4, 3), floats(4), floats(4)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(4), torch.ones(4), w, b, training=True),
        [floats(5, 4), floats(4), floats(4)],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [floats(3, 4), floats(4)]),
    "embedding": (lambda w: F.embedding(PAIRS, w), [floats(3, 4)]),
    "softmax": (lambda x: F.softmax(x, -1), [floats(3, 4)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [floats(3, 4)]),
    "gelu": (F.gelu, [floats(3, 4)]),
    "silu": (F.silu, [floats(3, 4)]),
    "relu": (F.relu, [floats(3, 4)]),
    "relu in place": (lambda x: F.relu(x, inplace=True), [floats(3, 4)]),
    "relu_": (torch.relu_, [floats(3, 4)]),
    "leaky_relu": (F.leaky_relu, [floats(3, 4)]),
    "elu": (F.elu, [floats(3, 4)]),
    "softplus": (F.softplus, [floats(3, 4)]),
    "glu": (F.glu, [floats(3, 4)]),
    "prelu": (F.prelu, [floats(3, 4), floats(4)]),
    "normalize": (F.normalize, [floats(3, 4)]),
    "pad": (lambda x: F.pad(x, (1, 1)), [floats(3, 4)]),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [floats(1, 2, 5, 4), floats(1, 2, 5, 4) * 2, floats(1, 2, 5, 4) * 3],
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, LABELS), [floats(4, 5)]),
    "cross_entropy with weights": (
        lambda x: F.cross_entropy(x, LABELS, weight=torch.arange(1.0, 6), label_smoothing=0.1),
        [floats(4, 5)],
    ),
    "nll_loss": (lambda x: F.nll_loss(x, LABELS), [floats(4, 5)]),
    "mse_loss": (F.mse_loss, [floats(3, 4), floats(3, 4) * 2]),
    "l1_loss": (F.l1_loss, [floats(3, 4), floats(3, 4) * 2]),
    "smooth_l1_loss": (F.smooth_l1_loss, [floats(3, 4), floats(3, 4) * 2]),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [floats(3, 4), floats(3, 4, positive=True)]),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits,
        [floats(3, 4), floats(3, 4, positive=True) / 4],
    ),
    "cosine_similarity": (F.cosine_similarity, [floats(3, 4), floats(3, 4) + 1]),
    "matmul": (torch.matmul, [floats(2, 3, 4), floats(4, 5)]),
    "bmm": (torch.bmm, [floats(2, 3, 4), floats(2, 4, 5)]),
    "addmm": (torch.addmm, [floats(5), floats(3, 4), floats(4, 5)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [floats(2, 3, 4), floats(2, 4, 5)]),
    "add with broadcasting": (torch.add, [floats(3, 4), floats(4)]),
    "mul": (torch.mul, [floats(3, 4), floats(3, 1)]),
    "mul by itself": (lambda x: torch.mul(x, x), [floats(3, 4)]),
    "div": (torch.div, [floats(3, 4), floats(3, 4, positive=True)]),
    "pow": (lambda x: torch.pow(x, 3), [floats(3, 4)]),
    "exp": (torch.exp, [floats(3, 4)]),
    "log": (torch.log, [floats(3, 4, positive=True)]),
    "sqrt": (torch.sqrt, [floats(3, 4, positive=True)]),
    "tanh": (torch.tanh, [floats(3, 4)]),
    "sigmoid": (torch.sigmoid, [floats(3, 4)]),
    "where": (lambda x, y: torch.where(MASK, x, y), [floats(3, 4), floats(3, 4) * 2]),
    "masked_fill": (lambda x: x.masked_fill(MASK, -1.0), [floats(3, 4)]),
    "clamp": (lambda x: torch.clamp(x, -0.5, 0.5), [floats(3, 4)]),
    "maximum": (torch.maximum, [floats(3, 4), floats(3, 4).flip(0)]),
    "sum": (lambda x: torch.sum(x, 1), [floats(3, 4)]),
    "mean": (torch.mean, [floats(3, 4)]),
    "var": (lambda x: torch.var(x, 0), [floats(3, 4)]),
    "norm": (torch.linalg.norm, [floats(3, 4)]),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), [floats(3, 4)]),
    "cumsum": (lambda x: torch.cumsum(x, 1), [floats(3, 4)]),
    "max with indices": (lambda x: torch.max(x, 1), [floats(3, 4)]),
    "topk": (lambda x: torch.topk(x, 2), [floats(3, 4)]),
    "sort": (torch.sort, [floats(3, 4)]),
    "chunk": (lambda x: torch.chunk(x, 2, -1), [floats(3, 4)]),
    "split": (lambda x: torch.split(x, [1, 3], -1), [floats(3, 4)]),
    "unbind": (torch.unbind, [floats(3, 4)]),
    "svd": (torch.linalg.svdvals, [floats(3, 4)]),
    "cat": (lambda x, y: torch.cat([x, y]), [floats(3, 4), floats(2, 4)]),
    "stack": (lambda x, y: torch.stack([x, y]), [floats(3, 4), floats(3, 4) * 2]),
    "gather": (lambda x: torch.gather(x, 1, PAIRS), [floats(3, 4)]),
    "index_select": (lambda x: torch.index_select(x, 0, torch.tensor([2, 0])), [floats(3, 4)]),
    "scatter_add": (lambda x, y: x.scatter_add(1, PAIRS, y), [floats(3, 4), floats(3, 2)]),
    "getitem": (lambda x: x[1:, ::2], [floats(3, 4)]),
    "view": (lambda x: x.view(2, 6), [floats(3, 4)]),
    "reshape of a transpose": (lambda x: x.reshape(12), [floats(4, 3).t()]),
    "transpose": (lambda x: x.transpose(0, 1), [floats(3, 4)]),
    "permute": (lambda x: x.permute(2, 0, 1), [floats(2, 3, 4)]),
    "expand": (lambda x: x.expand(3, 4), [floats(1, 4)]),
    "add_": (lambda x, y: x.add_(y, alpha=2), [floats(3, 4), floats(3, 4) * 2]),
    "mul_": (lambda x, y: x.mul_(y), [floats(3, 4), floats(3, 4) * 2]),
    "to another dtype": (lambda x: x.to(torch.float64), [floats(3, 4)]),
    "dropout that keeps all": (lambda x: F.dropout(x, 0.0), [floats(3, 4)]),
    "rsub": (lambda x: 1.0 - x, [floats(3, 4)]),
    "gru_cell": (
        torch.gru_cell,
        [floats(2, 3), floats(2, 4), floats(12, 3), floats(12, 4), floats(12), floats(12) * 2],
    ),
    "multi_head_attention_forward": (
        lambda x, w, b, o, p: F.multi_head_attention_forward(x, x, x, 4, 2, w, b, None, None, False, 0.0, o, p),
        [floats(5, 1, 4), floats(12, 4), floats(12), floats(4, 4), floats(4)],
    ),
}


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [part for part in result if isinstance(part, Tensor)]


def of_the_call_alone(function: Callable[..., Any], values: list[Tensor], arriving: list[Tensor | None]) -> list[Any]:
    """What autograd says that this call sends to its inputs, when `arriving` are the gradients of its outputs."""
    leaves = [value.clone().requires_grad_() for value in values]
    outputs = tensors(function(*[leaf * 1.0 for leaf in leaves]))  # it may write into them
    used = [(out, grad) for out, grad in zip(outputs, arriving, strict=True) if grad is not None]
    return list(torch.autograd.grad([o for o, _ in used], leaves, [g for _, g in used], allow_unused=True))


@pytest.mark.parametrize("case", CASES)
def test_input_gradients_are_the_calls_own(case: str, tmp_path: Path) -> None:
    function, values = CASES[case]
    torch.manual_seed(0)
    inputs = [(value.clone().requires_grad_() * 1.0) for value in values]
    model = Calling(function)
    with astray.record(tmp_path / "run", model, level="function", keep="tensors", match="^<root>/"):
        elsewhere = sum((value * 3.0).sum() for value in inputs)
        outputs = tensors(model(*inputs))
        taken = [out for out in outputs if out.requires_grad]
        weighted = sum((out * torch.arange(1.0, out.numel() + 1).view(out.shape) * 0.1).sum() for out in taken)
        (weighted + elsewhere).backward()

    run = astray.open(tmp_path / "run")
    site = rows(run, phase="forward")[-1]["site"]
    recorded = rows(run, phase="backward", site=site)
    arriving = {row["path"]: kept(run, row) for row in recorded if row["role"] == "input"}
    sent = [kept(run, row) for row in recorded if row["role"] == "output"]
    paths = ["out"] if len(outputs) == 1 and "out" in arriving else [f"out.{i}" for i in range(len(outputs))]
    expected = of_the_call_alone(function, values, [arriving.get(path) for path in paths])
    expected = [gradient for gradient in expected if gradient is not None]
    assert len(sent) == len(expected)
    for gradient in expected:
        close = [found for found in sent if found.shape == gradient.shape and torch.allclose(gradient, found)]
        assert close, "a gradient of an input was not recorded"


def kept(run: Any, row: dict[str, Any]) -> Tensor:
    return torch.from_numpy(np.array(run.values(0, row["row"])))
