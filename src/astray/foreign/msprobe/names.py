"""The names of msprobe's entries, `Module.layers.0.attn.Attn.forward.0`, and the positions of their arguments.

A name counts its calls through the whole step, while astray's key counts those of a site in a micro step; only the
reader and the writer, which see a whole step, can convert one into the other. msprobe records operators under their own
names (`Tensor.__radd__`), astray under those of their functions (`torch.Tensor.add`). A recording for msprobe's files
knows how a function was called (`Spelling`); for other runs it is derived from the line of the call.

A function that is written in Python passes its arguments on in its own way, some by position and all others by keyword,
whether the caller passed them or not, and astray records them like that. msprobe records them as the caller passed
them. A recording for msprobe's files has how the call was written, and restores their positions.

msprobe hooks the last autograd node of a function, and numbers the gradients that this node sends on. Where the
function is a single node (`relu`, `add`, `layer_norm`) they are the gradients of its arguments. Where it is made of
several (`linear` of three dimensions, `matmul`, `cross_entropy`) they are gradients of intermediate values: these get a
path of their own, and are never compared with the gradient of an argument.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from astray.foreign.msprobe.leaves import DumpTensor, is_tensor, walk
from astray.records import ROOT, Kind, Phase, Spelling
from astray.wording import numeral

What = Literal["module", "function", "gradient"]

MODULES = ("Module", "Cell")
GRADIENTS = "parameters_grad"

_MODULE = re.compile(r"(Module|Cell)\.(?:(.+)\.)?([^.]+)\.(forward|backward|parameters_grad)(?:\.(\d{1,9}))?")
_FUNCTION = re.compile(r"([A-Za-z]\w*)\.(.+)\.(\d{1,9})\.(forward|backward)")

_HOMES = {
    "Functional": "torch.nn.functional",
    "Tensor": "torch.Tensor",
    "Torch": "torch",
    "VF": "torch._VF",
    "Aten": "torch.ops.aten",
    "NPU": "torch_npu",
    "Distributed": "torch.distributed",
}
_MINDSPORE = {
    "Functional": "mindspore.ops",
    "Tensor": "mindspore.Tensor",
    "Mint": "mindspore.mint",
    "MintFunctional": "mindspore.mint.nn.functional",
    "MintDistributed": "mindspore.mint.distributed",
    "Distributed": "mindspore.communication.comm_func",
}
_PREFIXES = sorted(
    ((f"{home}.", prefix) for prefix, home in [*_HOMES.items(), ("NPU", "torch.ops.npu"), ("Aten", "aten")]),
    key=lambda pair: -len(pair[0]),
)
_VARIABLE_FUNCTIONS = frozenset(
    {"gru", "gru_cell", "lstm", "lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell"}
)
"""What torch's modules call as functions of torch._VF; astray records them as those of torch, which they are."""

_OPERATORS = {
    "add": "__add__", "sub": "__sub__", "mul": "__mul__", "div": "__truediv__", "remainder": "__mod__",
    "matmul": "__matmul__", "neg": "__neg__", "abs": "__abs__", "positive": "__pos__",
    "ne": "__ne__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__",
    "add_": "__iadd__", "sub_": "__isub__", "mul_": "__imul__", "div_": "__itruediv__",
    "remainder_": "__imod__", "floor_divide_": "__ifloordiv__",
}  # fmt: skip
"""The method that torch calls for an operator, and the operator's."""

_SIGNS = {
    "+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow", "@": "matmul",
    "&": "and", "|": "or", "^": "xor", "<<": "lshift", ">>": "rshift",
}  # fmt: skip
"""Python's names for its operators, without the underscores."""

_FUNCTIONS = {operator: function for function, operator in _OPERATORS.items()} | {
    "__radd__": "add", "__rmul__": "mul", "__div__": "div", "__idiv__": "div_", "__rtruediv__": "__rdiv__",
    "__rand__": "bitwise_and", "__ror__": "bitwise_or", "__rxor__": "bitwise_xor", "__rmatmul__": "matmul",
}  # fmt: skip


class Entry(NamedTuple):
    """An entry's name in its parts. `path` is a module's path, or a function's name."""

    what: What
    path: str
    type: str
    phase: Phase
    number: int

    @property
    def kind(self) -> Kind:
        """The kind of call in astray's records."""
        if self.what == "gradient":
            return "parameter"
        if self.what == "module":
            return "module"
        if self.type.startswith("aten."):
            return "op"
        return "collective" if ".distributed." in self.type or ".communication." in self.type else "function"


def parse(name: str, framework: str = "pytorch") -> Entry | None:
    """An entry's name in its parts; None when the text is not such a name.

    >>> parse("Module.layers.0.attn.Attn.forward.1")
    Entry(what='module', path='layers.0.attn', type='Attn', phase='forward', number=1)
    >>> parse("Tensor.__add__.3.backward")
    Entry(what='function', path='add', type='torch.Tensor.add', phase='backward', number=3)
    """
    if match := _MODULE.fullmatch(name):
        _, path, type, phase, number = match.groups()
        site = path or ROOT
        if phase == GRADIENTS:
            return Entry("gradient", site, type, "backward", int(number or 0))
        return Entry("module", site, type, phase, int(number or 0))  # type: ignore[arg-type]
    if match := _FUNCTION.fullmatch(name):
        prefix, api, number, phase = match.groups()
        homes = _MINDSPORE if framework == "mindspore" else _HOMES
        if (
            prefix == "Aten" and framework != "mindspore"
        ):  # in astray's form, with the overload `default` if there is none
            packet, _, overload = api.partition(".")
            return Entry("function", f"aten.{packet}", f"aten.{packet}.{overload or 'default'}", phase, int(number))  # type: ignore[arg-type]
        if prefix == "VF" and api in _VARIABLE_FUNCTIONS:
            prefix = "Torch"
        full = f"{homes.get(prefix, prefix)}.{_FUNCTIONS.get(api, api) if prefix == 'Tensor' else api}"
        return Entry("function", short(full), full, phase, int(number))  # type: ignore[arg-type]
    return None


