"""What a function, an op and a module that do the same are called alike, so that one rule fits all three."""

from __future__ import annotations

import re
from functools import cache

from astray.records import ROOT

_SAME = {
    "true_divide": "div",
    "divide": "div",
    "truediv": "div",
    "rtruediv": "rdiv",
    "rdiv": "rdiv",
    "multiply": "mul",
    "rmul": "mul",
    "subtract": "sub",
    "rsub": "sub",
    "radd": "add",
    "bmm": "matmul",
    "mm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "rmatmul": "matmul",
    "addbmm": "matmul",
    "baddbmm": "matmul",
    "addmm": "matmul",
    "linalg_vector_norm": "norm",
    "vector_norm": "norm",
    "safe_softmax": "softmax",
    "to_copy": "to",
    "allreduce": "all_reduce",
    "softmax_backward_data": "softmax",
    "log_softmax_backward_data": "log_softmax",
    "float_power": "pow",
    "rpow": "pow",
    "logsoftmax": "log_softmax",
}


@cache
def function_of(type_: str) -> str:
    """The plain name of what a call's type does.

    >>> function_of("torch.Tensor.__truediv__"), function_of("aten.div.Tensor")
    ('div', 'div')
    >>> function_of("torch.Tensor.mul_"), function_of("aten._softmax.default"), function_of("Softmax")
    ('mul', 'softmax', 'softmax')
    """
    parts = type_.split(".")
    name = parts[1] if parts[0] in ("aten", "c10d", "_c10d_functional", "prims") and len(parts) > 1 else parts[-1]
    if len(parts) == 1:  # a module's class
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    name = name.strip("_")
    return _SAME.get(name, name)


def joined(module: str, name: str) -> str:
    """The qualified name of a parameter or buffer of a module.

    >>> joined("h.2.mlp", "weight"), joined("<root>", "scale")
    ('h.2.mlp.weight', 'scale')
    """
    return name if module in ("", ROOT) else f"{module}.{name}"
