"""The positions of a function's arguments in msprobe, and the argument that a gradient of a backward entry belongs to.

A function that is written in Python passes its arguments on in its own way, some by position and all others by keyword,
whether the caller passed them or not, and astray records them like that. msprobe records them as the caller passed
them. A recording for msprobe's files has how the call was written, and restores their positions.

msprobe hooks the last autograd node of a function, and numbers the gradients that this node sends on. Where the
function is a single node (`relu`, `add`, `layer_norm`) they are the gradients of its arguments. Where it is made of
several (`linear` of three dimensions, `matmul`, `cross_entropy`) they are gradients of intermediate values: these get a
path of their own, and are never compared with the gradient of an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from astray.foreign.msprobe.leaves import DumpTensor, is_tensor, walk
from astray.records import Spelling
from astray.wording import numeral

NODE = "node."
"""The prefix of the path of a gradient of an autograd node that is not known to be of an argument."""

ARGUMENT_GRADIENTS = "gradients"
"""The key of a backward entry for gradients of the arguments that are not among those of the last node."""

_UNARY = {
    "abs", "clamp", "cos", "elu", "erf", "exp", "gelu", "hardtanh", "leaky_relu", "log", "log_softmax", "mean", "mish",
    "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "selu", "sigmoid", "silu", "sin", "softmax", "softplus",
    "sqrt", "sum", "tanh",
}  # fmt: skip
_BINARY = {"add", "div", "mul", "sub"}
_NODES = {
    "layer_norm": ("0", "kwargs.weight", "kwargs.bias"),
    "batch_norm": ("0", "kwargs.weight", "kwargs.bias"),
    "group_norm": ("0", "kwargs.weight", "kwargs.bias"),
    "embedding": ("1",),
    "conv1d": ("0", "1", "2"),
    "conv2d": ("0", "1", "2"),
    "conv3d": ("0", "1", "2"),
}
"""The arguments, as astray names them, in the order in which the node of a function sends their gradients."""


def arrangement(spelling: Spelling | None, count: int, words: Collection[str]) -> dict[str, str] | None:
    """msprobe's path of each argument that the caller passed, by astray's path, in the order of the call.

    count, words: how many arguments astray has by position, and which by keyword. None where it is not known how the
    caller passed them, or where astray records them as passed.

    >>> call = Spelling(parameters=("input", "shape", "weight", "bias", "eps"), positional=3, keywords=("eps",))
    >>> arrangement(call, 2, ["weight", "bias", "eps"])
    {'0': '0', '1': '1', 'kwargs.weight': '2', 'kwargs.eps': 'kwargs.eps'}
    """
    if spelling is None or spelling.parameters is None:
        return None
    names = spelling.parameters
    recorded = {name: str(position) for position, name in enumerate(names[:count])}
    recorded |= {word: f"kwargs.{word}" for word in words}
    passed = {name: str(position) for position, name in enumerate(names[: spelling.positional])}
    passed |= {word: f"kwargs.{word}" for word in spelling.keywords}
    if count > len(names) or spelling.positional > len(names) or not passed.keys() <= recorded.keys():
        return None
    return {recorded[name]: path for name, path in passed.items()}


def gradient_paths(
    function: str, content: dict[str, Any], forward: Any, by_astray: bool, nodes: Any
) -> Iterator[DumpTensor]:
    """The gradients of a function's backward entry, each with its path.

    forward: the function's forward entry; the shapes of its arguments show whether gradients can be theirs.
    by_astray: whether astray wrote the dump, which has them by argument where msprobe's order does not identify one.
    nodes: the argument of each, where astray has written them in msprobe's order.
    """
    output = content.get("output")
    if by_astray and isinstance(nodes, dict):
        for path, leaf in walk(output, ""):
            argument = nodes.get(path)
            yield DumpTensor(argument if isinstance(argument, str) else f"{NODE}{path}", leaf)
        others = content.get(ARGUMENT_GRADIENTS)
        for path, leaf in others.items() if isinstance(others, dict) else ():
            if is_tensor(leaf):
                yield DumpTensor(path, leaf)
        return
    order = order_of(function)
    if order is None:
        yield from (DumpTensor(path if by_astray else f"{NODE}{path}", leaf) for path, leaf in walk(output, ""))
        return
    shapes = _shapes(forward)
    for path, leaf in walk(output, ""):
        index = numeral(path)
        known = index is not None and index < len(order)
        target = order[index] if index is not None and known else path
        fits = known and (by_astray or shapes.get(target, leaf["shape"]) == leaf["shape"])
        yield DumpTensor(target if fits or by_astray else f"{NODE}{path}", leaf)


def order_of(function: str) -> tuple[str, ...] | None:
    """The arguments of a function that is a single autograd node, in the order of its gradients; None for others.

    >>> order_of("layer_norm"), order_of("relu"), order_of("linear")
    (('0', 'kwargs.weight', 'kwargs.bias'), ('0',), None)
    """
    if function in _UNARY:
        return ("0",)
    return ("0", "1") if function in _BINARY else _NODES.get(function)


def _shapes(forward: Any) -> dict[str, Any]:
    arguments = forward.get("input_args") if isinstance(forward, dict) else None
    if not isinstance(arguments, list):
        return {}
    return {str(number): argument["shape"] for number, argument in enumerate(arguments) if is_tensor(argument)}
