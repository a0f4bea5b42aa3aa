"""Distinguishes exceptions that the program's signal handlers raise from failures of our own.

Python runs a signal handler between any two instructions, so one may raise in the middle of a hook: a time limit, a
preemption notice. Every exception that our code catches goes through `pass_interrupt` first. Interrupts such as
KeyboardInterrupt are not an `Exception`, and are not caught at all.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from inspect import CO_VARARGS
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_OWN = str(Path(__file__).parent)


def pass_interrupt(error: BaseException) -> None:
    """Raises `error` again if a signal handler of the program raised it. Called in every `except` of recording code.

    >>> try:
    ...     observe(tensor)
    ... except RuntimeError as error:
    ...     pass_interrupt(error)
    ...     return None
    """
    interrupt = interrupt_of(error)
    if interrupt is not None:
        raise interrupt


def interrupt_of(error: BaseException) -> BaseException | None:
    """The exception that a signal handler of the program raised: this error, or the one that it was explicitly raised
    from.

    Its context is not followed: the program may be handling an earlier interrupt while we run.
    """
    handlers = None
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        trace = cause.__traceback__
        while trace is not None:
            handlers = handlers or set(_handlers())
            if trace.tb_frame.f_code in handlers or _was_called_by_a_signal(trace.tb_frame):
                return cause
            trace = trace.tb_next
        cause = cause.__cause__
    return None


def _handlers() -> Iterator[CodeType]:
    """The code of every handler that is registered now."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            handler = getattr(handler, "__func__", handler)
            code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def _was_called_by_a_signal(frame: FrameType) -> bool:
    """Whether a function was given the number of a signal and the frame that it interrupted, which is its caller.

    That finds a handler that is no longer registered, such as one that has replaced itself.
    """
    code = frame.f_code
    if frame.f_back is None or code.co_filename.startswith(_OWN):
        return False
    names = code.co_varnames[: code.co_argcount]
    given = [frame.f_locals.get(name) for name in names]
    if code.co_flags & CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        given += rest if isinstance(rest, tuple) else ()
    return any(isinstance(number, int) and interrupted is frame.f_back for number, interrupted in pairwise(given))
