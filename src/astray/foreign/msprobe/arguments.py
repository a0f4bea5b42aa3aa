"""Where msprobe has the arguments of a function, and which argument a gradient of its backward entry belongs to.

A function that is written in Python hands its arguments on in its own way, some by position and all others by name,
given or not, and that is how astray sees them. msprobe has them as they were given: a recording for msprobe's files
knows how the call was written, and puts them back.

msprobe hooks the last node of the graph that a function made, and numbers what that node sends on. Where the function
is that node (`relu`, `add`, `layer_norm`) those are the gradients of its arguments. Where it is made of several
(`linear` of three dimensions, `matmul`, `cross_entropy`) they are of something in between: such a gradient is kept
under a path of its own, and never compared with that of an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from astray.foreign.msprobe.leaves import DumpTensor, is_tensor, walk
from astray.records import Spelling
from astray.wording import numeral

NODE = "node."
"""How the path of a gradient begins that is of a node and not known to be of an argument."""

OWN = "gradients"
"""The key of a backward entry for a function's gradients of its arguments that are not among those of its last node."""

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
"""The arguments that the gradients of a node belong to, in its order, as astray names them."""


def arrangement(spelling: Spelling | None, count: int, words: Collection[str]) -> dict[str, str] | None:
    """The place of each argument that was given, by the place where astray has it, in the order of the call.

    count, words: how many arguments astray has by position, and which by name. None where it is not known how they
    were given, or where they are seen as they were.

    >>> call = Spelling(parameters=("input", "shape", "weight", "bias", "eps"), positional=3, keywords=("eps",))
    >>> arrangement(call, 2, ["weight", "bias", "eps"])
    {'0': '0', '1': '1', 'kwargs.weight': '2', 'kwargs.eps': 'kwargs.eps'}
    """
    if spelling is None or spelling.parameters is None:
        return None
    names = spelling.parameters
    seen = {name: str(place) for place, name in enumerate(names[:count])} | {word: f"kwargs.{word}" for word in words}
    given = {name: str(place) for place, name in enumerate(names[: spelling.positional])}
    given |= {word: f"kwargs.{word}" for word in spelling.keywords}
    if count > len(names) or spelling.positional > len(names) or not given.keys() <= seen.keys():
        return None
    return {seen[name]: place for name, place in given.items()}


def gradient_paths(
    function: str, content: dict[str, Any], forward: Any, by_us: bool, nodes: Any
) -> Iterator[DumpTensor]:
    """The gradients of a function's backward entry, each with its path.

    forward: the function's forward entry, whose arguments tell by their shapes whether gradients can be theirs.
    by_us: whether astray wrote the dump, which has them by argument where msprobe's own order says nothing.
    nodes: which argument each is of, where astray has written them as msprobe does.
    """
    output = content.get("output")
    if by_us and isinstance(nodes, dict):
        for path, leaf in walk(output, ""):
            known = nodes.get(path)
            yield DumpTensor(known if isinstance(known, str) else f"{NODE}{path}", leaf)
        own = content.get(OWN)
        yield from (
            DumpTensor(path, leaf) for path, leaf in (own.items() if isinstance(own, dict) else ()) if is_tensor(leaf)
        )
        return
    order = order_of(function)
    if order is None:
        yield from (DumpTensor(path if by_us else f"{NODE}{path}", leaf) for path, leaf in walk(output, ""))
        return
    shapes = _shapes(forward)
    for path, leaf in walk(output, ""):
        place = numeral(path)
        known = place is not None and place < len(order)
        target = order[place] if place is not None and known else path
        fits = known and (by_us or shapes.get(target, leaf["shape"]) == leaf["shape"])
        yield DumpTensor(target if fits or by_us else f"{NODE}{path}", leaf)


def order_of(function: str) -> tuple[str, ...] | None:
    """The arguments of a function that is one node of the graph, in the order of its gradients; None of others.

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
    return {str(number): one["shape"] for number, one in enumerate(arguments) if is_tensor(one)}
