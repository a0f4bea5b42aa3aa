"""How a function of torch was called: by an operator, or by name with which of its arguments by position.

For a mode `x + 1`, `1 + x` and `x.add(1)` are one function, and a function written in Python passes its arguments on in
its own way. For formats that distinguish these (msprobe's), `Stacks` calls `spelling_of` once for each distinct stack.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import handle_torch_function

from astray.capture.pytorch.calls.bytecode import UNKNOWN, CallInstruction, Invocation
from astray.records import Spelling

OURS = f"{Path(__file__).parents[3]}{os.sep}"
_HANDS_ON: CodeType = handle_torch_function.__code__
_DISPATCHES = "fn"
"""The name in torch.nn.functional of a function that dispatches to one of two, such as `max_pool2d`."""

_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def spelling_of(frame: FrameType) -> Spelling | None:
    """How a function was called for which torch calls a mode from this frame; None where that is not known."""
    if frame.f_code is not _HANDS_ON:
        return _of_operator(frame) or _of_name(frame)
    own = frame.f_back
    caller = own.f_back if own is not None else None
    if own is None or caller is None:
        return None
    called = own.f_code
    while caller.f_code.co_filename.startswith(OURS) and caller.f_back is not None:  # a cover around a loss
        caller = caller.f_back
    if caller.f_code.co_name == _DISPATCHES and caller.f_code.co_filename == _DISPATCHER and caller.f_back is not None:
        caller = caller.f_back
    return _of_operator(caller) or _of_python(caller, called)


def _of_operator(frame: FrameType) -> Spelling | None:
    waiting = CallInstruction(frame)
    operator = waiting.operator
    return Spelling(operator, _is_reflected(*waiting.operands())) if operator else None


def _is_reflected(left: Any, right: Any) -> bool | None:
    """Whether the operand that is not a tensor, if there is one, is the left one."""
    if right is not UNKNOWN:
        return isinstance(right, torch.Tensor)
    return None if left is UNKNOWN else not isinstance(left, torch.Tensor)


def _of_name(frame: FrameType) -> Spelling | None:
    """The spelling of a function that is not written in Python."""
    call = CallInstruction(frame).invocation()
    if call is None:
        return None
    home, name = getattr(call.callee, "__module__", None), getattr(call.callee, "__name__", "")
    if call.callee is sum:  # it starts with 0 + x
        return Spelling("+", reflected=True)
    if call.callee is abs or home == "_operator":
        return Spelling(name=f"__{name.strip('_')}__")
    return Spelling(name=call.name)


def _of_python(frame: FrameType, called: CodeType) -> Spelling | None:
    """The spelling of a function written in Python."""
    call = CallInstruction(frame).invocation()
    if call is None or called.co_flags & _VARIABLE or not _is_of(call, called):
        return None
    names = called.co_varnames[: called.co_argcount + called.co_kwonlyargcount]
    bound = bool(names) and names[0] == "self"  # x.split(2), whose first argument stands before the dot
    return Spelling("", None, call.name, names, call.positional + bound, call.keywords)


def _is_of(call: Invocation, called: CodeType) -> bool:
    """Whether the call is of that code, and not of a function in between that calls it, such as `map`."""
    if call.callee is UNKNOWN:
        return call.name.strip("_") == called.co_name.strip("_")
    function = inspect.unwrap(call.callee) if inspect.isfunction(call.callee) else call.callee
    code = getattr(function, "__code__", None)
    return code is called or (code is not None and code.co_filename == _DISPATCHER)


def _dispatcher() -> str:
    chosen: Callable[..., Any] = torch.nn.functional.max_pool2d
    return chosen.__code__.co_filename


_DISPATCHER = _dispatcher()
