"""What lies in the place of a callable while it is swapped: of a module's `forward`, a Python function, an attribute.

A `Place` is filled when the first swap is added, and is as before when the last is removed; swaps of one callable lie
around each other, and may end in any order. Replacing `forward` and nothing around it keeps all hooks outside, ours
and others': they see the tensors of the program. A Python function keeps its identity and gets other code, so it is
swapped wherever it was imported to. Code that torch.compile has compiled stops for what is swapped, which runs
uncompiled.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import has_torch_function

from astray.capture.pytorch.compiled.dynamo import never_compiled, uncompiled
from astray.capture.pytorch.experiments.destination import Destination
from astray.errors import UsageError


class Use(Protocol):
    """The swap that a layer belongs to."""

    destination: Destination

    def called(self, site: str) -> None:
        """A call at this site runs at the destination."""


class Layer:
    """One swap of one callable: runs its calls at the destination. `original` is what lies below."""

    def __init__(self, use: Use, site: str) -> None:
        self.use = use
        self.site = site
        self.original: Callable[..., Any] = _nothing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.use.called(self.site)
        return self.use.destination.run(self.original, args, kwargs, self.holder(args))

    def holder(self, _args: tuple[Any, ...]) -> Any:
        """The object whose tensors go along."""
        return None


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    """What lies below a layer that is in no place."""


class ModuleLayer(Layer):
    """Of a module."""

    def __init__(self, use: Use, site: str, module: nn.Module) -> None:
        super().__init__(use, site)
        self._module = module

    def holder(self, _args: tuple[Any, ...]) -> Any:
        return self._module


class CallableLayer(Layer):
    """Of a callable of the program: of a method, the tensors of its object go along.

    `instance`: only this object's calls are swapped, if it is given.
    """

    def __init__(self, use: Use, site: str, function: Any, instance: Any = None) -> None:
        super().__init__(use, site)
        self._function = function
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._instance is not None and (not args or args[0] is not self._instance):
            return self.original(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def holder(self, args: tuple[Any, ...]) -> Any:
        if not args or isinstance(args[0], torch.Tensor):  # a tensor is moved itself
            return None
        name = getattr(self._function, "__name__", "")
        is_method = any(vars(kind).get(name) is self._function for kind in type(args[0]).__mro__)
        return args[0] if is_method else None


# -- places ------------------------------------------------------------------------------------------------------------


class Place:
    """Where a callable is called from. `call` runs the layers, the latest first.

    `key` is the place itself: while it is filled, it is found by its key again.
    """

    def __init__(self, key: tuple[str, int], original: Callable[..., Any]) -> None:
        self.original = original
        self.layers: list[Layer] = []
        self._key = key

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return (self.layers[-1] if self.layers else self.original)(*args, **kwargs)

    def add(self, layer: Layer) -> None:
        if not self.layers:
            self.fill()
            _filled[self._key] = self
        layer.original = self.layers[-1] if self.layers else self.original
        self.layers.append(layer)

    def remove(self, layer: Layer) -> None:
        at = self.layers.index(layer)
        if at + 1 < len(self.layers):
            self.layers[at + 1].original = layer.original
        del self.layers[at]
        if not self.layers:
            del _filled[self._key]
            self.restore()

    def fill(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError


_filled: dict[tuple[str, int], Place] = {}  # each holds its owner, so that ids stay its own


def module_place(module: nn.Module) -> Place:
    key = ("forward of a module", id(module))
    return _filled.get(key) or _ModuleForward(key, module)


def function_place(function: FunctionType) -> Place:
    key = ("code of a function", id(function))
    return _filled.get(key) or _FunctionCode(key, function)


def attribute_place(owner: Any, name: str, value: Any) -> Place:
    """An attribute of a class or module, which it may have inherited. `value`: as it lies there, not bound."""
    key = (name, id(owner))
    return _filled.get(key) or _Attribute(key, owner, name, value)


class _ModuleForward(Place):
    """The `forward` of one module."""

    def __init__(self, key: tuple[str, int], module: nn.Module) -> None:
        super().__init__(key, module.forward)
        self._module = module
        self._own = module.__dict__.get("forward")  # a program may have set one on this module itself
        self._entry = _Forward(self, module, self._own)

    def fill(self) -> None:
        self._module.__dict__["forward"] = self._entry

    def restore(self) -> None:
        if self._module.__dict__.get("forward") is not self._entry:
            return  # the program has set another meanwhile; if that calls ours, ours passes on
        if self._own is not None:
            self._module.__dict__["forward"] = self._own
        else:
            del self._module.__dict__["forward"]


class _Forward:
    """Stands for the `forward` of a module."""

    def __init__(self, place: Place, module: nn.Module, own: Any) -> None:
        functools.update_wrapper(self, place.original)  # programs look at the signature
        self._place = place
        self._module = module
        self._own = own

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._place.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is copied or saved meanwhile keeps its own `forward`."""
        return (_itself, (self._own,)) if self._own is not None else (getattr, (self._module, "forward"))


