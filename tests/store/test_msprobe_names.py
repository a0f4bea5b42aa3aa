"""The names of msprobe's entries, both ways."""

from __future__ import annotations

import pytest

from astray.store.msprobe.gradients import order_of
from astray.store.msprobe.names import Entry, by_keyword, function_stem, module_stem, parse, positional


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
def test_what_is_no_name_is_none(name: str) -> None:
    assert parse(name) is None


def test_a_function_is_called_as_the_line_that_calls_it() -> None:
    assert function_stem("torch.Tensor.add", "x = x + y") == "Tensor.__add__"
    assert function_stem("torch.Tensor.add", "x = x.add(y)") == "Tensor.add"
    assert function_stem("torch.Tensor.add", "") == "Tensor.add"
    assert function_stem("torch.nn.functional.relu", "relu(x)") == "Functional.relu"
    assert function_stem("torch.linalg.norm", "") == "Torch.linalg.norm"
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
