"""Which functions a run may name: those of torch that compute with tensors, in seven places.

A run is untrusted, so a name is looked up among what torch lists as functions of tensors, and nothing is imported for
it. What the recorder leaves out (queries, unfilled memory) is refused, and so is what reads files, memory or Python
objects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from astray.capture.pytorch.calls.function_names import QUERIES, UNFILLED

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
        arange range ones zeros full eye linspace logspace ones_like zeros_like full_like tril_indices triu_indices
        scalar_tensor tensor as_tensor vander bartlett_window blackman_window hamming_window hann_window kaiser_window
        rand randn randint randperm normal rand_like randn_like randint_like relu_ segment_reduce _grouped_mm
        _fused_rms_norm _weight_norm fill
        """.split()  # noqa: SIM905 - a list of quoted words is harder to read
    ),
    "torch.Tensor": frozenset({"new_zeros", "new_ones", "new_full", "unflatten", "type"}),
    "torch.nn.functional": frozenset(
        {"sigmoid", "tanh", "hardsigmoid", "hardswish", "upsample", "upsample_bilinear", "upsample_nearest"}
        | {"grouped_mm"}
    ),
    "torch.fft": frozenset({"fftfreq", "rfftfreq"}),
}
"""Functions that torch does not list, since they take no tensor or lists of them, or ask nobody before they run."""

_FOREACH = re.compile(r"_foreach_[a-z0-9]+_?")
"""Functions of lists of tensors, as optimizers call them. They check their arguments."""

_BY_STRIDES = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"})
"""They read memory around their input, which a rebuilt tensor does not have."""

_COMPUTING = frozenset({"alias", "detach"})
"""What the recorder leaves out as a query, and replay executes: they give their input."""

_PYTHON = frozenset(
    """
    __torch_dispatch__ align_as align_to apply_ from_file map2_ map_ module_load record_stream reinforce rename_
    """.split()  # noqa: SIM905
)
"""What takes Python functions, files, or names of dimensions."""

_REFUSED = (QUERIES - _COMPUTING) | _PYTHON

