"""Where a swapped call runs instead: on another device, in another dtype, uncompiled, or in another callable."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import BuiltinFunctionType
from typing import Any

import torch

from astray.capture.pytorch.calls.catalogue import full_name
from astray.capture.pytorch.experiments.round_trip import RoundTrip
from astray.capture.pytorch.experiments.swap_words import (
    EAGER,
    EXAMPLES,
    Word,
    check_together,
    is_dotted,
    kind_of,
    words_of,
)
from astray.errors import UsageError


class Destination:
    """`to` of `swap`, understood. `text` is what recordings say of it.

    `has_moved`: whether any call had a tensor that could be moved.
    """

    def __init__(self, to: Any) -> None:
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        self.is_eager = False
        self._replacement: Callable[..., Any] | str | None = None
        self._takes_original = False
        self.has_moved = False
        parts = list(to) if isinstance(to, tuple | list) else words_of(to) if isinstance(to, str) else [to]
        check_together(to, [self._take(part) for part in parts])
        self.text = self._text()

    @property
    def moves(self) -> bool:
        """Whether tensors are moved or cast."""
        return self.device is not None or self.dtype is not None

    def prepare(self) -> None:
        """Imports a callable that was given by its name, which is done at its first call otherwise."""
        if isinstance(self._replacement, str):
            self._replacement = _imported(self._replacement)
            self._takes_original = _takes_original(self._replacement)

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], holder: Any) -> Any:
        """Runs one call there. `holder` is the object whose tensors go along, such as a module; or None."""
        if self._replacement is not None:
            return self._replaced(original, args, kwargs)
        if self.is_eager:
            with torch.compiler.set_stance("force_eager"):
                return original(*args, **kwargs)
        trip = RoundTrip(self.device, self.dtype)
        args, kwargs = self._send(trip, args, holder), trip.send(kwargs)
        with nullcontext() if holder is None else trip.state(holder), trip.precision():
            try:
                result = original(*args, **kwargs)
            finally:
                trip.write_back()
        if not trip.is_empty:
            self.has_moved = True
        return trip.bring_back(result)

    def _send(self, trip: RoundTrip, args: tuple[Any, ...], holder: Any) -> tuple[Any, ...]:
        """The arguments, moved. A method's own object stays itself, whatever it is: its tensors are moved inside it."""
        if holder is not None and args and args[0] is holder:
            return holder, *trip.send(args[1:])
        sent: tuple[Any, ...] = trip.send(args)
        return sent

    def _replaced(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.prepare()
        replacement = self._replacement
        assert callable(replacement)
        return replacement(*args, **kwargs, original=original) if self._takes_original else replacement(*args, **kwargs)

    # -- reading `to` --------------------------------------------------------------------------------------------

    def _take(self, part: Any) -> Word:
        if isinstance(part, str):
            return self._take_word(part)
        if isinstance(part, torch.device):
            self.device = part
            return "device"
        if isinstance(part, torch.dtype):
            if not part.is_floating_point:
                raise UsageError(f"to={part} is not a floating point dtype. It can be 'float64', torch.bfloat16, …")
            self.dtype = part
            return "dtype"
        if callable(part) and not isinstance(part, type):
            self._replacement, self._takes_original = part, _takes_original(part)
            return "callable"
        raise UsageError(f"to={part!r} is not a destination. It is one of {EXAMPLES}, or a function.")

    def _take_word(self, word: str) -> Word:
        kind = kind_of(word)
        if kind == "eager":
            self.is_eager = True
        elif kind == "dtype":
            self.dtype = getattr(torch, word.removeprefix("torch."))
        elif kind == "callable":
            self._replacement = word
        else:
            try:
                self.device = torch.device(word)
            except RuntimeError:
                raise UsageError(
                    f"to={word!r} is neither a device nor a floating point dtype nor the dotted name of a callable. "
                    f"It can be {EXAMPLES}."
                ) from None
        return kind or "device"

    def _text(self) -> str:
        if self._replacement is not None:
            return self._replacement if isinstance(self._replacement, str) else name_of(self._replacement)
        if self.is_eager:
            return EAGER
        words = [str(part).removeprefix("torch.") for part in (self.device, self.dtype) if part is not None]
        return ", ".join(words)


def _takes_original(replacement: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(replacement).parameters.get("original")
    except (TypeError, ValueError):  # compiled code without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _imported(name: str) -> Callable[..., Any]:
    """The callable of a dotted name, whose module is imported now if it has not been."""
    assert is_dotted(name)
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:end])
        try:
            value: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise
        for part in parts[end:]:
            value = getattr(value, part, None)
        if callable(value):
            return value  # type: ignore[no-any-return]
        raise UsageError(f"{module_name} has no callable {'.'.join(parts[end:])} to swap to.")
    raise UsageError(f"There is no module {parts[0]}, which {name} should be in. It is looked for where Python looks.")


def name_of(value: Any) -> str:
    """The dotted name of a callable; of an object that can be called, that of its class."""
    if isinstance(value, BuiltinFunctionType):
        return full_name(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
