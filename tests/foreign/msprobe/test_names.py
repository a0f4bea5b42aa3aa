"""The names of msprobe's entries, both ways."""

from __future__ import annotations

import pytest

from astray.foreign.msprobe.names import Entry, by_keyword, function_stem, module_stem, order_of, parse, positional
from astray.records import Spelling


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Module.layers.0.attn.Attn.forward.1", Entry("module", "layers.0.attn", "Attn", "forward", 1)),
        ("Module.head.Linear.backward.0", Entry("module", "head", "Linear", "backward", 0)),
        ("Module.head.Linear.parameters_grad.2", Entry("gradient", "head", "Linear", "backward", 2)),
        ("Module.head.Linear.parameters_grad", Entry("gradient", "head", "Linear", "backward", 0)),
        ("Module.Net.forward.0", Entry("module", "<root>", "Net", "forward", 0)),
        ("Module.forward.Linear.forward.0", Entry("module", "forward", "Linear", "forward", 0)),
        ("Functional.linear.3.forward", Entry("function", "linear", "torch.nn.functional.linear", "forward", 3)),
        ("Tensor.__add__.3.backward", Entry("function", "add", "torch.Tensor.add", "backward", 3)),
        ("Tensor.__getitem__.0.forward", Entry("function", "getitem", "torch.Tensor.__getitem__", "forward", 0)),
        ("Tensor.__rtruediv__.0.forward", Entry("function", "rdiv", "torch.Tensor.__rdiv__", "forward", 0)),
        ("Torch.linalg.norm.7.forward", Entry("function", "norm", "torch.linalg.norm", "forward", 7)),
        ("NPU.npu_rms_norm.0.forward", Entry("function", "npu_rms_norm", "torch_npu.npu_rms_norm", "forward", 0)),
        ("MindSpeed.fused.0.forward", Entry("function", "fused", "MindSpeed.fused", "forward", 0)),
    ],
)
def test_a_name_says_which_call_it_is(name: str, expected: Entry) -> None:
    assert parse(name) == expected


def test_a_name_says_what_kind_of_call_it_is() -> None:
    names = (
        "Module.a.B.forward.0",
        "Module.a.B.parameters_grad.0",
        "Torch.add.0.forward",
        "Distributed.all_reduce.0.forward",
    )
    assert [entry.kind for name in names if (entry := parse(name))] == ["module", "parameter", "function", "collective"]


def test_mindspore_has_names_of_its_own() -> None:
    found = [
        parse(name, "mindspore") for name in ("Cell.net.fc.Dense.forward.0", "Mint.add.0.forward", "Jit.f.0.forward")
    ]
    assert [(entry.path, entry.type) for entry in found if entry] == [
        ("net.fc", "Dense"),
        ("add", "mindspore.mint.add"),
        ("f", "Jit.f"),
    ]


@pytest.mark.parametrize(
    "name", ["", "optimizer", "Module", "Functional.relu", "relu.0.forward", "Functional.relu.x.forward", "a/b"]
)
def test_what_is_not_a_name_is_none(name: str) -> None:
    assert parse(name) is None


def test_functions_of_other_homes_have_prefixes_of_their_own() -> None:
    assert function_stem("torch_npu.npu_rms_norm", "") == "NPU.npu_rms_norm"
    assert function_stem("torch_npu.atb.npu_ring_mla", "") == "NPU.npu_ring_mla"
    assert function_stem("torch.ops.npu.npu_fusion_attention.default", "") == "NPU.npu_fusion_attention"
    assert function_stem("torch.lstm", "") == "VF.lstm"
    assert function_stem("aten.mm.default", "") == "Aten.mm.default"
    assert function_stem("torch.distributed.all_reduce", "") == "Distributed.all_reduce"
    found = [parse(name) for name in ("VF.lstm.0.forward", "Aten.add.Tensor.2.forward", "Aten.mm.0.forward")]
    assert found == [
        Entry("function", "lstm", "torch.lstm", "forward", 0),
        Entry("function", "aten.add", "aten.add.Tensor", "forward", 2),
        Entry("function", "aten.mm", "aten.mm.default", "forward", 0),
    ]
    assert [entry.kind for entry in found if entry] == ["function", "op", "op"]


