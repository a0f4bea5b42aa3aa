"""A recorded call written out as Python, the way a person would write it: `torch.nn.functional.linear(input, weight)`.

Reads the skeleton and the type of a rebuilt call, feeds the script that `script.py` makes. Everything in it comes from
a run, which is untrusted: names of functions have passed `resolve`, those of keywords are checked here, and texts are
written as literals.
"""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from astray.replay.arguments import NotPlainError, Rebuilding, rebuild
from astray.replay.calls import RebuiltCall
from astray.replay.functions import ResolvedFunction, resolve
from astray.replay.modules import constructor_arguments

WIDTH = 88
"""Columns of a script, as formatters have them unless they are told otherwise."""

_TAKEN = frozenset("torch device exact tensors given generator module parameters out overwritten".split())  # noqa: SIM905
"""Names that the script has for other things."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}", re.ASCII)


class Code(str):
    """A piece of source among the values of arguments, where any other text is written as a literal."""

    __slots__ = ()


class Bracketed(NamedTuple):
    """Source with brackets, which may be broken into lines there: `torch.cat(`, its arguments, `)`."""

    opening: str
    items: list[Bracketed | str]
    closing: str

    def __str__(self) -> str:
        return f"{self.opening}{', '.join(map(str, self.items))}{self.closing}"


def formatted(source: Bracketed | str, indent: int, before: str = "", after: str = "") -> str:
    """Source as lines no longer than `WIDTH` where it has brackets to break it at, as Black and ruff do."""
    line = f"{' ' * indent}{before}{source}{after}"
    if len(line) <= WIDTH or isinstance(source, str) or not source.items:
        return line
    inside = f"{' ' * (indent + 4)}{', '.join(map(str, source.items))}"
    is_call = len(source.opening.rpartition("=")[2]) > 1
    if len(inside) > WIDTH or (not is_call and len(source.items) > 1):
        inside = "\n".join(formatted(item, indent + 4, after=",") for item in source.items)
    return f"{' ' * indent}{before}{source.opening}\n{inside}\n{' ' * indent}{source.closing}{after}"


def literal(text: str) -> str:
    """A text as a literal of printable ASCII, in double quotes unless it has some itself."""
    written = ascii(text)
    return written if '"' in written or "\\'" in written else f'"{written[1:-1]}"'


class Statement(NamedTuple):
    """A line of source: `before`, such as `out = `, and what may be broken into several lines."""

    before: str
    source: Bracketed | str

    def formatted(self, indent: int) -> str:
        return formatted(self.source, indent, self.before)


class WrittenCall(NamedTuple):
    """A call as source.

    name: the public name of what is called. variables: of each tensor among the arguments, by its path; those of twins
    are the same. statements: they leave the result in `out`.
    """

    name: str
    variables: dict[str, str]
    statements: list[Statement]


def write_function(call: RebuiltCall, tuples: bool) -> WrittenCall:
    """A call of a function or an operator, whose variables have the names of torch's own parameters.

    tuples: whether a list as an index is a tuple.
    """
    kind = str(call.call["type"])
    if "aten." in kind:
        _, name, *overload = kind.removeprefix("torch.ops.").split(".")
        kind = f"torch.ops.aten.{name}.{(overload or ['default'])[0]}"
    function = resolve(kind)
    parameters = _parameters(kind, function.call)
    variables = _variables(call, parameters)
    args, kwargs = _arguments(call, variables, tuples)
    statements = []
    if call.backwards and _overwrites(function, parameters, args, kwargs):
        statements.append(_copied(args[0]))
        args[0] = Code("overwritten")
    home, _, name = kind.rpartition(".")
    if kind == "torch.Tensor.__setitem__":
        statements.append(Statement(f"{args[0]}[{_index(args[1])}] = ", _written(args[2])))
        result: Bracketed | str = str(args[0])
    elif kind == "torch.Tensor.__getitem__":
        result = f"{args[0]}[{_index(args[1])}]"
    elif home == "torch.Tensor" and args and isinstance(args[0], Code):
        result = _method(name, args, kwargs)
    elif function.name.startswith("_foreach_") and function.in_place:
        statements.append(Statement("", _called(kind, args, kwargs)))
        result = _written(args[0])
    else:
        result = _called(kind, args, kwargs)
    return WrittenCall(kind, variables, [*statements, Statement("out = ", result)])


def _overwrites(function: ResolvedFunction, parameters: list[str], args: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call writes to its first argument."""
    place = parameters.index("inplace") if "inplace" in parameters else len(args)
    asked = [*args[place : place + 1], kwargs.get("inplace", False)]
    return bool(args) and (function.in_place or any(each is not False for each in asked))


