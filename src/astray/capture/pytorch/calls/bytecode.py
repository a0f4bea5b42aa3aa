"""Which instruction a frame is waiting at: an operator with its operands, or a call with its number of arguments.

Read from the frame's bytecode, since the text of a line is ambiguous. Python 3.10 to 3.14 have different instructions
for the same thing; the names here cover all of them. Only the straight-line code before the instruction is read: values
behind a jump (`a if b else c`) stay unknown, and no code of the program is run.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import sys
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

_OPERATORS = {
    "ADD": "+", "AND": "&", "FLOOR_DIVIDE": "//", "LSHIFT": "<<", "MATRIX_MULTIPLY": "@", "MULTIPLY": "*",
    "MODULO": "%", "OR": "|", "POWER": "**", "RSHIFT": ">>", "SUBTRACT": "-", "TRUE_DIVIDE": "/", "XOR": "^",
}  # fmt: skip
"""Python 3.10 has an instruction for each: BINARY_ADD, INPLACE_ADD."""

_UNARY = {"UNARY_NEGATIVE": "-x", "UNARY_POSITIVE": "+x", "UNARY_INVERT": "~x"}
_COMPARISONS = ("<=", ">=", "==", "!=", "<", ">")  # those of two signs first: one is found in the other
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD", "CALL_KW", "CALL_FUNCTION_KW")
_KEYWORDS_ON_STACK = ("CALL_KW", "CALL_FUNCTION_KW")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")

_KNOWN_CODES = 512  # a program calls torch from a few hundred functions

UNKNOWN: Any = object()
"""The value of an expression that cannot be read without running code."""


class Invocation(NamedTuple):
    """A call, as it was written. `name` is the last part of the callee, `callee` its value, if that is known."""

    name: str
    positional: int
    keywords: tuple[str, ...]
    callee: Any


class _Instruction(NamedTuple):
    """An instruction; `effect` is by how many values it grows the stack."""

    offset: int
    name: str
    arg: int
    value: Any
    text: str
    effect: int
    is_target: bool


class CallInstruction:
    """The instruction at which a frame waits for what it has called.

    >>> CallInstruction(frame).operator  # of `x += 1`
    '+='
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._steps = _steps(frame.f_code)
        # A frame that waits for a builtin function may be at the end of the inline cache after the instruction.
        self._at = bisect.bisect_right(self._steps, frame.f_lasti, key=lambda step: step.offset) - 1

    @property
    def operator(self) -> str:
        """The operator, such as `+`, `+=`, `<` or `-x`; empty when it is something else."""
        if self._at < 0:
            return ""
        step = self._steps[self._at]
        if step.name == "BINARY_OP":
            return step.text
        if step.name == "COMPARE_OP":
            return next((sign for sign in _COMPARISONS if sign in step.text), "")
        if step.name in _UNARY:
            return _UNARY[step.name]
        kind, _, rest = step.name.partition("_")
        sign = _OPERATORS.get(rest, "") if kind in ("BINARY", "INPLACE") else ""
        return f"{sign}=" if sign and kind == "INPLACE" else sign

    def operands(self) -> tuple[Any, Any]:
        """The left and right operands of the operator, each UNKNOWN where reading it would run code."""
        return self._value(self._producer(self._at, 1)), self._value(self._producer(self._at, 0))

    def invocation(self) -> Invocation | None:
        """The call; None when it is something else, or when arguments were given as `*args` or `**kwargs`."""
        steps, at = self._steps, self._at
        if at < 0 or steps[at].name not in _CALLS:
            return None
        count = steps[at].arg
        keywords: Any = ()
        in_front = at - 1
        if steps[in_front].name == "PRECALL":
            at, in_front = in_front, in_front - 1
        if steps[in_front].name == "KW_NAMES":
            keywords = self._frame.f_code.co_consts[steps[in_front].arg]
            at = in_front
        elif steps[at].name in _KEYWORDS_ON_STACK:
            keywords = steps[in_front].value
            at = in_front
        if not isinstance(keywords, tuple):
            return None
        callee = self._producer(at, count)
        if callee is not None and steps[callee].name == "PUSH_NULL":  # from Python 3.13 on it comes behind the callee
            callee -= 1
        name = steps[callee].value if callee is not None else None
        return Invocation(name if isinstance(name, str) else "", count - len(keywords), keywords, self._value(callee))

    def _producer(self, at: int, above: int) -> int | None:
        """The index of the instruction that pushed the value with `above` others on it when instruction `at` begins."""
        height = 0
        for index in range(at - 1, -1, -1):
            if self._steps[index + 1].is_target:
                return None
            if height == -above:
                return index
            height -= self._steps[index].effect
        return None

    def _value(self, index: int | None) -> Any:
        """The value that an instruction has loaded."""
        if index is None or index < 0:
            return UNKNOWN
        step = self._steps[index]
        if step.name in _CONSTANTS:
            return step.value
        if step.name in _LOCALS:
            return _local(self._frame, step.value)
        if step.name in ("LOAD_GLOBAL", "LOAD_NAME"):
            for scope in (*([self._frame.f_locals] if step.name == "LOAD_NAME" else []), self._frame.f_globals):
                if step.value in scope:
                    return scope[step.value]
            return self._frame.f_builtins.get(step.value, UNKNOWN)
        if step.name in _ATTRIBUTES:
            return _attribute(self._value(self._producer(index, 0)), step.value)
        return UNKNOWN


