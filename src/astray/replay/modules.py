"""Leaf modules of torch.nn, made again from their recorded settings, parameters and buffers.

Only classes listed here are made. A program may have a class of the same name, so what torch's class is given must all
be among the recorded settings; the module holds no numbers of its own, and is called with those of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import functional_call

CLASSES = frozenset(
    """
    Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding LayerNorm RMSNorm
    GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm
    GELU SiLU Mish ReLU ReLU6 LeakyReLU ELU SELU CELU PReLU GLU Tanh Sigmoid Softplus Softsign Softmax LogSoftmax
    Hardswish Hardsigmoid Hardtanh LogSigmoid Tanhshrink Threshold Identity Flatten Dropout MaxPool1d MaxPool2d
    MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Upsample LSTM GRU RNN
    CrossEntropyLoss MSELoss L1Loss SmoothL1Loss HuberLoss BCELoss BCEWithLogitsLoss NLLLoss KLDivLoss
    """.split()  # noqa: SIM905 - a list of quoted words is harder to read
)

_MOST_LAYERS = 256
"""Of a recurrent module, which makes a parameter for each."""

_OPTIONAL = frozenset({"bias", "device", "dtype", "inplace", "size_average", "reduce", "_weight", "_freeze", "sparse"})
"""What a constructor takes and a module does not keep as a plain attribute, or need not."""

_OF_THE_BASE = {True: ("mode",), False: ("mode", "proj_size")}
"""What a recurrent module gives its base by itself; of an LSTM the program gives the second."""

_BIASES = frozenset({"bias"})


class NotALeafError(Exception):
    """A module that cannot be made again; its text says why."""


def constructor_arguments(kind: str, settings: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What a class of torch.nn is made with, by name. Raises NotALeafError where that was not recorded."""
    if kind not in CLASSES:
        raise NotALeafError(f"a module of class {kind}, which is not a leaf of torch.nn")
    known: Any = getattr(torch.nn, kind)
    recurrent = issubclass(known, torch.nn.RNNBase)  # those have their parameters from their base
    parameters = inspect.signature((torch.nn.RNNBase if recurrent else known).__init__).parameters
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in ("self", "args", "kwargs") or (recurrent and name in _OF_THE_BASE[kind == "LSTM"]):
            continue
        if name in settings:
            given[name] = _tuple(settings[name])
        elif name in _BIASES:
            given[name] = name in own
        elif name not in _OPTIONAL and parameter.default is inspect.Parameter.empty:
            raise NotALeafError(f"a module of class {kind} without the setting {name}, so not that of torch.nn")
    layers = given.get("num_layers", 1)
    if not isinstance(layers, int) or layers > _MOST_LAYERS:
        raise NotALeafError(f"a module of {layers} layers; {_MOST_LAYERS} are made at most")
    return given


def rebuild_module(
    kind: str, settings: Mapping[str, Any], own: Mapping[str, torch.Tensor]
) -> Callable[[Mapping[str, torch.Tensor]], Callable[..., Any]]:
    """A function from the parameters and buffers of a module to its call.

    settings: those recorded of the module. own: its recorded parameters and buffers.
    """
    known: Any = getattr(torch.nn, kind, None)
    given = constructor_arguments(kind, settings, own)
    try:
        with torch.device("meta"):
            module = known(**given)
    except Exception as error:  # noqa: BLE001 - whatever a run has for settings
        raise NotALeafError(
            f"a module of class {kind} that cannot be made of its settings ({first_line(error)})"
        ) from None
    module.train(settings.get("training") is True)
    if hasattr(module, "inplace"):
        module.inplace = False  # the result is the same, and the input is needed again
    for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
        if name not in own:
            raise NotALeafError(f"a module whose {name} was not recorded at this call")
        if own[name].shape != tensor.shape:
            raise NotALeafError(f"a module of class {kind} with a {name} of another shape than torch.nn gives it")
    if set(own) - set(dict(module.named_parameters())) - set(dict(module.named_buffers())):
        raise NotALeafError(f"a module of class {kind} with more parameters than that of torch.nn")
    return lambda tensors: lambda *args, **kwargs: functional_call(module, dict(tensors), args, kwargs)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def first_line(error: BaseException) -> str:
    """What an error says, on one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 120 else f"{lines[0][:119]}…"