def _copied(overwritten: Any) -> Statement:
    """A copy of what a call writes to: autograd has its gradient from what was there before."""
    copies = [f"{each}.clone()" for each in overwritten] if isinstance(overwritten, list) else []
    return Statement("overwritten = ", Bracketed("[", [*copies], "]") if copies else f"{overwritten}.clone()")


def _method(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Bracketed | str:
    """A method of a tensor. Casts are to float64 where the call is to be exact; all devices are the script's."""
    tensor = args[0]
    if name in ("float", "half", "bfloat16") and len(args) == 1 and not kwargs:
        return f"{tensor}.double() if exact else {tensor}.{name}()"
    if name in ("cpu", "cuda", "npu", "xpu"):
        return f"{tensor}.to(device, copy=True)"
    return _called(f"{tensor}.{name}", args[1:], kwargs)


def write_module(call: RebuiltCall, settings: Mapping[str, Any]) -> WrittenCall:
    """A call of a module of torch.nn, made with its settings and loaded with its parameters."""
    kind = str(call.call["type"])
    known: Any = getattr(torch.nn, kind)
    variables = _variables(call, list(inspect.signature(known.forward).parameters)[1:])
    args, kwargs = _arguments(call, variables, tuples=False)
    made = _constructed(known, constructor_arguments(kind, settings, call.own), bool(call.own))
    statements = [Statement("module = ", made)]
    if settings.get("training") is not True:
        statements.append(Statement("", "module.eval()"))
    if call.own:
        state = [f"{literal(name)}: given({literal(f'module.{name}')})" for name in call.own]
        statements.append(Statement("parameters = ", Bracketed("{", [*state], "}")))
        statements.append(Statement("", "module.load_state_dict(parameters, assign=True)"))
    return WrittenCall(
        f"torch.nn.{kind}", variables, [*statements, Statement("out = ", _called("module", args, kwargs))]
    )


def _constructed(known: Any, given: Mapping[str, Any], has_parameters: bool) -> Bracketed:
    """A module's constructor, with what is not as it is by default."""
    base = torch.nn.RNNBase if issubclass(known, torch.nn.RNNBase) else known
    parameters = inspect.signature(base.__init__).parameters
    required: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in given.items():
        default = parameters[name].default
        if default is inspect.Parameter.empty and not named:
            required.append(value)
        elif name != "inplace" and (value != default or type(value) is not type(default)):
            named[name] = value
    if has_parameters:
        named["device"] = "meta"  # its parameters come from the file
    return _called(f"torch.nn.{known.__name__}", required, named)


# -- names of variables ------------------------------------------------------------------------------------------------


def _parameters(kind: str, function: Any) -> list[str]:
    """What torch calls the arguments of a function, by position; the empty text where that is not known."""
    if kind in ("torch.Tensor.__getitem__", "torch.Tensor.__setitem__"):
        return ["input", "index", "value"]
    if isinstance(function, torch._ops.OpOverload):
        return [each.name for each in function._schema.arguments]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python: the operator of its name has the same
        name = kind.rpartition(".")[2]
        packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, name.strip("_"), None)
        schema = getattr(packet, packet.overloads()[0])._schema.arguments if packet is not None else ()
        return [each.name if "Tensor" in str(each.type) else "" for each in schema]
    return [each.name if each.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD else "" for each in parameters]


