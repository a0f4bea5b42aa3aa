"""Which functions a run may name: those of torch that compute with tensors, in seven places.

A run is untrusted, so a name is looked up among what torch lists as functions of tensors, and nothing is imported for
it. What the recorder leaves out (queries, unfilled memory) is refused, and so is what reads files, memory or Python
objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import get_overridable_functions

_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
}

_UNLISTED = {
    "torch": frozenset(
        """
        arange ones zeros full eye linspace logspace ones_like zeros_like full_like tril_indices triu_indices
        scalar_tensor tensor bartlett_window blackman_window hamming_window hann_window kaiser_window rand randn randint
        randperm normal rand_like randn_like randint_like relu_ _foreach_norm _foreach_mul _foreach_mul_ _foreach_add
        _foreach_add_ _foreach_sub _foreach_sub_ _foreach_div _foreach_div_ _foreach_sqrt _foreach_neg _foreach_abs
        _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_ _foreach_maximum_
        """.split()  # noqa: SIM905 - a list of quoted words is harder to read
    ),
    "torch.Tensor": frozenset({"new_zeros", "new_ones", "new_full"}),
    "torch.nn.functional": frozenset({"relu_", "elu_", "selu_", "celu_", "leaky_relu_", "hardtanh_", "threshold_"}),
}
"""Functions that torch does not list: they take no tensor, lists of them, or write in place. Those that draw random
numbers are here to be found out as such."""

_REFUSED = frozenset(
    """
    size dim ndimension stride storage_offset numel nelement element_size itemsize nbytes is_contiguous
    is_floating_point is_complex is_signed is_nonzero is_same_size is_set_to is_shared is_pinned is_inference
    is_coalesced is_conj is_neg is_tensor device is_storage is_distributed has_names get_device data_ptr storage
    untyped_storage storage_type typed_storage tolist item numpy equal allclose __len__ __bool__ __float__
    __int__ __index__ __complex__ __contains__ __repr__ __str__ __format__ __hash__ __dir__ __deepcopy__
    __reduce__ __reduce_ex__ __setstate__ __array__ __array_wrap__ __dlpack__ __dlpack_device__
    __cuda_array_interface__ __iter__ register_hook register_post_accumulate_grad_hook retain_grad
    requires_grad_ backward detach_ as_subclass share_memory_ pin_memory names rename refine_names
    result_type can_cast promote_types broadcast_shapes is_grad_enabled set_grad_enabled _set_grad_enabled
    is_autocast_enabled set_default_dtype get_default_dtype manual_seed seed initial_seed get_rng_state
    set_rng_state _assert_async _assert_tensor_metadata _is_zerotensor _version
    empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided new resize_
    resize_as_ resize_as_sparse_ set_ as_strided as_strided_ as_strided_copy as_strided_scatter
    map_ map2_ apply_ record_stream module_load from_file rename_ __torch_dispatch__ type
    """.split()  # noqa: SIM905
)
"""Queries, unfilled memory and Python's protocols, as the recorder's catalogue has them; what takes Python functions or
files; and what reads memory by strides of its own, which a rebuilt tensor does not have."""

_PRIVATE_OPERATORS = frozenset(
    """
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data _to_copy _unsafe_view
    _native_batch_norm_legit _foreach_norm _foreach_mul_ _foreach_mul _foreach_add _foreach_add_ _foreach_div
    _foreach_div_ _foreach_sqrt _foreach_addcmul_ _foreach_addcdiv_ _foreach_lerp_ _fused_rms_norm
    """.split()  # noqa: SIM905
)
"""Operators with an underscore check their arguments less, since torch calls them itself; these do."""

_NAME = re.compile(
    r"(torch|torch\.Tensor|torch\.nn\.functional|torch\.linalg|torch\.special|torch\.fft)\.(\w+)", re.ASCII
)
_OPERATOR = re.compile(r"(?:torch\.ops\.)?aten\.([a-z]\w*|_[a-z]\w*)(?:\.(\w+))?", re.ASCII)
_IN_PLACE = re.compile(r"__i(?!nvert|ndex|nt|ter)\w+__")

_MOVES = frozenset({"cpu", "cuda", "npu", "xpu"})
"""Methods that copy to another device. All devices are this one here."""

CONTRACTING = re.compile(
    r"matmul|mm|mv|linear|einsum|conv|bilinear|tensordot|attention|lstm|gru|rnn|dot|inner|kron|cdist"
)
"""Functions that sum products: chips compute them in TF32, and the number of terms follows from two sizes."""

COMPOSED = re.compile(r"attention|lstm|gru|rnn")
"""Functions whose right kernels round to 16 bits between their parts, and that have results in which these cancel."""

BREAKING_TIES = re.compile(r"(arg)?(max|min|sort)|(nan)?median|topk|kthvalue|mode|unique\w*|\w*pool\w*")
"""Functions with indices among their results. Where values are equal, each implementation may name another."""

DATA_DEPENDENT = frozenset(
    {"getitem", "setitem", "masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "where", "index_put"}
    | {"index_put_", "index", "ctc_loss"}
)
"""Functions whose results have sizes that depend on values, and never more elements than their inputs have indices."""


class RefusedNameError(Exception):
    """A name that is not executed; its text says why."""


class ResolvedFunction:
    """A function that may be executed. `name` is its last word, without underscores around it: `linear`, `iadd`."""

    def __init__(self, call: Callable[..., Any], name: str, in_place: bool) -> None:
        self.call = call
        self.name = name
        self.in_place = in_place


def resolve(kind: str) -> ResolvedFunction:
    """The function of a recorded type. Raises RefusedNameError for every name that is not one of those above.

    >>> resolve("torch.nn.functional.linear").name
    'linear'
    """
    operator = _OPERATOR.fullmatch(kind)
    if operator is not None:
        return _operator(operator[1], operator[2])
    found = _NAME.fullmatch(kind)
    if found is None:
        raise RefusedNameError("not a function of torch itself")
    home, name = found.groups()
    function: Any = vars(_NAMESPACES[home]).get(name) if home != "torch.Tensor" else getattr(torch.Tensor, name, None)
    if name in _REFUSED or not (name in _UNLISTED.get(home, ()) or _is_listed(function)):
        raise RefusedNameError("not a function that computes with tensors")
    if home == "torch.Tensor" and name in _MOVES:
        return ResolvedFunction(lambda tensor, *_, **__: tensor.clone(), name, False)
    dunder = name.startswith("__") and name.endswith("__")
    in_place = name == "__setitem__" or bool(_IN_PLACE.fullmatch(name)) or (name.endswith("_") and not dunder)
    return ResolvedFunction(function, name.strip("_") if dunder else name, in_place)


def _is_listed(function: Any) -> bool:
    try:
        return function in _listed()
    except TypeError:  # not hashable, so not a function
        return False


@functools.cache
def _listed() -> frozenset[Any]:
    """What torch lists as functions of tensors."""
    return frozenset(
        function for functions in get_overridable_functions().values() for function in functions if callable(function)
    )


def _operator(name: str, overload: str | None) -> ResolvedFunction:
    if name in _REFUSED or (name.startswith("_") and name not in _PRIVATE_OPERATORS):
        raise RefusedNameError("an operator that torch calls by itself, or one that does not compute")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        raise RefusedNameError("not an operator of this torch")
    return ResolvedFunction(getattr(packet, overload or "default"), name, name.endswith("_"))
