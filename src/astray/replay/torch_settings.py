"""Statements that set torch as it was when a call was recorded, as far as that matters to the call.

Reads the recorded flags (`capture/pytorch/torch_flags.py` has their names), feeds an exported script. What torch does
by default is not written, so that a script of most programs has one line of it or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from astray.replay.calls import RebuiltCall
from astray.replay.functions import CONTRACTING

_MOST_THREADS = 4096

_Statements = dict[tuple[str, object], str]

_PRODUCTS: _Statements = {
    ("float32_matmul_precision", "high"): 'torch.set_float32_matmul_precision("high")',
    ("float32_matmul_precision", "medium"): 'torch.set_float32_matmul_precision("medium")',
    ("fp16_reduced_precision_reduction", False): (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False"
    ),
    ("bf16_reduced_precision_reduction", False): (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False"
    ),
    ("fp16_accumulation", True): "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
}
_CUDNN: _Statements = {
    ("cudnn.conv.fp32_precision", "ieee"): "torch.backends.cudnn.allow_tf32 = False",
    ("cudnn.enabled", False): "torch.backends.cudnn.enabled = False",
    ("cudnn.benchmark", True): "torch.backends.cudnn.benchmark = True",
    ("cudnn.deterministic", True): "torch.backends.cudnn.deterministic = True",
}
_ATTENTION: _Statements = {
    ("sdpa.flash", False): "torch.backends.cuda.enable_flash_sdp(False)",
    ("sdpa.mem_efficient", False): "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    ("sdpa.math", False): "torch.backends.cuda.enable_math_sdp(False)",
    ("sdpa.cudnn", False): "torch.backends.cuda.enable_cudnn_sdp(False)",
}
_ALWAYS: _Statements = {
    ("deterministic_algorithms", True): "torch.use_deterministic_algorithms(True, warn_only=True)",
}


def written_settings(call: RebuiltCall, flags: Mapping[str, Any]) -> list[str]:
    """The statements for a call, of flags as they were recorded."""
    return list(_statements(call, flags))


def _statements(call: RebuiltCall, flags: Mapping[str, Any]) -> Iterator[str]:
    wanted = dict(_ALWAYS)
    if CONTRACTING.search(call.name):
        wanted |= _PRODUCTS
        if flags.get("cuda.matmul.fp32_precision") == "tf32" and "float32_matmul_precision" not in flags:
            yield _PRODUCTS["float32_matmul_precision", "high"]  # it was set by its newer name
    if any(word in call.name for word in ("conv", "norm", "lstm", "gru", "rnn")):
        wanted |= _CUDNN
        if "cuda" not in call.devices and "norm" not in call.name:  # there cuDNN rounds to TF32, and this did not
            flags = {**flags, "cudnn.conv.fp32_precision": "ieee"}
    if "attention" in call.name:
        wanted |= _ATTENTION
    for (name, value), statement in wanted.items():
        if type(flags.get(name)) is type(value) and flags[name] == value:
            yield statement
    threads = flags.get("threads")
    if call.devices == {"cpu"} and type(threads) is int and 0 < threads <= _MOST_THREADS:
        yield f"torch.set_num_threads({threads})  # sums are divided among them"