def _variables(call: RebuiltCall, parameters: list[str]) -> dict[str, str]:
    """A variable for each tensor among the arguments, by its path. Twins have the same."""
    found: dict[str, str] = {}
    for path in call.inputs:
        if path in call.twins:
            continue
        position, *inside = path.removeprefix("kwargs.").split(".")
        if not path.startswith("kwargs."):
            place = int(position)
            known = parameters[place] if place < len(parameters) else ""
            position = known or ("input" if not place else f"tensor_{place}")
        name = "_".join(["input" if position == "self" else position, *inside])
        found[path] = unused(name, found.values())
    return found | {path: found[earlier] for path, earlier in call.twins.items()}


def unused(name: str, used: Iterable[str]) -> str:
    name = name if _IDENTIFIER.fullmatch(name) else "tensor"
    used = {*used, *_TAKEN, *keyword.kwlist, *keyword.softkwlist}
    numbered = (name if not number else f"{name}_{number}" for number in range(len(used) + 2))
    return next(each for each in numbered if each not in used)


# -- values ------------------------------------------------------------------------------------------------------------


def _arguments(call: RebuiltCall, variables: Mapping[str, str], tuples: bool) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with variables in place of tensors, and with dtypes that follow `exact`."""
    how: Any = Rebuilding(
        lambda path: Code(variables[path]),
        _dtype,
        Code("device"),
        tuples,
        Code("torch.default_generator"),  # type: ignore[arg-type]
    )
    args, kwargs = rebuild(call.skeleton, how)
    return args, kwargs


def _dtype(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point and dtype != torch.float64:
        return Code(f"torch.float64 if exact else {dtype}")
    if dtype.is_complex and dtype != torch.complex128:
        return Code(f"torch.complex128 if exact else {dtype}")
    return dtype


def _called(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Bracketed:
    items = [_written(each) for each in args]
    for key, value in kwargs.items():
        if not _IDENTIFIER.fullmatch(key) or keyword.iskeyword(key):
            raise NotPlainError("a keyword among its arguments that is not a name")
        written = _written(value)
        items.append(
            written._replace(opening=f"{key}={written.opening}")
            if isinstance(written, Bracketed)
            else f"{key}={written}"
        )
    return Bracketed(f"{name}(", items, ")")


def _written(value: Any) -> Bracketed | str:
    """A value as source. Raises NotPlainError for what has none."""
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if value is ...:
        return "..."
    if isinstance(value, slice):
        return _called("slice", [value.start, value.stop, value.step], {})
    if isinstance(value, tuple) and len(value) == 1:
        return f"({_written(value[0])},)"
    if isinstance(value, list | tuple):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return Bracketed(opening, [_written(each) for each in value], closing)
    if isinstance(value, dict):
        return Bracketed("{", [f"{literal(str(key))}: {_written(each)}" for key, each in value.items()], "}")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    raise NotPlainError(f"an argument of type {type(value).__name__}, which cannot be written out")


def _index(value: Any) -> str:
    """An index between brackets: `1:3, None, ..., 0`."""
    if isinstance(value, tuple) and value:
        return ", ".join(map(_index_of_dimension, value)) + "," * (len(value) == 1)
    return _index_of_dimension(value)


def _index_of_dimension(value: Any) -> str:
    if not isinstance(value, slice):
        return str(_written(value))
    start, stop, step = ("" if each is None else str(each) for each in (value.start, value.stop, value.step))
    return f"{start}:{stop}" + f":{step}" * bool(step)


def part_of(path: str) -> str:
    """The part of a result that a path names.

    >>> part_of("out.1.0")
    'out[1][0]'
    """
    first, *inside = path.split(".")
    return first + "".join(f"[{int(each)}]" for each in inside)
