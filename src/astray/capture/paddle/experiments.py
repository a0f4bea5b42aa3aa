"""No dropout, the same seed, the same bits: `without_dropout` and `seed_all` of `astray.experiment`, in Paddle.

Dropout is turned off without changing the model: the functions that drop are replaced, wherever a module has them under
a name, by ones that pass their arguments on with dropout turned off.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import paddle
import paddle.nn.functional as F

_OFF: dict[str, dict[str, Any]] = {
    "dropout": {"p": 0.0, "training": False},
    "dropout2d": {"p": 0.0, "training": False},
    "dropout3d": {"p": 0.0, "training": False},
    "alpha_dropout": {"p": 0.0, "training": False},
    "feature_alpha_dropout": {"p": 0.0, "training": False},
    "scaled_dot_product_attention": {"dropout_p": 0.0},
}
"""The functions that drop, and the arguments that turn it off."""

_DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}


class WithoutDropout:
    """While it is entered, nothing is dropped."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []

    def __enter__(self) -> None:
        wrappers = {}
        for name, off in _OFF.items():
            original = getattr(F, name, None)
            if original is not None:
                wrappers[id(original)] = _with(original, off)
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType):
                for name, value in list(vars(module).items()):
                    if callable(value) and id(value) in wrappers:
                        self._replaced.append((module, name, value))
                        setattr(module, name, wrappers[id(value)])

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for module, name, original in reversed(self._replaced):
            setattr(module, name, original)
        self._replaced.clear()


def _with(function: Callable[..., Any], off: dict[str, Any]) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(**(dict(zip(names, args, strict=False)) | kwargs | off))

    return wrapper


def seed(number: int) -> None:
    """Seeds the generators of the CPU and of every device."""
    paddle.seed(number)


def make_deterministic() -> None:
    """Sets Paddle to give the same bits each time the same program runs on the same machine."""
    if paddle.is_compiled_with_cuda():  # without it there are no such flags, and nothing to set
        paddle.set_flags(_DETERMINISTIC)