@functools.lru_cache(_KNOWN_CODES)
def _steps(code: CodeType) -> list[_Instruction]:
    """The instructions of a code object. Superinstructions such as LOAD_FAST_LOAD_FAST are split into two."""
    steps: list[_Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        names = _parts(instruction.opname)
        values = (
            instruction.argval if len(names) > 1 and isinstance(instruction.argval, tuple) else (instruction.argval,)
        )
        if len(names) == len(values) > 1:
            for name, value in zip(names, values, strict=True):
                effect = 1 if name.startswith("LOAD") else -1
                steps.append(_Instruction(instruction.offset, name, 0, value, "", effect, instruction.is_jump_target))
            continue
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        steps.append(
            _Instruction(
                instruction.offset,
                instruction.opname,
                instruction.arg or 0,
                instruction.argval,
                instruction.argrepr,
                effect,
                instruction.is_jump_target,
            )
        )
    return steps


def _parts(name: str) -> list[str]:
    """`LOAD_FAST` and `LOAD_FAST` of `LOAD_FAST_LOAD_FAST`; the name itself of any other."""
    words = name.replace("_LOAD_FAST", " LOAD_FAST").replace("_STORE_FAST", " STORE_FAST").split()
    return words if all(word.startswith(("LOAD_FAST", "STORE_FAST")) for word in words) else [name]


def _local(frame: FrameType, name: str) -> Any:
    """The value of a local variable.

    Before Python 3.13 reading `f_locals` leaves a copy of all locals with the frame, which would keep objects alive
    that the program has released: the copy is cleared, unless something else refers to it.
    """
    variables = frame.f_locals
    value = variables.get(name, UNKNOWN)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        if sys.getrefcount(variables) <= _REFERENCES:
            variables.clear()
    return value


def _references() -> int:
    variables = sys._getframe().f_locals
    return sys.getrefcount(variables)


_REFERENCES = _references()
"""References to the copy of a frame's locals, when only the frame and the caller hold it."""


def _attribute(value: Any, name: str) -> Any:
    """An attribute in the `__dict__` of an object or module, read without running descriptors or `__getattr__`."""
    if value is UNKNOWN or not isinstance(name, str):
        return UNKNOWN
    if isinstance(value, ModuleType):
        return vars(value).get(name, UNKNOWN)
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has none; no code of the program was run
        return UNKNOWN
    return held.get(name, UNKNOWN) if isinstance(held, dict) else UNKNOWN
