"""Flattens nested arguments and results into tensors with paths, and a skeleton of everything else."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

DEEPEST = 12
"""Containers nested deeper than this are treated as a cycle."""

DEEPEST_ATTRIBUTE = 6
"""Levels of attributes and containers below an object: cache, layers, one layer, its keys, and two to spare."""

MOST_TENSORS = 256
"""Of one object: a cache of 128 layers."""

_MOST_ITEMS = 2_000  # looked at in one object, so that a data set with a million strings costs next to nothing

TENSOR = "<tensor>"
"""The placeholder of a tensor in the skeleton."""

_LONGEST_TEXT = 200
_LONGEST_LIST = 64
_SCALARS = frozenset({bool, int, float, str, type(None)})


class Flattener:
    """Finds the tensors in nested values: tuples, lists, mappings and dataclasses.

    `native` is the compiled module of an adapter. `objects` flattens other objects; without it these yield no tensors.
    `too_large` is called with the class name of an object that may hold more tensors than were returned.

    Structures of calls are cached, so that calls of the same structure are not walked again. `tensors` are types for
    which `is_tensor` is always true; `values` are further types whose values are plain, and interchangeable when they
    are equal. `spelled` has functions that write values of some types into the skeleton.

    >>> flat = Flattener(native, lambda value: isinstance(value, complex))
    >>> flat.arguments((1j, [2, 3j]), {"mask": None})
    ([('0', 1j), ('1.1', 3j)], '{"args":["<tensor>",[2,"<tensor>"]],"kwargs":{"mask":null}}')
    """

    def __init__(
        self,
        native: ModuleType,
        is_tensor: Callable[[Any], bool],
        objects: ObjectFlattener | None = None,
        too_large: Callable[[str], None] = lambda _: None,
        tensors: Collection[type] = (),
        values: Collection[type] = (),
        spelled: Mapping[type, Callable[[Any], str]] | None = None,
    ) -> None:
        self._is_tensor = is_tensor
        self._objects = objects
        self._too_large = too_large
        self._spelled = spelled or {}
        # Caches structures, and calls `_arguments` and `_result` for unknown ones.
        self.native = native.Structures(
            frozenset(tensors), _SCALARS.union(values), is_tensor, self._arguments, self._result
        )

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], str]:
        """The tensors of a call's arguments with their paths, and the structure of the arguments as JSON."""
        flattened: tuple[list[tuple[str, Any]], str] = self.native.arguments(args, kwargs)
        return flattened

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[str, Any]], str]:
        tensors: list[tuple[str, Any]] = []
        shape: dict[str, Any] = {"args": [self._walk(value, str(i), tensors, 0) for i, value in enumerate(args)]}
        if kwargs:
            shape["kwargs"] = {name: self._walk(value, f"kwargs.{name}", tensors, 0) for name, value in kwargs.items()}
        return tensors, _json(shape)

    def result(self, value: Any) -> list[tuple[str, Any]]:
        """The tensors of a call's result with their paths: `out`, `out.0`, `out.logits`."""
        tensors: list[tuple[str, Any]] = self.native.result(value)
        return tensors

    def _result(self, value: Any) -> list[tuple[str, Any]]:
        if self._is_tensor(value):
            return [("out", value)]
        tensors: list[tuple[str, Any]] = []
        self._walk(value, "out", tensors, 0)
        return tensors

    def _walk(self, value: Any, path: str, tensors: list[tuple[str, Any]], depth: int) -> Any:
        if self._is_tensor(value):
            tensors.append((path, value))
            return TENSOR
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if type(value) in self._spelled:
            return self._spelled[type(value)](value)
        if depth >= DEEPEST:
            return f"<{type(value).__name__}, nested too deep>"
        if isinstance(value, Mapping):
            return {
                str(key): self._walk(item, f"{path}.{key}", tensors, depth + 1) for key, item in list(value.items())
            }
        if isinstance(value, list | tuple):
            if len(value) > _LONGEST_LIST and set(map(type, value)) <= _SCALARS:
                return _shortened([_scalar(item) for item in value[:_LONGEST_LIST]], len(value))
            return _shortened([self._walk(item, f"{path}.{i}", tensors, depth + 1) for i, item in enumerate(value)])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                field.name: self._walk(getattr(value, field.name, None), f"{path}.{field.name}", tensors, depth + 1)
                for field in dataclasses.fields(value)
            }
        if self._objects is not None:
            inside, cut_short = self._objects.tensors(value, path)
            tensors += inside
            if cut_short:
                self._too_large(type(value).__name__)
        return _describe(value)


class ObjectFlattener:
    """Finds the tensors in an object's attributes, and returns each of them once.

    No code of the object runs: attributes are read from its `__dict__` and its slots, past every property and
    `__getattr__` (native/objects.h). A cache goes through every layer of a model, and each call would list the keys of
    all layers; so a tensor is returned where it is first seen, and again once it was written to or the epoch has
    changed.

    is_tensor: what a tensor is; one of the adapter's framework unless it is given. epoch: its value changes with the
    step and micro step; without it every tensor is returned every time.

    >>> class Layer:
    ...     def __init__(self) -> None:
    ...         self.keys, self.size = 1j, 8
    >>> ObjectFlattener(native, lambda value: isinstance(value, complex)).tensors(Layer(), "past")
    ([('past.keys', 1j)], False)
    """

    def __init__(
        self,
        native: ModuleType,
        is_tensor: Callable[[Any], bool] | None = None,
        epoch: Callable[[], object] | None = None,
    ) -> None:
        self._native = native.ObjectWalk(is_tensor, epoch, DEEPEST_ATTRIBUTE, MOST_TENSORS, _MOST_ITEMS)

    def tensors(self, value: Any, path: str) -> tuple[list[tuple[str, Any]], bool]:
        """The tensors of an object that are to be recorded now, with their paths, and whether there may be more.

        A class, a function, a module and anything else that can be called has none.
        """
        tensors: tuple[list[tuple[str, Any]], bool] = self._native.tensors(value, path)
        return tensors


def _shortened(items: list[Any], length: int | None = None) -> list[Any]:
    """A long list, cut to its first items, so that ten thousand numbers are not copied into every row."""
    length = len(items) if length is None else length
    if length <= _LONGEST_LIST:
        return items
    return [*items[:_LONGEST_LIST], f"<{length - _LONGEST_LIST} more>"]


def _scalar(value: bool | int | float | str | None) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return value[:_LONGEST_TEXT] + "…"
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # an IntEnum prints as its number
    return value


def _describe(value: Any) -> str:
    """A name for a value that is neither tensor nor plain data.

    Its repr may be long, or contain an address: only small, stable values (a dtype, a device, a slice, an enum) are
    written out.
    """
    kind = type(value).__name__
    if kind in {"dtype", "device", "layout", "memory_format", "slice", "range"} or hasattr(value, "_value_"):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<{value.__qualname__}>"
    return f"<{kind}>"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
