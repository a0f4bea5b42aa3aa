"""Finds callables of the program, by dotted name or given themselves, and the places where a swap goes in.

A name is looked up in what has been imported; nothing is imported for it. Attributes are read without running code of
the program.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from astray.capture.pytorch.experiments.destination import name_of
from astray.capture.pytorch.experiments.swapped_calls import (
    CallableLayer,
    Layer,
    Place,
    Use,
    attribute_place,
    function_place,
)
from astray.errors import UsageError


class Attribute(NamedTuple):
    """A value in a class or module, as it lies there: a method is not bound."""

    owner: Any
    name: str
    value: Any


def find(name: str) -> Attribute | None:
    """What has a dotted name; None as long as it has not been imported."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:end]))
        if module is not None:
            return _attribute(module, parts[end:])
    return None


def _attribute(owner: Any, parts: list[str]) -> Attribute | None:
    for place, part in enumerate(parts):
        kinds = owner.__mro__ if isinstance(owner, type) else (owner, *type(owner).__mro__)
        value = next((vars(kind)[part] for kind in kinds if part in getattr(kind, "__dict__", {})), None)
        if value is None:
            return None
        if place == len(parts) - 1:
            return Attribute(owner, part, value)
        owner = value
    return None


def why_not_found(name: str) -> str | None:
    """Why nothing has this name although its module has been imported; None where that has not been."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        owner: Any = sys.modules.get(".".join(parts[:end]))
        if owner is None:
            continue
        for place, part in enumerate(parts[end:], end):
            found = _attribute(owner, [part])
            if found is None:
                near = get_close_matches(part, getattr(owner, "__dict__", {}), n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                return f"{'.'.join(parts[:place])} has no {part}.{hint}"
            owner = found.value
        return None
    return None


def layers_of_name(use: Use, name: str, found: Attribute) -> list[tuple[Place, Layer]]:
    """What swaps the callable that has a dotted name."""
    owner, attribute, value = found
    is_own = attribute in getattr(owner, "__dict__", {})
    inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    _check(name, inner)
    if isinstance(inner, FunctionType) and not is_own and not isinstance(owner, type):
        inner = MethodType(inner, owner)  # of an object that a module holds
    if isinstance(inner, MethodType) or _call_method(inner) is not None:
        return layers_of_object(use, inner, name)[1]
    if isinstance(inner, FunctionType) and is_own:
        return [(function_place(inner), CallableLayer(use, name, inner))]
    places = [(owner, attribute)]
    if is_own:
        places += [each for each in _names_of(value) if each != (owner, attribute)]
    return [(attribute_place(*place, value), CallableLayer(use, name, inner)) for place in places]


def layers_of_object(use: Use, what: Any, name: str | None = None) -> tuple[str, list[tuple[Place, Layer]]]:
    """The name of a callable that is given itself, and what swaps it: a function, a method of one object, an object."""
    function, instance = what, None
    if isinstance(what, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        raise UsageError(f"what={what} is an op of torch. Name it by its site: 'h.2/{what}', or '/{what}' outside.")
    if isinstance(what, MethodType):
        function = what.__func__
        instance = None if isinstance(what.__self__, type) else what.__self__
    elif (call := _call_method(what)) is not None:
        function, instance = call, what
    name = name or name_of(function)
    _check(name, what if isinstance(what, type) else function)
    if isinstance(function, FunctionType):
        return name, [(function_place(function), CallableLayer(use, name, function, instance))]
    places = [attribute_place(module, each, what) for module, each in _names_of(what)]
    if not places:
        raise UsageError(
            f"what={what!r} is not a Python function, and no module has it under a name. Name it by its site, such as "
            "'h.2.attn/softmax', or swap what calls it."
        )
    return name, [(place, CallableLayer(use, name, what)) for place in places]


def _call_method(value: Any) -> FunctionType | None:
    """The method that runs when an object is called, if its class has one in Python."""
    call = inspect.getattr_static(type(value), "__call__", None)
    return call if isinstance(call, FunctionType) else None


def _names_of(value: Any) -> Iterator[tuple[ModuleType, str]]:
    """Under which names modules have a value that is not a Python function."""
    modules = {id(module): module for module in list(sys.modules.values())}  # one may have several names itself
    for module in modules.values():
        if isinstance(module, ModuleType):
            for name, each in list(vars(module).items()):
                if each is value and name.isidentifier() and not name.startswith("__"):
                    yield module, name


def _check(name: str, value: Any) -> None:
    if isinstance(value, type):
        raise UsageError(f"{name} is a class. Name the method that computes, such as {name}.__call__.")
    if not callable(value):
        raise UsageError(f"{name} is of type {type(value).__name__}, and is not called. Name a function or a method.")
    if inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
        raise UsageError(
            f"{name} is a generator or a coroutine: it computes when its results are asked for. Name a function that "
            "it calls."
        )