@pytest.mark.parametrize(
    ("type", "spelling", "with_number", "expected"),
    [
        ("torch.Tensor.add", Spelling("+"), False, "__add__"),
        ("torch.Tensor.add", Spelling("+", reflected=True), True, "__radd__"),
        ("torch.Tensor.add", Spelling("+", reflected=True), False, "__add__"),  # both are tensors
        ("torch.Tensor.add", Spelling("+="), False, "__add__"),  # of a number
        ("torch.Tensor.add_", Spelling("+="), True, "__iadd__"),
        ("torch.Tensor.add_", Spelling(name="add_"), True, "add_"),
        ("torch.Tensor.add", Spelling(name="__add__"), True, "__add__"),
        ("torch.Tensor.add", Spelling(name="method"), True, "add"),
        ("torch.Tensor.gt", Spelling("<", reflected=True), True, "__gt__"),
        ("torch.Tensor.div", Spelling("/"), True, "__truediv__"),
        ("torch.Tensor.neg", Spelling("-x"), False, "__neg__"),
        ("torch.Tensor.__pow__", Spelling("**"), True, "__pow__"),
        ("torch.Tensor.bitwise_and", Spelling("&", reflected=True), True, "__rand__"),
    ],
)
def test_a_function_is_called_as_it_was_spelled(
    type: str, spelling: Spelling, with_number: bool, expected: str
) -> None:
    assert function_stem(type, "x.add(1)", spelling, with_number) == f"Tensor.{expected}"


def test_a_function_is_called_as_the_line_that_calls_it() -> None:
    assert function_stem("torch.Tensor.add", "x = x + y") == "Tensor.__add__"
    assert function_stem("torch.Tensor.add", "x = x.add(y)") == "Tensor.add"
    assert function_stem("torch.Tensor.add", "") == "Tensor.add"
    assert function_stem("torch.nn.functional.relu", "relu(x)") == "Functional.relu"
    assert function_stem("torch.linalg.norm", "") == "Torch.norm"  # msprobe has the last word of a name
    assert function_stem("torch.ops.mylib.fused.default", "") == "Torch.ops.mylib.fused.default"
    assert function_stem("mylib.fused", "") is None


@pytest.mark.parametrize(
    "type",
    [
        "torch.nn.functional.relu",
        "torch.Tensor.add",
        "torch.Tensor.__rsub__",
        "torch.softmax",
        "torch.distributed.all_reduce",
    ],
)
def test_what_is_written_is_read_again(type: str) -> None:
    for code in ("", "a = b + c", f"b.{type.rpartition('.')[2]}(c)"):
        entry = parse(f"{function_stem(type, code)}.4.forward")
        assert entry is not None
        assert (entry.type, entry.number) == (type, 4)
    entry = parse(f"{module_stem('a.0', 'Linear')}.backward.2")
    assert entry == Entry("module", "a.0", "Linear", "backward", 2)


def test_arguments_that_torch_hands_on_by_keyword() -> None:
    assert (positional("layer_norm", "kwargs.weight"), by_keyword("layer_norm", "2")) == ("2", "kwargs.weight")
    assert (positional("layer_norm", "0"), by_keyword("layer_norm", "0")) == ("0", "0")
    assert (positional("relu", "kwargs.x"), by_keyword("relu", "2")) == ("kwargs.x", "2")


def test_the_gradients_of_a_function_that_is_one_node() -> None:
    assert order_of("layer_norm") == ("0", "kwargs.weight", "kwargs.bias")
    assert (order_of("relu"), order_of("add"), order_of("linear"), order_of("cross_entropy")) == (
        ("0",),
        ("0", "1"),
        None,
        None,
    )
