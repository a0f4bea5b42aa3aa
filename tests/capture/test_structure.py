"""Taking nested values apart."""

from __future__ import annotations

import enum
import json
from typing import Any

import pytest
import torch

from astray.capture import calls
from astray.capture.structure import Flattener

FLAT = Flattener(lambda value: isinstance(value, torch.Tensor))


def skeleton(*args: Any, **kwargs: Any) -> Any:
    return json.loads(FLAT.arguments(args, kwargs)[1])


def test_values_that_are_no_tensors_are_plain_and_stable() -> None:
    class Mode(enum.Enum):
        FAST = 1

    class Cache:
        pass

    assert skeleton(1, 2.5, True, None, "relu", float("nan"), torch.float16, torch.device("cpu"), slice(1, 3)) == {
        "args": [1, 2.5, True, None, "relu", "nan", "torch.float16", "cpu", "slice(1, 3, None)"]
    }
    assert skeleton(Mode.FAST, Cache(), len) == {"args": ["Mode.FAST", "<Cache>", "<len>"]}


def test_long_and_deep_values_are_cut() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "nested too deep" in json.dumps(skeleton(loop))
    (numbers,) = skeleton(list(range(1000)))["args"]
    assert numbers[-1] == "<936 more>"
    assert len(skeleton("x" * 10_000)["args"][0]) == 201


def test_tensors_are_found_however_long_the_list() -> None:
    found, _ = FLAT.arguments(([torch.ones(1)] * 100,), {})
    assert len(found) == 100
    assert found[-1][0] == "0.99"


def test_a_result_is_named_out() -> None:
    one = torch.ones(1)
    assert [path for path, _ in FLAT.result(one)] == ["out"]
    assert [path for path, _ in FLAT.result((one, {"mask": [one]}))] == ["out.0", "out.1.mask.0"]
    assert FLAT.result(None) == []


@pytest.mark.skipif(calls.native is None, reason="the native taps are not in use")
def test_several_results_are_taken_apart_natively_as_in_python() -> None:
    flat = Flattener(lambda value: isinstance(value, torch.Tensor), tensors=[torch.Tensor])
    one, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(1))
    several = [(), [], (None,), (one, None, one), [one] * 3, [one] * 64, [one] * 65, (one, 2, "x"), (one, (one, one)),
               (parameter, one), torch.max(torch.ones(2, 2), 0), [{"a": one}], one]  # fmt: skip
    for value in several:
        found = flat.native.result(value)
        assert [(path, id(tensor)) for path, tensor in found] == [(p, id(tensor)) for p, tensor in flat._result(value)]
    assert [path for path, _ in flat.native.result((one, None, one))] == ["out.0", "out.2"]


@pytest.mark.skipif(calls.native is None, reason="the native taps are not in use")
def test_numbers_that_count_as_tensors_are_found_among_several_results() -> None:
    flat = Flattener(lambda value: isinstance(value, torch.Tensor | int))
    assert flat.native.result((1, torch.ones(1), 2.0))[0] == ("out.0", 1)


def test_a_structure_met_before_is_told_from_one_that_only_equals_it() -> None:
    flat = Flattener(lambda value: isinstance(value, complex))
    for _ in range(2):
        assert flat.arguments((1j, True), {}) == ([("0", 1j)], '{"args":["<tensor>",true]}')
        assert flat.arguments((2j, 1), {}) == ([("0", 2j)], '{"args":["<tensor>",1]}')
        assert flat.arguments((1, 3j), {"a.b": 4j, "c": 1.0}) == (
            [("1", 3j), ("kwargs.a.b", 4j)],
            '{"args":[1,"<tensor>"],"kwargs":{"a.b":"<tensor>","c":1.0}}',
        )
        assert flat.arguments((None, 5j), {}) == ([("1", 5j)], '{"args":[null,"<tensor>"]}')
        assert flat.arguments((6j, None), {}) == ([("0", 6j)], '{"args":["<tensor>",null]}')


def test_an_object_that_holds_tensors_is_told_of_and_not_taken_apart() -> None:
    class Layer:
        def __init__(self) -> None:
            self.keys = 1j

    class Cache:
        def __init__(self) -> None:
            self.layers = [Layer()]

    told: list[str] = []
    flat = Flattener(lambda value: isinstance(value, complex), told.append)
    assert flat.arguments((Cache(), object(), Cache), {}) == (
        [],
        '{"args":["<Cache>","<object>","<test_an_object_that_holds_tensors_is_told_of_and_not_taken_apart.<locals>.Cache>"]}',
    )
    assert told == ["Cache"]


def test_lists_met_before_are_told_apart_by_kind_length_and_depth() -> None:
    flat = Flattener(lambda value: isinstance(value, complex), tensors=(complex,), values=(range,))
    deep: Any = 9j
    for _ in range(20):
        deep = [deep]
    for _ in range(2):
        assert flat.arguments(([1j, 2j], 3), {}) == (
            [("0.0", 1j), ("0.1", 2j)],
            '{"args":[["<tensor>","<tensor>"],3]}',
        )
        assert flat.arguments(([1j], 2j, 3), {}) == ([("0.0", 1j), ("1", 2j)], '{"args":[["<tensor>"],"<tensor>",3]}')
        assert flat.arguments(((4j, [5j]),), {}) == (
            [("0.0", 4j), ("0.1.0", 5j)],
            '{"args":[["<tensor>",["<tensor>"]]]}',
        )
        assert flat.arguments(([], [[True], [1]]), {}) == ([], '{"args":[[],[[true],[1]]]}')
        assert flat.arguments(([], [[1], [True]]), {}) == ([], '{"args":[[],[[1],[true]]]}')
        assert flat.arguments((range(3), 6j), {}) == ([("1", 6j)], '{"args":["range(0, 3)","<tensor>"]}')
        assert flat.arguments((deep,), {})[0] == []
