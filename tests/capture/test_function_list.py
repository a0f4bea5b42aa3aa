"""A user's own list of functions: what it narrows, what it adds, and how it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from astray.capture.function_list import KINDS, FunctionList, categorise
from astray.errors import RecordError


def parse(given: Any) -> FunctionList:
    listed = FunctionList.parse(given)
    assert listed is not None
    return listed


def test_only_what_is_listed_of_a_kind_and_all_of_the_kinds_that_are_not() -> None:
    listed = parse({"functional": ["softmax"], "distributed": ["all_reduce"]})
    assert listed.wants("functional", "softmax", True)
    assert not listed.wants("functional", "linear", True)
    assert not listed.wants("torch", "softmax", True)  # the list says something of functions, and not this
    assert not listed.wants("tensor", "softmax", True)
    assert listed.wants("distributed", "all_reduce", True)
    assert not listed.wants("distributed", "broadcast", True)
    assert not listed.wants("npu_distributed", "all_reduce", True)
    assert listed.wants("aten", "mm.default", True)  # of operators it says nothing
    assert not listed.wants("aten", "empty.memory_format", False)


def test_aten_narrows_the_operators_alone() -> None:
    listed = parse({"aten": ["mm", "add.Tensor"]})
    assert listed.wants("aten", "mm.default", True)
    assert listed.wants("aten", "mm", True)
    assert listed.wants("aten", "add.Tensor", True)
    assert not listed.wants("aten", "add.Scalar", True)
    assert not listed.wants("aten", "bmm.default", True)
    assert listed.wants("functional", "linear", True)


def test_a_name_adds_what_is_not_recorded_by_default_and_a_pattern_does_not() -> None:
    listed = parse({"tensor": ["item", "new_*"], "torch": ["*"]})
    assert listed.wants("tensor", "item", False)
    assert listed.wants("tensor", "new_full", True)
    assert not listed.wants("tensor", "new_empty", False)
    assert not listed.wants("tensor", "add", True)
    assert listed.wants("torch", "add", True)
    assert not listed.wants("torch", "empty", False)


def test_an_empty_category_is_none_of_it() -> None:
    listed = parse({"aten": None, "torch": []})
    assert not listed.wants("aten", "mm", True)
    assert not listed.wants("torch", "add", True)
    assert not listed.wants("functional", "linear", True)
    assert listed.wants("distributed", "all_reduce", True)


def test_a_plain_list_means_functions_wherever_they_are() -> None:
    listed = parse(["softmax", "torch.linalg.*", "Tensor.add", "aten::mm", "torch.nn.functional.gelu"])
    assert [listed.wants(category, "softmax", True) for category in ("functional", "torch", "tensor")] == [True] * 3
    assert listed.wants("torch", "linalg.norm", True)
    assert listed.wants("tensor", "add", True)
    assert not listed.wants("torch", "add", True)
    assert listed.wants("functional", "gelu", True)
    assert [listed.wants("aten", name, True) for name in ("mm.default", "softmax.int")] == [True, False]
    assert listed.wants("distributed", "softmax", True)
    assert parse(["*"]).wants("torch", "add", True)


@pytest.mark.parametrize(
    ("entry", "category", "name"),
    [
        ("__add__", "tensor", "add"),
        ("__radd__", "tensor", "add"),
        ("add", "tensor", "__add__"),
        ("__iadd__", "tensor", "add_"),
        ("__truediv__", "tensor", "div"),
        ("__div__", "tensor", "__rtruediv__"),
        ("__mod__", "tensor", "remainder"),
        ("__ifloordiv__", "tensor", "floor_divide_"),
        ("__getitem__", "tensor", "__getitem__"),
        ("getitem", "tensor", "__getitem__"),
        ("__invert__", "tensor", "__invert__"),
        ("eq", "tensor", "__eq__"),
        ("linalg.norm", "torch", "linalg_norm"),
        ("fft_fft", "torch", "fft.fft"),
        ("torch.nn.functional.gelu", "functional", "gelu"),
        ("torch.ops.aten.mm", "aten", "mm.default"),
        ("aten.mm.default", "aten", "mm.default"),
        ("mylib.fused", "ops", "mylib.fused.default"),
        ("torch.ops.mylib.fused", "ops", "mylib.fused.default"),
    ],
)
def test_a_function_may_go_by_several_names(entry: str, category: str, name: str) -> None:
    assert parse({category: [entry]}).wants(category, name, True)


@pytest.mark.parametrize(("entry", "name"), [("__iadd__", "add"), ("add", "add_"), ("relu", "relu6"), ("i", "__ii__")])
def test_others_are_not_meant(entry: str, name: str) -> None:
    assert not parse({"tensor": [entry]}).wants("tensor", name, True)


@pytest.mark.parametrize(
    ("full", "found"),
    [
        ("torch.nn.functional.softmax", ("functional", "softmax")),
        ("torch.Tensor.__add__", ("tensor", "__add__")),
        ("torch.linalg.norm", ("torch", "linalg.norm")),
        ("torch.add", ("torch", "add")),
        ("torch._VF.lstm", ("_VF", "lstm")),
        ("torch.ops.aten.add.Tensor", ("aten", "add.Tensor")),
        ("torch.ops.mylib.fused.default", ("ops", "mylib.fused.default")),
        ("torch.distributed.all_reduce", ("distributed", "all_reduce")),
        ("torch_npu.npu_swiglu", ("torch_npu", "npu_swiglu")),
        ("torch_npu.distributed.all_gather", ("npu_distributed", "all_gather")),
        ("softmax", ("any", "softmax")),
    ],
)
def test_the_full_name_tells_the_category(full: str, found: tuple[str, str]) -> None:
    assert categorise(full) == found


def test_a_list_in_a_file(tmp_path: Path) -> None:
    """In the form that users of msprobe have at hand."""
    path = tmp_path / "support_wrap_ops.yaml"
    path.write_text("functional:  # a category\n  - conv1d\n  - conv2d\n\ntensor:\n  - __add__\n\n_VF:\n  - lstm\n")
    listed = parse(path)
    assert listed == parse({"functional": ["conv1d", "conv2d"], "tensor": ["__add__"], "_VF": ["lstm"]})
    assert listed.wants("_VF", "lstm", True)
    path.write_text("- softmax\n- torch.matmul\n")
    assert parse(str(path)) == parse(["softmax", "torch.matmul"])
    path.write_text("# nothing yet\n")
    assert FunctionList.parse(path) is None


@pytest.mark.parametrize("given", [[], {}, ()])
def test_nothing_listed_is_not_a_list(given: Any) -> None:
    assert FunctionList.parse(given) is None


@pytest.mark.parametrize(
    "given", [["softmax", "aten.mm", "*"], {"tensor": ["add", "add"], "torch": None}, {"relu", "gelu"}]
)
def test_it_is_written_down_and_read_again(given: Any) -> None:
    listed = parse(given)
    assert parse(listed.as_dict()) == listed
    assert parse(listed) is listed
    assert hash(parse(listed.as_dict())) == hash(listed)


@pytest.mark.parametrize(
    ("written", "category"),
    [("Tensor", "tensor"), ("F", "functional"), ("torch.nn.functional", "functional"), ("ATEN", "aten"), ("_vf", "_VF"),
     ("torch.distributed", "distributed"), ("torch", "torch")],
)  # fmt: skip
def test_categories_go_by_their_usual_names(written: str, category: str) -> None:
    assert parse({written: ["x"]}) == parse({category: ["x"]})


def test_two_names_of_one_category_are_one_list() -> None:
    assert parse({"F": ["gelu", "relu"], "functional": ["relu", "silu"]}) == parse({"F": ["gelu", "relu", "silu"]})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"functinal": ["gelu"]}, "functions has a category 'functinal', which is not known. It can be 'functional', "),
        ({"functinal": ["gelu"]}, "Did you mean 'functional'?"),
        ({"tensors": ["add"]}, "Did you mean 'tensor'?"),
        ({3: ["add"]}, "functions has a category 3, which is not known."),
        ({"torch": {"add": 1}}, "functions has {'add': 1} under 'torch', which is not a list of names."),
        ({"torch": [1]}, "functions has [1] under 'torch', which is not a list of names."),
        ({"functional": ["torch.add"]}, "functions has 'torch.add' under 'functional', but that is one of 'torch'."),
        ([None], "functions has [None] under 'any', which is not a list of names."),
        (3, "functions=3 is not a list. Give the path of a YAML file, "),
        ("softmax,linear", "functions='softmax,linear': softmax,linear has the ending ''."),
        ("nowhere.yaml", "functions='nowhere.yaml': There is no file nowhere.yaml. Give the path of a YAML file, "),
    ],
)
def test_what_is_wrong_is_answered_in_words(given: Any, said: str) -> None:
    with pytest.raises(RecordError, match=f"^{re.escape(said)}|{re.escape(said)}$"):
        FunctionList.parse(given)


def test_an_error_in_a_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("tensors: [add]")
    with pytest.raises(RecordError, match=f"^In {re.escape(str(path))}: functions has a category 'tensors'"):
        FunctionList.parse(path)
    path.write_text("list.yaml")
    with pytest.raises(RecordError, match=re.escape(f"In {path}: it holds 'list.yaml', which is not a list.")):
        FunctionList.parse(path)
    path.write_text("tensor: [add")
    with pytest.raises(RecordError, match=re.escape(f"{path} is not valid YAML: ")):
        FunctionList.parse(path)


def test_every_category_has_a_kind_of_call() -> None:
    assert set(KINDS.values()) == {"function", "op", "collective"}
