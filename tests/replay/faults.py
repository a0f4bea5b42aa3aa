"""Bad kernels, planted below what the recorder sees: operators whose results are changed as they are computed.

Each is for one call of an operator. They are in two halves, as the programs are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = Callable[..., Any]


class Fault(NamedTuple):
    """A kernel in place of call number `call` of an operator. `site` has what must be named, `phase` in which phase."""

    operator: str
    call: int
    kernel: Kernel
    site: str
    phase: str = "forward"
    program: str = "gpt bf16"


class Planted(TorchDispatchMode):
    """Runs a fault's kernel in place of the call it is for. `done`: whether that has happened."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.calls = 0
        self.done = False
        self.previous: Any = None

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == f"aten.{self.fault.operator}":
            if self.calls == self.fault.call:
                self.done = True
                result = self.fault.kernel(result, self.previous, *args)
            elif isinstance(result, torch.Tensor):
                self.previous = result.clone()
            self.calls += 1
        return result


def narrow_sums(result: torch.Tensor, _: Any, bias: Any, left: Any, right: Any) -> torch.Tensor:
    """Sums in the dtype of the result, eight terms at a time."""
    total = torch.zeros_like(result)
    for first in range(0, left.shape[1], 8):
        total = total + left[:, first : first + 8] @ right[first : first + 8]
    return total + bias


def wrong_tile(result: torch.Tensor, *_: Any) -> torch.Tensor:
    """Two percent too large in one tile."""
    result[16:32, 32:48] *= 1.02
    return result


def one_term_less(result: torch.Tensor, _: Any, bias: Any, left: Any, right: Any) -> torch.Tensor:
    """A sum that ends one term too early."""
    return (bias.float() + left[:, :-1].float() @ right[:-1].float()).to(result.dtype)


def softmax_one_less(result: torch.Tensor, _: Any, given: torch.Tensor, *__: Any) -> torch.Tensor:
    """The denominator lacks its first term."""
    parts = (given - given.amax(-1, keepdim=True)).float().exp()
    return (parts / parts[..., 1:].sum(-1, keepdim=True).clamp(min=1e-3)).to(result.dtype)


def stale(result: torch.Tensor, previous: torch.Tensor, *_: Any) -> torch.Tensor:
    """The result of the call before."""
    assert previous.shape == result.shape
    return previous


def unwritten_row(result: torch.Tensor, *_: Any) -> torch.Tensor:
    flat = result.reshape(-1, result.shape[-1])
    flat[17] = 0
    return flat.reshape(result.shape)


def one_sample_less(result: torch.Tensor, _: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A weight's gradient without the last row of the batch."""
    return (left[:, :-1].float() @ right[:-1].float()).to(result.dtype)


def narrow_products(result: torch.Tensor, _: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(result)
    for first in range(0, left.shape[1], 8):
        total = total + left[:, first : first + 8] @ right[first : first + 8]
    return total


def swapped_heads(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return result[[1, 0, *range(2, len(result))]].contiguous()


def next_word(result: torch.Tensor, _: Any, weight: torch.Tensor, ids: torch.Tensor, *__: Any) -> torch.Tensor:
    result[0, 5] = weight[(ids[0, 5] + 1) % len(weight)]
    return result


def coarse_inputs(result: torch.Tensor, _: Any, bias: Any, left: Any, right: Any) -> torch.Tensor:
    """Inputs of float32 rounded to the ten bits of TF32, though the program did not allow it."""
    bits = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32) for each in (left, right.contiguous())]
    return bits[0] @ bits[1] + bias


def other_variance(result: Any, _: Any, given: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Divided by n − 1."""
    wide = given.double()
    scaled = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True) + eps).sqrt()
    return (scaled * weight + bias).to(given.dtype), *result[1:]


def other_scale(result: Any, *_: Any) -> Any:
    """Attention whose result is one percent too small in one head."""
    result[0][:, 2] *= 0.99
    return result


def late_padding(result: Any, *_: Any) -> Any:
    """A convolution that does not see its padding at one corner."""
    result[:, :, 0, 0] *= 1.01
    return result


def truncated(result: torch.Tensor, _: Any, bias: Any, left: Any, right: Any) -> torch.Tensor:
    """Rounded towards zero instead of to the nearest."""
    exact = (bias.double() + left.double() @ right.double()).float()
    return (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).to(result.dtype)


def mean_of_fewer(result: Any, _: Any, given: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """A mean that ends one element too early."""
    wide = given.double()
    centred = wide - wide[..., :-1].mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (scaled * weight + bias).to(given.dtype), *result[1:]


FIRST_HALF = {
    "narrow sums": Fault("addmm.default", 3, narrow_sums, "h.0.shrink/linear"),
    "wrong tile": Fault("addmm.default", 2, wrong_tile, "h.0.expand/linear"),
    "one term less": Fault("addmm.default", 1, one_term_less, "h.0.proj/linear"),
    "softmax one less": Fault("_softmax.default", 1, softmax_one_less, "h.1/softmax"),
    "stale": Fault("gelu.default", 1, stale, "h.1/gelu"),
    "stale float32": Fault("gelu.default", 1, stale, "h.1/gelu", program="gpt f32"),
}
SECOND_HALF = {
    "unwritten row": Fault("gelu.default", 0, unwritten_row, "h.0/gelu"),
    "one sample less": Fault("mm.default", 3, one_sample_less, "h.1.shrink/linear", "backward"),
    "narrow products": Fault("mm.default", 6, narrow_products, "h.1.expand/linear", "backward"),
    "swapped heads": Fault("bmm.default", 1, swapped_heads, "h.0/matmul"),
    "next word": Fault("embedding.default", 0, next_word, "tok/embedding"),
    "coarse inputs": Fault("addmm.default", 5, coarse_inputs, "h.1.proj/linear", program="gpt f32"),
    "other variance": Fault("native_layer_norm.default", 2, other_variance, "h.1.norm/layer_norm"),
    "other variance float32": Fault(
        "native_layer_norm.default", 2, other_variance, "h.1.norm/layer_norm", program="gpt f32"
    ),
    "other scale": Fault(
        "_scaled_dot_product_flash_attention_for_cpu.default", 0, other_scale, "/scaled_dot_product_attention",
        program="llama bf16",
    ),
    "late padding": Fault("convolution.default", 1, late_padding, "conv/conv2d", program="conv net bf16"),
}  # fmt: skip
UNSEEN = {
    "narrow sums": Fault("addmm.default", 7, narrow_sums, "h.1.mlp.c_proj/addmm", program="gpt2"),
    "wrong tile": Fault("addmm.default", 2, wrong_tile, "h.0.mlp.c_fc/addmm", program="gpt2"),
    "mean of fewer": Fault("native_layer_norm.default", 3, mean_of_fewer, "h.1.ln_2/layer_norm", program="gpt2"),
    "stale": Fault("tanh.default", 1, stale, "h.1.mlp.act/tanh", program="gpt2"),
    "one term less": Fault("addmm.default", 4, one_term_less, "h.1.attn.c_attn/addmm", program="gpt2"),
}
"""Planted into GPT-2 of transformers in bfloat16, when all numbers were in place."""

WITHIN_ROUNDING = {"truncated": Fault("addmm.default", 4, truncated, "h.1.qkv/linear")}
"""What replay does not see: a result that is never further off than one ulp may have been rounded twice."""
