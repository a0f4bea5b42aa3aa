"""Which names of a run are executed: the functions that the recorder observes, and none that reads or writes files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import get_overridable_functions

from astray.capture.pytorch.calls.catalogue import Catalogue, Function
from astray.replay.functions import OVERWRITING, RefusedNameError, resolve, result_size

NO_FUNCTIONS = {
    "__delitem__", "__init_subclass__", "__new__", "__subclasshook__", "__torch_function__", "__torch_dispatch__",
    "apply_", "map_", "map2_", "from_file", "module_load", "record_stream", "reinforce",
}  # fmt: skip
"""Python's protocols, and what takes Python's functions or files."""

SPARSE_OR_REMOVED = {
    "to_sparse_bsc", "to_sparse_bsr", "to_sparse_coo", "to_sparse_csc", "to_sparse_csr", "to_padded_tensor", "eig",
    "lstsq", "solve", "symeig", "matrix_rank",
}  # fmt: skip

COPIES_OF_DATA = {"new_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack"}


def listed() -> Iterator[tuple[str, str]]:
    """The type of every function of tensors that torch lists and the recorder observes, with its last word."""
    catalogue = Catalogue(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functions = [each for some in get_overridable_functions().values() for each in some]
    for function in functions:
        entry = catalogue.find(function)
        if isinstance(entry, Function):
            yield entry.type, entry.type.rpartition(".")[2]


def refusal(kind: str) -> str | None:
    try:
        resolve(kind)
    except RefusedNameError as error:
        return str(error)
    return None


def test_every_function_that_torch_lists_is_executed_or_refused_for_a_reason() -> None:
    reasons = {name: refusal(kind) for kind, name in listed() if name.startswith("__") or not name.startswith("_")}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    strided = {name for name, reason in refused.items() if "strides" in reason}
    assert strided == {"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"}
    foreign = {name for name, reason in refused.items() if reason == "not a function of torch itself"}
    rest = set(refused) - strided - foreign - NO_FUNCTIONS - SPARSE_OR_REMOVED - COPIES_OF_DATA
    assert not rest


COMMON = """
torch.add torch.matmul torch.rand torch.arange torch.where torch.einsum torch.spmm torch.sigmoid_ torch.zero_ torch.lstm
torch.Tensor.__pow__ torch.Tensor.__iadd__ torch.Tensor.__getitem__ torch.Tensor.__setitem__ torch.Tensor.unflatten
torch.Tensor.type torch.Tensor.copy_ torch.Tensor.masked_fill_ torch.Tensor.cuda torch.Tensor.unique
torch.nn.functional.cross_entropy torch.nn.functional.linear torch.nn.functional.logsigmoid torch.nn.functional.dropout
torch.nn.functional.hardswish torch.nn.functional.relu_ torch.nn.functional.scaled_dot_product_attention
torch.linalg.norm torch.special.expm1 torch.fft.fft torch._foreach_norm torch._weight_norm torch._grouped_mm
aten.mm.default aten._softmax.default aten.add_.Tensor torch.ops.aten.mm.default
"""


@pytest.mark.parametrize("kind", COMMON.split())
def test_common_functions_are_executed(kind: str) -> None:
    assert callable(resolve(kind).call)


HOSTILE = """
os.system builtins.eval torch.load torch.save torch.hub.load torch.Tensor.numpy torch.from_file torch.compile torch.vmap
torch.Tensor.__reduce_ex__ torch.Tensor.apply_ torch.Tensor.data_ptr torch.Tensor.as_strided torch.empty torch.os
torch.nn.functional.torch torch.Tensor.__class__ torch.__dict__ torch.manual_seed torch.set_default_device
torch.serialization.load torch.Tensor.share_memory_ aten._local_scalar_dense.default aten.from_file.default
aten.set_.source_Storage aten.mm.nonsense aten.nonsense.default torch.ops.mylib.anything.default torch.nonsense torch.
torch.Tensor.register_hook torch.Tensor.module_load torch.set_num_threads torch.Tensor.record_stream
"""


@pytest.mark.parametrize("kind", [*HOSTILE.split(), "", "torch.add\n", "torch.add; import os", "tørch.add"])
def test_what_does_not_compute_with_tensors_is_refused(kind: str) -> None:
    with pytest.raises(RefusedNameError):
        resolve(kind)


def test_a_function_that_is_replaced_while_torch_makes_its_list_is_known_all_the_same() -> None:
    # a recorder wraps cross_entropy while it runs, and torch keeps the list that it makes then
    assert resolve("torch.nn.functional.cross_entropy").call is torch.nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("kind", "name", "in_place"),
    [
        ("torch.Tensor.__iadd__", "iadd", True), ("torch.Tensor.add_", "add_", True),
        ("torch.Tensor.__setitem__", "setitem", True), ("torch.Tensor.__add__", "add", False),
        ("torch.Tensor.__invert__", "invert", False), ("torch.nn.functional.relu", "relu", False),
        ("aten.add_.Tensor", "add_", True), ("aten.add.Tensor", "add", False),
    ],
)  # fmt: skip
def test_what_is_in_place(kind: str, name: str, in_place: bool) -> None:
    found = resolve(kind)
    assert (found.name, found.in_place) == (name, in_place)


def test_what_overwrites_without_reading_is_in_place() -> None:
    assert all(resolve(f"torch.Tensor.{name}").in_place for name in OVERWRITING)


def test_copies_to_another_device_stay_here() -> None:
    given = torch.ones(2)
    moved = resolve("torch.Tensor.cuda").call(given, 0, non_blocking=True)
    assert moved.device.type == "cpu"
    assert moved is not given


@pytest.mark.parametrize(
    ("name", "inputs", "size"),
    [
        ("bincount", [torch.tensor([3, 10**12])], 10**12 + 1),
        ("one_hot", [torch.tensor([3, 5])], 12),
        ("repeat_interleave", [torch.ones(2, 5), torch.tensor([10**9, 1])], 5 * (10**9 + 1)),
        ("_grouped_mm", [torch.ones(6, 4), torch.ones(2, 4, 8), torch.tensor([2, 6])], 96),
        ("nonzero", [torch.ones(3)], 0),
    ],
)
def test_sizes_that_values_give_are_known_before_anything_is_computed(
    name: str, inputs: list[torch.Tensor], size: int
) -> None:
    assert result_size(name, inputs) == size
