"""Nested arguments and results are flattened into tensors with paths, and a skeleton of the rest."""

from __future__ import annotations

import enum
import json
import weakref
from typing import Any, ClassVar

import torch

from astray.capture.pytorch.native.core import _torch as NATIVE
from astray.capture.structure import MOST_TENSORS, Flattener, ObjectFlattener

FLAT = Flattener(NATIVE, lambda value: isinstance(value, torch.Tensor))


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


def test_several_results_are_taken_apart_natively_as_in_python() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, torch.Tensor), tensors=[torch.Tensor])
    one, parameter = torch.ones(1), torch.nn.Parameter(torch.ones(1))
    several = [(), [], (None,), (one, None, one), [one] * 3, [one] * 64, [one] * 65, (one, 2, "x"), (one, (one, one)),
               (parameter, one), torch.max(torch.ones(2, 2), 0), [{"a": one}], one]  # fmt: skip
    for value in several:
        found = flat.native.result(value)
        assert [(path, id(tensor)) for path, tensor in found] == [(p, id(tensor)) for p, tensor in flat._result(value)]
    assert [path for path, _ in flat.native.result((one, None, one))] == ["out.0", "out.2"]


def test_numbers_that_count_as_tensors_are_found_among_several_results() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, torch.Tensor | int))
    assert flat.native.result((1, torch.ones(1), 2.0))[0] == ("out.0", 1)


def test_a_structure_met_before_is_told_from_one_that_only_equals_it() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex))
    for _ in range(2):
        assert flat.arguments((1j, True), {}) == ([("0", 1j)], '{"args":["<tensor>",true]}')
        assert flat.arguments((2j, 1), {}) == ([("0", 2j)], '{"args":["<tensor>",1]}')
        assert flat.arguments((1, 3j), {"a.b": 4j, "c": 1.0}) == (
            [("1", 3j), ("kwargs.a.b", 4j)],
            '{"args":[1,"<tensor>"],"kwargs":{"a.b":"<tensor>","c":1.0}}',
        )
        assert flat.arguments((None, 5j), {}) == ([("1", 5j)], '{"args":[null,"<tensor>"]}')
        assert flat.arguments((6j, None), {}) == ([("0", 6j)], '{"args":["<tensor>",null]}')


class Layer:
    """Like a layer of a cache; code of its own would tell on itself."""

    __slots__ = ("keys", "unset")
    ran: ClassVar[list[str]] = []

    def __init__(self, keys: complex) -> None:
        self.keys = keys

    @property
    def values(self) -> complex:
        self.ran.append("property")
        return 9j

    def __getattr__(self, name: str) -> Any:
        self.ran.append(name)
        raise AttributeError(name)


class Cache:
    """Like a cache of transformers."""

    def __init__(self, *keys: complex) -> None:
        self.layers = [Layer(one) for one in keys]
        self.extra = {"mask": 7j, ("odd", "key"): 8j}
        self.me = self
        self.offloading = False


def objects() -> ObjectFlattener:
    return ObjectFlattener(NATIVE, lambda value: isinstance(value, complex))


def test_an_object_is_taken_apart_and_none_of_its_code_runs() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex), objects())
    found, skeleton = flat.arguments((Cache(1j, 2j), object(), Cache), {"cache": Cache(3j)})
    assert found == [
        ("0.layers.0.keys", 1j), ("0.layers.1.keys", 2j), ("0.extra.mask", 7j),
        ("kwargs.cache.layers.0.keys", 3j), ("kwargs.cache.extra.mask", 7j),
    ]  # fmt: skip
    assert skeleton == '{"args":["<Cache>","<object>","<Cache>"],"kwargs":{"cache":"<Cache>"}}'
    assert flat.result({"past": Cache(1j)}) == [("out.past.layers.0.keys", 1j), ("out.past.extra.mask", 7j)]
    assert Layer.ran == []


def test_without_it_objects_are_left_alone() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex))
    assert flat.arguments((Cache(1j),), {}) == ([], '{"args":["<Cache>"]}')


def test_objects_are_taken_apart_natively_as_in_python() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex), objects(), tensors=[complex])
    for args in ((Cache(1j), 2j), ([Cache(1j)],), (1j, {"past": Cache(2j)})):
        assert flat.native.arguments(args, {"cache": args[0]}) == flat._arguments(args, {"cache": args[0]})
        assert flat.native.result(args) == flat._result(args)


def test_what_is_too_large_or_too_deep_is_cut_and_told() -> None:
    told: list[str] = []
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex), objects(), told.append)
    found, _ = flat.arguments((Cache(*(complex(number, 1) for number in range(1000))),), {})
    assert len(found) == MOST_TENSORS
    assert told == ["Cache"]
    deep: Any = Layer(1j)
    for _ in range(20):
        deep = Layer(deep)
    assert flat.arguments((deep,), {})[0] == []


def test_of_an_object_that_goes_from_call_to_call_what_is_new_is_told() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    cache: Any = Cache()
    cache.layers = [one]
    step = 0
    flat = Flattener(NATIVE, torch.is_tensor, ObjectFlattener(NATIVE, epoch=lambda: (step, 0)))

    def told() -> list[str]:
        return [path for path, _ in flat.arguments((cache,), {})[0]]

    assert told() == ["0.layers.0"]
    assert told() == []
    cache.layers.append(other)
    assert told() == ["0.layers.1"]
    one.add_(1)
    assert told() == ["0.layers.0"]
    step = 1
    assert told() == ["0.layers.0", "0.layers.1"]
    del one, other
    for _ in range(3):  # in memory that was another's, perhaps
        cache.layers = [torch.zeros(2), torch.zeros(2)]
        assert told() == ["0.layers.0", "0.layers.1"]
    with torch.inference_mode():
        cache.layers = [torch.zeros(2)]
    assert told() == ["0.layers.0"]


def test_what_was_told_may_go() -> None:
    known = ObjectFlattener(NATIVE, epoch=lambda: 0)
    cache: Any = Cache()
    for _ in range(5_000):  # more than are remembered
        cache.layers = [torch.zeros(1)]
        gone = weakref.ref(cache.layers[0])
        known.tensors(cache, "past")
    cache.layers = []
    assert gone() is None


class Slots:
    __slots__ = ("__dict__", "keys", "unset", "values")

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values


class Odd(dict[Any, Any]):
    """A container with attributes, and with ideas of its own about what it holds."""

    __slots__ = ("more",)

    def __iter__(self) -> Any:
        raise AssertionError("code of the object ran")

    items = values = keys = __len__ = __iter__

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("code of the object ran")


def test_slots_and_containers_of_odd_classes_are_read_by_python_alone() -> None:
    odd: Any = Odd({"a": 1j, 2: 2j, (3,): 3j})
    odd.more = 4j
    slots: Any = Slots([5j, (6j,)], odd)
    slots.extra = 7j
    found = objects().tensors(slots, "x")[0]
    assert sorted(found, key=str) == [
        ("x.extra", 7j), ("x.keys.0", 5j), ("x.keys.1.0", 6j),
        ("x.values.2", 2j), ("x.values.a", 1j), ("x.values.more", 4j),
    ]  # fmt: skip


def test_lists_met_before_are_told_apart_by_kind_length_and_depth() -> None:
    flat = Flattener(NATIVE, lambda value: isinstance(value, complex), tensors=(complex,), values=(range,))
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
