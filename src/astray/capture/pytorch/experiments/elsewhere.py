"""Runs a module, or one function in it, on another device or in another dtype: `astray.experiment.elsewhere`, in torch.

The module's `forward` is replaced by one that moves every tensor there, runs the real one, and moves the results back.
Replacing `forward` and nothing around it keeps all hooks, ours and others', outside: they see the tensors of the
program. For one function, a function mode is on while the module runs. `RoundTrip` moves the tensors of one call;
moving is differentiable, so gradients come back to where the tensors came from.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from astray.errors import UsageError
from astray.records import ROOT

Sites = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


@contextmanager
def substituted(model: Any, site: Sites, *, device: Any, dtype: Any, function: Any) -> Iterator[None]:
    """Inside the block, the chosen modules run elsewhere."""
    target, precision = _device(device), _dtype(dtype)
    if target is None and precision is None:
        raise UsageError("elsewhere() needs a device or a dtype. Give it device=…, dtype=…, or both.")
    name = None if function is None else _function_name(function)
    replacements = [
        _ReplacedForward(module, where, target, precision, name) for where, module in _chosen(model, site).items()
    ]
    try:
        for replacement in replacements:
            replacement.install()
        yield
    finally:
        for replacement in replacements:
            replacement.remove()
    _warn_if_unused(replacements, name)


class _ReplacedForward:
    """Replaces the `forward` of one module."""

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
        self.calls = 0
        self._device = device
        self._dtype = dtype
        self._function = function
        self._forward = module.forward
        self._own = module.__dict__.get("forward")  # a program may have set one on this module itself

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is copied or saved meanwhile keeps its own `forward`."""
        return getattr, (self.module, "forward")

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        if self._own is not None:
            self.module.__dict__["forward"] = self._own
        else:
            self.module.__dict__.pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is not None:
            with _FunctionElsewhere(self, self._function):
                return self._forward(*args, **kwargs)
        self.calls += 1
        trip = self.trip()
        args, kwargs = trip.send(args), trip.send(kwargs)
        with trip.state(self.module), trip.precision():
            result = self._forward(*args, **kwargs)
        return trip.bring_back(result)

    def trip(self) -> RoundTrip:
        return RoundTrip(self._device, self._dtype)


class _FunctionElsewhere(TorchFunctionMode):
    """Runs the calls of one function elsewhere."""

    def __init__(self, replacement: _ReplacedForward, name: str) -> None:
        super().__init__()
        self._replacement = replacement
        self._name = name

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _plain_name(getattr(function, "__name__", "")) != self._name:
            return function(*args, **kwargs)
        self._replacement.calls += 1
        trip = self._replacement.trip()
        args, kwargs = trip.send(args), trip.send(kwargs)
        with trip.precision():
            result = function(*args, **kwargs)
        return trip.bring_back(result)


def _chosen(model: Any, site: Sites) -> dict[str, nn.Module]:
    """The modules that fit, each under its first name."""
    names: dict[str, nn.Module] = {}
    for label, root in (model if isinstance(model, Mapping) else {"": model}).items():
        if not isinstance(root, nn.Module):
            raise UsageError(
                f"{type(root).__name__} is not a torch.nn.Module. Give elsewhere() a module, or a dict of them."
            )
        prefix = f"{label}." if label else ""
        for name, module in root.named_modules():
            names[prefix + name if name else label or ROOT] = module
    chosen: dict[str, nn.Module] = {}
    for wanted in [site] if isinstance(site, str | re.Pattern) else site:
        matching = _matching(wanted, names)
        if not matching:
            raise UsageError(f"No module is called {_text(wanted)}. {_suggestion(wanted, names)}")
        chosen |= {name: names[name] for name in matching}
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{name} was compiled by torch.jit, and runs without Python: it cannot be moved alone.")
    return chosen


