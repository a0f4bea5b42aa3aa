"""Runs a module, or one function in it, on another device or in another dtype: `astray.experiment.elsewhere`, in torch.

The module's `forward` is replaced by one that takes everything there, runs the real one, and brings its results back;
`RoundTrip` does the moving. Replacing `forward` and nothing around it keeps all hooks, ours and others', outside: they
see the tensors of the program. For one function, a function mode is on while the module runs.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from astray.capture.pytorch.experiments.round_trip import RoundTrip
from astray.errors import UsageError
from astray.records import ROOT

Sites = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@contextmanager
def substituted(model: Any, site: Sites, *, device: Any, dtype: Any, function: Any) -> Iterator[None]:
    """Inside the block, the chosen modules run elsewhere."""
    place, precision = _device(device), _dtype(dtype)
    if place is None and precision is None:
        raise UsageError("elsewhere() was told no place. Give it device=…, dtype=…, or both.")
    name = None if function is None else _function_name(function)
    covers = [_Forward(module, where, place, precision, name) for where, module in _chosen(model, site).items()]
    try:
        for cover in covers:
            cover.put()
        yield
    finally:
        for cover in covers:
            cover.take()
    _tell_unused(covers, name)


class _Forward:
    """Stands in for the `forward` of one module."""

    def __init__(
        self,
        module: nn.Module,
        site: str,
        device: torch.device | None,
        dtype: torch.dtype | None,
        function: str | None,
    ) -> None:
        functools.update_wrapper(self, module.forward)  # programs look at the signature
        self.module = module
        self.site = site
        self.used = 0
        self._device = device
        self._dtype = dtype
        self._function = function
        self._forward = module.forward
        self._own = module.__dict__.get("forward")  # a program may have put one on this very module

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is copied or saved meanwhile takes its own `forward` along."""
        return getattr, (self.module, "forward")

    def put(self) -> None:
        self.module.__dict__["forward"] = self

    def take(self) -> None:
        if self._own is not None:
            self.module.__dict__["forward"] = self._own
        else:
            self.module.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is not None:
            with _FunctionElsewhere(self, self._function):
                return self._forward(*args, **kwargs)
        self.used += 1
        trip = self.trip()
        args, kwargs = trip.there(args), trip.there(kwargs)
        with trip.state(self.module), trip.precision():
            result = self._forward(*args, **kwargs)
        return trip.back(result)

    def trip(self) -> RoundTrip:
        return RoundTrip(self._device, self._dtype)


class _FunctionElsewhere(TorchFunctionMode):
    """Takes the calls of one function elsewhere."""

    def __init__(self, cover: _Forward, name: str) -> None:
        super().__init__()
        self._cover = cover
        self._name = name

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _plain_name(getattr(function, "__name__", "")) != self._name:
            return function(*args, **kwargs)
        self._cover.used += 1
        trip = self._cover.trip()
        args, kwargs = trip.there(args), trip.there(kwargs)
        with trip.precision():
            result = function(*args, **kwargs)
        return trip.back(result)


def _chosen(model: Any, site: Sites) -> dict[str, nn.Module]:
    """The modules that fit, each under its first name."""
    names: dict[str, nn.Module] = {}
    for label, root in (model if isinstance(model, Mapping) else {"": model}).items():
        if not isinstance(root, nn.Module):
            raise UsageError(
                f"{type(root).__name__} is no torch.nn.Module. Give elsewhere() a module, or a dict of them."
            )
        prefix = f"{label}." if label else ""
        for name, module in root.named_modules():
            names[prefix + name if name else label or ROOT] = module
    chosen: dict[str, nn.Module] = {}
    for wanted in [site] if isinstance(site, str | re.Pattern) else site:
        found = _fitting(wanted, names)
        if not found:
            raise UsageError(f"No module is called {_text(wanted)}. {_nearest(wanted, names)}")
        chosen |= {name: names[name] for name in found}
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{name} was compiled by torch.jit, and runs without Python: it cannot be moved alone.")
    return chosen


def _fitting(wanted: str | re.Pattern[str], names: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(wanted, str):
        if wanted in names:
            return [wanted]
        try:
            wanted = re.compile(wanted)
        except re.error as error:
            raise UsageError(f"site={wanted!r} is neither a name nor a regular expression: {error}.") from None
    return [name for name in names if wanted.fullmatch(name)]


def _nearest(wanted: str | re.Pattern[str], names: Mapping[str, nn.Module]) -> str:
    near = get_close_matches(_text(wanted), names, n=3)
    listed = near or list(names)[:5]
    return f"{'Did you mean' if near else 'There are'} {', '.join(listed)}{'?' if near else ', for example.'}"


def _text(wanted: str | re.Pattern[str]) -> str:
    return wanted if isinstance(wanted, str) else wanted.pattern


def _device(given: Any) -> torch.device | None:
    return None if given is None else torch.device(given)


def _dtype(given: Any) -> torch.dtype | None:
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if dtype is None and given is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype={given!r} is no floating point dtype. It can be 'float64', torch.bfloat16 and so on.")
    return dtype


def _function_name(given: str | Callable[..., Any]) -> str:
    name = given.rpartition(".")[2] if isinstance(given, str) else getattr(given, "__name__", "")
    if not name:
        raise UsageError(f"function={given!r} has no name. Give one as torch has it: 'softmax', 'matmul'.")
    return _plain_name(name)


def _plain_name(name: str) -> str:
    """`x @ y` calls `__matmul__`, which is `matmul` to a user."""
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _tell_unused(covers: list[_Forward], function: str | None) -> None:
    """Says so where nothing happened: an error that stays proves nothing then."""
    if any(cover.used for cover in covers):
        return
    sites = [cover.site for cover in covers]
    what = f"{function} was never called in" if function is not None else "Nothing was moved, since nobody called"
    warnings.warn(
        f"{what} {', '.join(sites[:5])}{' …' if len(sites) > 5 else ''} inside the block. What was compiled ahead of "
        "time runs without asking, and a function inside another of torch's is not seen.",
        stacklevel=6,  # through two context managers
    )
