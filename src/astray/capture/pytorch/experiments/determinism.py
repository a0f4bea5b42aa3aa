"""No dropout, the same seed, the same bits: `without_dropout` and `seed_all` of `astray.experiment`, in torch.

Dropout is turned off without changing the model: a function mode passes dropout calls on with dropout turned off, as in
eval mode. No function is replaced, no module is changed, and no random number is drawn. The mode is not active inside a
function that it passes on, so attention and recurrent layers, which apply dropout internally, get it through an
argument.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class DropoutArgument(NamedTuple):
    """An argument that turns dropout off: its index, its names (the first is added where it is left out), its value."""

    position: int
    names: tuple[str, ...]
    off: float | bool


_TRAINING = DropoutArgument(2, ("training", "train"), False)

SWITCHES: dict[str, DropoutArgument] = {
    "dropout": _TRAINING,
    "dropout_": _TRAINING,
    "dropout1d": _TRAINING,
    "dropout2d": _TRAINING,
    "dropout3d": _TRAINING,
    "alpha_dropout": _TRAINING,
    "alpha_dropout_": _TRAINING,
    "feature_dropout": _TRAINING,
    "feature_dropout_": _TRAINING,
    "feature_alpha_dropout": _TRAINING,
    "feature_alpha_dropout_": _TRAINING,
    "native_dropout": DropoutArgument(2, ("train",), False),
    "scaled_dot_product_attention": DropoutArgument(4, ("dropout_p",), 0.0),
    "multi_head_attention_forward": DropoutArgument(10, ("dropout_p",), 0.0),
}
"""By the name of the function, wherever it lives: torch, torch.nn.functional or torch.ops."""

RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions where the index of the argument depends on whether the sequences are packed."""


class WithoutDropout(TorchFunctionMode):
    """While it is on, nothing is dropped."""

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(function, "__name__", "")).partition(".")[0]  # an op's has its overload behind it
        switch = _of_recurrent(args) if name in RECURRENT else SWITCHES.get(name)
        if switch is not None:
            args, kwargs = _with(switch, args, kwargs)
        return function(*args, **kwargs)


def _with(
    switch: DropoutArgument, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position, names, off = switch
    if len(args) > position:
        return (*args[:position], off, *args[position + 1 :]), dict(kwargs)
    name = next((name for name in names if name in kwargs), names[0])
    return args, {**kwargs, name: off}


def _of_recurrent(args: tuple[Any, ...]) -> DropoutArgument:
    """`has_biases` is the first truth value among the arguments, `num_layers` follows it, then comes `dropout`."""
    biases = next((index for index, value in enumerate(args) if isinstance(value, bool)), len(args))
    return DropoutArgument(biases + 2, ("dropout",), 0.0)


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed(number: int) -> None:
    """Seeds the generators of the CPU and of every accelerator. Starts no device: one not in use is seeded later."""
    torch.manual_seed(number)


def make_deterministic() -> None:
    """Sets torch to give the same bits each time the same program runs on the same machine."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if WORKSPACE in os.environ:
        return
    os.environ[WORKSPACE] = ":4096:8"  # one of the two values that torch accepts: eight buffers of 4 MiB
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(
            f"{WORKSPACE} was not set when CUDA started, so cuBLAS may still sum in another order each time. Set it to "
            ":4096:8 before the program starts, or call seed_all before anything is put on the GPU.",
            stacklevel=3,
        )