def _matching(wanted: str | re.Pattern[str], names: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(wanted, str):
        if wanted in names:
            return [wanted]
        try:
            wanted = re.compile(wanted)
        except re.error as error:
            raise UsageError(f"site={wanted!r} is neither a name nor a regular expression: {error}.") from None
    return [name for name in names if wanted.fullmatch(name)]


def _suggestion(wanted: str | re.Pattern[str], names: Mapping[str, nn.Module]) -> str:
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
        raise UsageError(
            f"dtype={given!r} is not a floating point dtype. It can be 'float64', torch.bfloat16 and so on."
        )
    return dtype


def _function_name(given: str | Callable[..., Any]) -> str:
    name = given.rpartition(".")[2] if isinstance(given, str) else getattr(given, "__name__", "")
    if not name:
        raise UsageError(f"function={given!r} has no name. Give one as torch has it: 'softmax', 'matmul'.")
    return _plain_name(name)


def _plain_name(name: str) -> str:
    """`x @ y` calls `__matmul__`, which is `matmul` to a user."""
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _warn_if_unused(replacements: list[_ReplacedForward], function: str | None) -> None:
    """Warns when nothing was moved: an error that remains proves nothing then."""
    if any(replacement.calls for replacement in replacements):
        return
    sites = [replacement.site for replacement in replacements]
    what = f"{function} was never called in" if function is not None else "Nothing was moved, since nothing called"
    warnings.warn(
        f"{what} {', '.join(sites[:5])}{' …' if len(sites) > 5 else ''} inside the block. What was compiled ahead of "
        "time runs without asking, and a function inside another of torch's is not seen.",
        stacklevel=6,  # through two context managers
    )


class _MovedTensor(NamedTuple):
    """A tensor and its copy elsewhere, which may be itself. Held, so that their ids stay their own."""

    original: torch.Tensor
    copy: torch.Tensor
    version: int | None


class RoundTrip:
    """Moves the tensors of one call, and its results back to the device of the first tensor and the dtype of the first
    floating-point one.

    What the call wrote to a copy is written to the original too, and a tensor that it merely passes on comes back as
    the original.
    """

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self._device = device
        self._dtype = dtype
        self._sent: dict[int, _MovedTensor] = {}  # by the id of the original
        self._originals: dict[int, torch.Tensor] = {}  # by the id of the copy, or of a result
        self._results: list[torch.Tensor] = []  # held, for their ids
        self._home_device: torch.device | None = None
        self._home_dtype: torch.dtype | None = None

    def send(self, values: Any) -> Any:
        """The same arguments with their tensors moved."""
        return mapped(values, self._send)

    def bring_back(self, result: Any) -> Any:
        """The result moved back, after writing changed copies back to their originals."""
        self._write_back()
        return mapped(result, self._bring_back)

    @contextmanager
    def state(self, module: nn.Module) -> Iterator[None]:
        """Inside the block, the parameters and buffers of a module and all modules in it are moved."""
        weights = {part: part._flat_weights for part in module.modules() if isinstance(part, nn.RNNBase)}
        for tensors_by_name in _tensor_dicts(module):
            for name, tensor in _tensors(tensors_by_name):
                tensors_by_name[name] = self._send(tensor)
        for part, flat in weights.items():  # these keep a list of their parameters besides
            part.__dict__["_flat_weights"] = [tensor if tensor is None else self._send(tensor) for tensor in flat]
        try:
            yield
        finally:
            for tensors_by_name in _tensor_dicts(module):
                for name, tensor in _tensors(tensors_by_name):
                    tensors_by_name[name] = self._bring_back(tensor)
            for part, flat in weights.items():
                part.__dict__["_flat_weights"] = flat
            self._write_back()

    def precision(self) -> Any:
        """Autocast as on the original device; off where a dtype was given, since it would choose another."""
        if self._home_device is None:
            return nullcontext()
        home, target = self._home_device.type, (self._device or self._home_device).type
        if self._dtype is not None:
            return torch.autocast(target, enabled=False)
        if target == home or not torch.is_autocast_enabled(home):
            return nullcontext()
        return torch.autocast(target, dtype=torch.get_autocast_dtype(home))

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._sent.get(id(tensor))
        if known is not None:
            return known.copy
        if self._home_device is None:
            self._home_device = tensor.device
        if self._home_dtype is None and tensor.is_floating_point():
            self._home_dtype = tensor.dtype
        moved = self._moved(tensor)
        self._sent[id(tensor)] = _MovedTensor(tensor, moved, _version(moved))
        self._originals[id(moved)] = tensor
        return moved

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self._device or tensor.device, dtype=dtype)

    def _bring_back(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._originals.get(id(tensor))
        if known is not None:
            return known
        dtype = tensor.dtype
        if dtype == self._dtype and self._home_dtype is not None:
            dtype = self._home_dtype
        device = tensor.device
        if device == self._device and self._home_device is not None:
            device = self._home_device
        brought = tensor.to(device=device, dtype=dtype)
        self._results.append(tensor)
        self._originals[id(tensor)] = brought  # the same result in two places stays one
        return brought

    def _write_back(self) -> None:
        for key, (original, moved, version) in list(self._sent.items()):
            if moved is original or not self._was_written(original, moved, version):
                continue
            if original.requires_grad and original.is_leaf:  # a parameter; torch allows no other write to one
                with torch.no_grad():
                    original.copy_(moved)
            else:
                original.copy_(moved)
            self._sent[key] = _MovedTensor(original, moved, _version(moved))

    def _was_written(self, original: torch.Tensor, moved: torch.Tensor, version: int | None) -> bool:
        if version is not None and (moved._version != version or moved.requires_grad):
            return moved._version != version
        # batch_norm writes its running statistics without changing the version counter, and inference tensors have
        # none.
        return not _same_numbers(moved, self._moved(original))


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _same_numbers(first: torch.Tensor, second: torch.Tensor) -> bool:
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and bool(((first == second) | (first.isnan() & second.isnan())).all())


def _tensor_dicts(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The dicts that hold the tensors of a module and all modules in it; some keep them as plain attributes."""
    for part in module.modules():
        yield part._parameters
        yield part._buffers
        yield part.__dict__


def _tensors(tensors_by_name: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in tensors_by_name.items() if isinstance(value, torch.Tensor)]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with its tensors changed; the same object where nothing in it changes."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # whose lengths stay on the CPU, wherever its data is
        return value._replace(data=change(value.data), **_indices(value, change))
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(value, "_make", type(value))  # a named tuple takes its items one by one otherwise
        return make(items)
    if isinstance(value, dict | UserDict):
        entries = {key: mapped(item, change) for key, item in value.items()}
        return value if _same(entries, value) else _with_entries(value, entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        new = {name: mapped(item, change) for name, item in old.items()}
        return value if _same(new, old) else _with_fields(value, new)
    return value


def _indices(value: PackedSequence, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    named = {"sorted_indices": value.sorted_indices, "unsorted_indices": value.unsorted_indices}
    return {name: change(tensor) for name, tensor in named.items() if tensor is not None}


def _same(new: dict[Any, Any], old: Mapping[Any, Any]) -> bool:
    return all(item is old[key] for key, item in new.items())


def _with_entries(value: MutableMapping[Any, Any], entries: dict[Any, Any]) -> MutableMapping[Any, Any]:
    changed = copy.copy(value)  # of its own class, which may have more than entries
    for key, item in entries.items():
        changed[key] = item
    return changed


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = copy.copy(value)
    for name, item in fields.items():
        object.__setattr__(changed, name, item)  # a frozen one too
    return changed