_PRIVATE_OPERATORS = frozenset(
    """
    _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data _to_copy _unsafe_view
    _native_batch_norm_legit _fused_rms_norm _fused_rms_norm_backward _grouped_mm
    _scaled_dot_product_flash_attention_for_cpu
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

CUMULATIVE = re.compile(r"cum(sum|prod)|logcumsumexp")
"""Functions of whose results each is a partial result of the next: CUDA's kernels go on from the rounded ones."""

BREAKING_TIES = re.compile(r"(arg|cum)?(max|min|sort)|(nan)?median|topk|kthvalue|mode|unique\w*|\w*pool\w*")
"""Functions with indices among their results. Where values are equal, each implementation may name another."""

OVERWRITING = frozenset(
    """
    normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ geometric_ log_normal_ zero_ fill_ copy_
    """.split()  # noqa: SIM905
)
"""In-place functions that do not read what they write to: it may have been unfilled memory."""

DATA_DEPENDENT = frozenset(
    {"getitem", "setitem", "masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "where", "index_put"}
    | {"index_put_", "index", "ctc_loss", "bincount", "repeat_interleave", "one_hot", "_grouped_mm", "grouped_mm"}
)
"""Functions that torch does not make without memory, since their results depend on values: `result_size` says how many
elements they have at most, where that can be more than their inputs have."""


def result_size(name: str, inputs: Sequence[torch.Tensor]) -> int:
    """How many elements the result of one of `DATA_DEPENDENT` has at most, beyond those of its inputs."""
    whole = [each for each in inputs if not each.is_floating_point() and not each.is_complex() and each.numel()]
    if name in ("bincount", "one_hot") and whole:
        highest = max(int(whole[0].max()), 0) + 1
        return highest * (whole[0].numel() if name == "one_hot" else 1)
    if name == "repeat_interleave" and whole:
        return inputs[0].numel() * int(whole[-1].sum().clamp(min=0)) // whole[-1].numel()
    if name.endswith("grouped_mm") and len(inputs) > 1:
        first, second = inputs[:2]
        groups = inputs[2].numel() if len(inputs) > 2 else 1
        return first.shape[-2] * second.shape[-1] * groups if min(first.dim(), second.dim()) > 1 else 0
    return 0


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """Products of groups: of rows, of columns, or of what is summed, as `offs` cuts them."""
    if offs is None:
        return first @ second
    ends = offs.tolist()
    cuts = list(zip([0, *ends[:-1]], ends, strict=True))
    if first.dim() == 2 and second.dim() == 3:
        return torch.cat([first[begin:end] @ second[at] for at, (begin, end) in enumerate(cuts)])
    if first.dim() == 3:
        return torch.cat([first[at] @ second[:, begin:end] for at, (begin, end) in enumerate(cuts)], dim=1)
    return torch.stack([first[:, begin:end] @ second[begin:end] for begin, end in cuts])


DEFINITIONS: dict[str, Callable[..., Any]] = {"_grouped_mm": _grouped_mm, "grouped_mm": _grouped_mm}
"""What computes in any dtype that which torch has in 16 bits alone."""


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
    _check(home, name, function)
    if home == "torch.Tensor" and name in _MOVES:
        return ResolvedFunction(lambda tensor, *_, **__: tensor.clone(), name, False)
    dunder = name.startswith("__") and name.endswith("__")
    in_place = name == "__setitem__" or bool(_IN_PLACE.fullmatch(name)) or (name.endswith("_") and not dunder)
    return ResolvedFunction(function, name.strip("_") if dunder else name, in_place)


def _check(home: str, name: str, function: Any) -> None:
    """Raises RefusedNameError for a name that is not executed."""
    if function is None:
        raise RefusedNameError("not a function of this torch")
    if name in UNFILLED:
        raise RefusedNameError("memory that is not filled yet")
    if name in _BY_STRIDES:
        raise RefusedNameError("a view by strides of its own: what lies around its input was not kept")
    if name in _REFUSED:
        raise RefusedNameError("not a function that computes with tensors")
    if name in _UNLISTED.get(home, ()) or (home == "torch" and _FOREACH.fullmatch(name)):
        return
    if (home, name) in _listed() or (home, id(function)) in _listed():
        return
    in_place = name.endswith("_") and not name.startswith("_")  # of these torch lists those of tensors alone
    if in_place and {(home, name[:-1]), ("torch", name[:-1]), ("torch.Tensor", name)} & _listed():
        return
    raise RefusedNameError("a function that torch does not list among those of tensors, such as a private one")


@functools.cache
def _listed() -> frozenset[tuple[str, str | int]]:
    """What torch lists as functions of tensors: where it is, with its name and with its id.

    A few have another name than they have there. And torch lists what it has found when it was first asked, which may
    be a wrapper of then.
    """
    homes = {id(space): home for home, space in _NAMESPACES.items()} | {id(torch.functional): "torch"}
    found = set[tuple[str, str | int]]()
    for space, functions in get_overridable_functions().items():
        home = homes.get(id(space))
        if home is not None:
            short = f"{home.rpartition('.')[2]}_"  # torch.linalg.norm calls itself linalg_norm
            names = [getattr(function, "__name__", "") for function in functions]
            found.update((home, each) for name in names for each in (name, name.removeprefix(short)))
            found.update((home, id(function)) for function in functions)
    return frozenset(found)


def _operator(name: str, overload: str | None) -> ResolvedFunction:
    refused = name in _REFUSED or name in UNFILLED or name in _BY_STRIDES
    private = name.startswith("_") and name not in _PRIVATE_OPERATORS and not _FOREACH.fullmatch(name)
    if refused or private:
        raise RefusedNameError("an operator that torch calls by itself, or one that does not compute")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        raise RefusedNameError("not an operator of this torch")
    return ResolvedFunction(getattr(packet, overload or "default"), name, name.endswith("_"))