def short(type: str) -> str:
    """A function's name as in a site: `torch.Tensor.__getitem__` is `getitem`.

    >>> short("torch.nn.functional.linear"), short("torch.Tensor.__rsub__")
    ('linear', 'rsub')
    """
    name = type.rpartition(".")[2]
    return name.strip("_") if name.startswith("__") and name.endswith("__") else name


def module_stem(path: str, type: str) -> str:
    """The name of a module's entries without phase and number."""
    return f"Module.{path}.{type}"


def function_stem(type: str, code: str, spelling: Spelling | None = None, with_number: bool = False) -> str | None:
    """The name of a function's entries without number and phase; None when msprobe has no prefix for its module.

    code: the line of the call, which distinguishes `x + y` from `x.add(y)` where there is no `spelling`.
    with_number: whether its second argument is not a tensor, so that it may be `1 + x`.

    >>> function_stem("torch.nn.functional.relu", ""), function_stem("torch.Tensor.add", "x = x + y")
    ('Functional.relu', 'Tensor.__add__')
    >>> function_stem("torch.Tensor.mul", "", Spelling("*", reflected=True), with_number=True)
    'Tensor.__rmul__'
    """
    for home, prefix in _PREFIXES:
        if type.startswith(home):
            api = type[len(home) :]
            if prefix == "Torch" and api in _VARIABLE_FUNCTIONS:
                return f"VF.{api}"
            if prefix == "Tensor":
                api = _operator(api, code) if spelling is None else _spelled(api, spelling, with_number)
            elif home == "torch.ops.npu.":
                api = api.partition(".")[0]  # without its overload
            elif prefix in ("Torch", "NPU") and not api.startswith(("ops.", "nn.")):
                api = api.rpartition(".")[2]  # torch.linalg.norm is Torch.norm
            return f"{prefix}.{api}"
    return None


def _operator(api: str, code: str) -> str:
    return api if not code or f".{api}(" in code else _OPERATORS.get(api, api)


def _spelled(api: str, spelling: Spelling, with_number: bool) -> str:
    """The name of a tensor's method by how the call was written."""
    sign = spelling.operator.removesuffix("=")
    if not spelling.operator:
        is_method = spelling.name.startswith("__") and spelling.name.endswith("__")
        return spelling.name if is_method and api in (_FUNCTIONS.get(spelling.name), spelling.name) else api
    if api.startswith("__") or sign not in _SIGNS:
        return _OPERATORS.get(api, api)  # `x < 1`, `-x`, and methods named after their operator already
    if spelling.operator != sign and api.endswith("_"):
        return f"__i{_SIGNS[sign]}__"
    return f"__r{_SIGNS[sign]}__" if with_number and spelling.reflected else f"__{_SIGNS[sign]}__"


# -- arguments ---------------------------------------------------------------------------------------------------------


NODE = "node."
"""The prefix of the path of a gradient of an autograd node that is not known to be of an argument."""

ARGUMENT_GRADIENTS = "gradients"
"""The key of a backward entry for gradients of the arguments that are not among those of the last node."""

_POSITIONS = {
    "batch_norm": {"weight": 3, "bias": 4},
    "binary_cross_entropy": {"weight": 2},
    "binary_cross_entropy_with_logits": {"weight": 2, "pos_weight": 6},
    "cross_entropy": {"weight": 2},
    "embedding_bag": {"offsets": 2, "per_sample_weights": 8},
    "group_norm": {"weight": 2, "bias": 3},
    "huber_loss": {"weight": 4},
    "instance_norm": {"running_mean": 1, "running_var": 2, "weight": 3, "bias": 4},
    "layer_norm": {"weight": 2, "bias": 3},
    "mse_loss": {"weight": 5},
    "multi_margin_loss": {"weight": 4},
    "multilabel_soft_margin_loss": {"weight": 2},
    "nll_loss": {"weight": 2},
    "rms_norm": {"weight": 2},
}
"""Tensors that torch.nn.functional passes on by keyword however the caller passed them, as astray records them, and the
positions at which torch's own modules pass them, as msprobe records them."""

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


def positional(function: str, path: str) -> str:
    """msprobe's path of an argument: by position.

    >>> positional("layer_norm", "kwargs.weight"), positional("layer_norm", "0"), positional("relu", "kwargs.inplace")
    ('2', '0', 'kwargs.inplace')
    """
    position = _POSITIONS.get(function, {}).get(path.removeprefix("kwargs."))
    return str(position) if position is not None and path.startswith("kwargs.") else path


def by_keyword(function: str, path: str) -> str:
    """astray's path of an argument: by keyword, where the function passes it on like that.

    >>> by_keyword("layer_norm", "2"), by_keyword("layer_norm", "0")
    ('kwargs.weight', '0')
    """
    words = {str(position): word for word, position in _POSITIONS.get(function, {}).items()}
    return f"kwargs.{words[path]}" if path in words else path


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
