"""Code that `paddle.jit.to_static` runs as one program: it is left alone, and the run says what was not seen in it.

Paddle traces such code by reading its bytecode, or its source. A function that is replaced, or a hook in there, would
end up in the program, or make Paddle run it in pieces: other kernels would compute it than without a recording. So
while it runs the functions are put back, and layers in it have no hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from paddle.jit.dy2static import program_translator

from astray.capture.engine import Engine
from astray.capture.patched_function import PatchedFunction


class StaticPrograms:
    """Puts everything back while a static program is traced or runs, until `remove`.

    `put_back` makes a context in which nothing of Paddle is replaced.
    """

    def __init__(self, engine: Engine, put_back: Callable[[], AbstractContextManager[None]]) -> None:
        self._engine = engine
        self._put_back = put_back
        kinds = [kind for kind in vars(program_translator).values() if _is_static_function(kind)]
        self._patches = [
            PatchedFunction(kind, "__call__", functools.partial(_wrap, self))
            for kind in kinds
            if "__call__" in vars(kind)
        ]

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()
        self._patches.clear()

    def run(self, program: Any, call: Callable[[], Any]) -> Any:
        if not self._engine.listening or not self._engine.in_own_process:
            return call()
        if getattr(program, "_class_instance", None) is None:  # else the layer says so
            name = getattr(program, "__name__", type(program).__name__)
            self._engine.missed(f"calls inside {name}", "paddle.jit.to_static runs it as one program")
        with self._put_back():
            return call()


def _is_static_function(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, program_translator.StaticFunction)


def _wrap(programs: StaticPrograms, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return programs.run(self, functools.partial(call, self, *args, **kwargs))

    return wrapper