def _itself(value: Any) -> Any:
    return value


_functions: weakref.WeakValueDictionary[int, _FunctionCode] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class _FunctionCode(Place):
    """A Python function, whose code is replaced."""

    def __init__(self, key: tuple[str, int], function: FunctionType) -> None:
        code = function.__code__
        original = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        original.__qualname__, original.__module__ = function.__qualname__, function.__module__
        super().__init__(key, original)
        self._function = function
        self._code = code
        self._asks_modes = "handle_torch_function" in code.co_names
        self._stub: CodeType | None = None
        self._signed = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._asks_modes and has_torch_function((*args, *kwargs.values())):
            return self.original(*args, **kwargs)  # which hands the call to the modes that are on; they call it again
        return super().call(*args, **kwargs)

    def fill(self) -> None:
        function = self._function
        if "__signature__" not in vars(function):  # programs look at it, and it is read from the code
            vars(function)["__signature__"] = inspect.signature(function)
            self._signed = True
        number = next(_numbers)
        _functions[number] = self
        self._stub = function.__code__ = _stub(self, self._code, number)
        never_compiled(function)

    def restore(self) -> None:
        function = self._function
        if function.__code__ is self._stub:
            function.__code__ = self._code
        self._stub = None  # which holds this place: without a garbage collector's knowledge, as code does
        if self._signed:
            vars(function).pop("__signature__", None)


_STAND_IN = 8191.5  # any constant that is not folded away


def _stub(place: _FunctionCode, code: CodeType, number: int) -> CodeType:
    """Code that passes all arguments on to a place.

    It imports what it needs, since a function has the globals of its module, and torch compiles no code with a function
    as a constant. A function insists on the free variables of its former code.
    """
    free = ", ".join(code.co_freevars)
    source = (
        f"def around({free}):\n def stub(*args, **kwargs):\n"
        f"  from {__name__} import call_function\n"
        f"  return call_function({_STAND_IN}, *args, **kwargs)\n  {free or 'None'}\n"
    )
    outer: CodeType = next(const for const in compile(source, code.co_filename, "exec").co_consts if _is_code(const))
    stub: CodeType = next(const for const in outer.co_consts if _is_code(const))
    consts = tuple(number if const == _STAND_IN else const for const in stub.co_consts)
    return stub.replace(
        co_consts=(*consts, place),  # so that it is there for as long as a call runs
        co_name=code.co_name,
        co_firstlineno=code.co_firstlineno,
    )


@uncompiled
def call_function(number: int, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that is swapped."""
    return _functions[number].call(*args, **kwargs)


def _is_code(const: Any) -> bool:
    return isinstance(const, CodeType)


class _Attribute(Place):
    """An attribute of a class or module that is no Python function, or one that a class has inherited."""

    def __init__(self, key: tuple[str, int], owner: Any, name: str, value: Any) -> None:
        kind = type(value) if isinstance(value, staticmethod | classmethod) else None
        super().__init__(key, value.__func__ if kind is not None else value)
        self._owner = owner
        self._name = name
        self._value = value
        self._is_own = name in vars(owner)

        @uncompiled
        def entry(*args: Any, **kwargs: Any) -> Any:
            return self.call(*args, **kwargs)

        functools.update_wrapper(entry, self.original)
        is_function = kind is None and (not isinstance(owner, type) or hasattr(value, "__get__"))
        self._entry: Any = entry if is_function else (kind or staticmethod)(entry)

    def fill(self) -> None:
        try:
            setattr(self._owner, self._name, self._entry)
        except (TypeError, AttributeError) as error:
            name = f"{getattr(self._owner, '__name__', type(self._owner).__name__)}.{self._name}"
            raise UsageError(f"{name} cannot be swapped, since {error}. Name what calls it.") from None

    def restore(self) -> None:
        if vars(self._owner).get(self._name) is not self._entry:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._value)
        else:
            delattr(self._owner, self._name)
