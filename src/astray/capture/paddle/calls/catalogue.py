"""Which functions are recorded, and what they are called.

Functions that compute with tensors are recorded; those that only query a tensor, return unfilled memory, or are the
derivative of another are not. A user's list narrows or widens this.
"""

from __future__ import annotations

from typing import Any

import paddle

from astray.capture.function_list import FunctionList, categorise
from astray.records import Kind

_QUERIES = frozenset(
    """
    shape shape64 numel is_empty full_int_array full_with_tensor all_close allclose equal_all accuracy accuracy_check
    check_numerics depend print shadow_output shadow_feed data feed fetch seed share_data share_data_
    enable_check_model_nan_inf disable_check_model_nan_inf memcpy memcpy_d2h memcpy_h2d memcpy_d2h_multi_io
    coalesce_tensor
    """.split()  # noqa: SIM905
)
"""They query tensors, or move them. They compute no numbers."""

_UNFILLED = frozenset({"empty", "empty_like"})
"""What they return holds whatever lay there before."""

_VIEWS = frozenset(
    """
    getitem reshape reshape_ transpose transpose_ squeeze squeeze_ unsqueeze unsqueeze_ flatten flatten_ split
    split_with_num slice strided_slice expand as_strided view_shape view_dtype view_slice unbind diagonal tensor_unfold
    """.split()  # noqa: SIM905
)
"""They return views of their first argument, or may do so. They do not read it."""

_WRITTEN_TOO = {"batch_norm": (1, 2), "batch_norm_": (1, 2), "sync_batch_norm": (1, 2), "sync_batch_norm_": (1, 2)}
"""Arguments, by their indexes, that a function writes to without raising their versions: running statistics."""

OPERATORS = (
    *(f"__{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul")),
    *(f"__r{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul")),
    *(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
)
"""The operators of tensors that Paddle implements in C++, past its functions."""

METHODS = {
    "clone": "clone",
    "contiguous": "contiguous",
    "_getitem_dygraph": "getitem",
    "_setitem_dygraph": "setitem",
}
"""Other methods of tensors that are implemented there, and what they are called in sites."""

WRITERS = ("set_value", "copy_", "_inplace_assign", "reconstruct_from_", "_share_buffer_to")
"""Methods that write into a tensor without raising its version. They are watched, not recorded."""


class Function:
    """A function in the catalogue. `home` is where the user finds it: `paddle._C_ops` or `paddle.Tensor`."""

    kind: Kind = "function"

    def __init__(self, name: str, home: str, own: str) -> None:
        self.name = name
        self.type = f"{home}.{own}"
        self.is_unfilled = name in _UNFILLED
        self.in_place = (name.endswith("_") and name not in _WRITTEN_TOO) or own == "_setitem_dygraph"
        self.is_view = name in _VIEWS and not self.in_place
        self._written_too = _WRITTEN_TOO.get(name, ())

    def not_read(self, args: tuple[Any, ...]) -> list[paddle.Tensor]:
        """The tensors that a call does not read: it only returns views of them."""
        return [arg for arg in args[:1] if isinstance(arg, paddle.Tensor)] if self.is_view else []

    def written(self, args: tuple[Any, ...]) -> list[paddle.Tensor]:
        """The tensors that a call writes into."""
        given = [*(args[:1] if self.in_place else ()), *(args[i] for i in self._written_too if i < len(args))]
        return [arg for arg in given if isinstance(arg, paddle.Tensor)]

    def result(self, args: tuple[Any, ...], result: Any) -> Any:
        """Its results, or what it has changed when it returns nothing."""
        return args[0] if result is None and self.in_place and args else result


class Catalogue:
    """Finds the entry of a function; None for one that is not recorded."""

    def __init__(self, function_list: FunctionList | None) -> None:
        self._function_list = function_list

    def of_op(self, name: str) -> Function | None:
        """The entry of `paddle._C_ops.NAME`."""
        if name.startswith("_") or name.endswith(("_grad", "_grad_", "_double_grad", "_triple_grad")):
            return None
        return self._listed(Function(name, "paddle._C_ops", name), name not in _QUERIES)

    def of_method(self, name: str) -> Function | None:
        """The entry of a method of tensors."""
        short = METHODS.get(name) or name.strip("_")
        return self._listed(Function(short, "paddle.Tensor", name), True)

    def _listed(self, function: Function, by_default: bool) -> Function | None:
        if self._function_list is None:
            return function if by_default else None
        wanted = self._function_list.wants(*categorise(function.type), by_default)
        return function if wanted or (function.is_unfilled and by_default) else None
