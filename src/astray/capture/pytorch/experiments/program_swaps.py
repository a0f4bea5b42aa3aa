"""`astray run --swap`: swaps in a program that knows nothing of astray, as its models and callables come to be.

Models are found and named as `discovery` finds and names them, but before their call begins: torch reads `forward`
before it calls any hook. So `Module.__call__` is replaced meanwhile. Callables are looked for whenever a module is
imported that they may be in, and, for those that the script itself defines, when a module of the program is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_compiling

from astray.capture.patched_function import PatchedFunction
from astray.capture.pytorch.calls.wrappers import has_parameters, type_name
from astray.capture.pytorch.compiled.dynamo import compiled_inside_only, is_compiled_graph, never_compiled
from astray.capture.pytorch.discovery import name_in_step
from astray.capture.pytorch.experiments.destination import Destination
from astray.capture.pytorch.experiments.swap_words import FunctionPattern, SwapOption
from astray.capture.pytorch.experiments.swapped_functions import ModuleSites
from astray.capture.pytorch.experiments.swapping import NOT_SEEN, Swap, add_sites, suggestion
from astray.capture.step_ends import ModelNames
from astray.errors import UsageError
from astray.interrupts import pass_interrupt


class _Requested(NamedTuple):
    option: SwapOption
    swap: Swap


class ProgramSwaps:
    """What `--swap` asks for, from the moment that torch has been imported until `end`."""

    def __init__(self, options: Sequence[SwapOption]) -> None:
        self._sites: ModuleSites = ModuleSites()
        self._names = ModelNames({})
        self._known: dict[str, nn.Module] = {}
        self._roots: ModuleSites = ModuleSites()  # the labels of models
        self._requested = [_Requested(each, Swap(each.what, Destination(each.to), self._sites)) for each in options]
        self._problems: list[str] = []
        self._process = os.getpid()
        for option, swap in self._requested:
            swap.begin()
            self._trying(option, swap.find_callable)
            if not swap.is_found and "/" not in option.what:
                swap.wait_for_import()
        self._call = PatchedFunction(nn.Module, "__call__", partial(_wrap_call, self._module_called))

    def end(self) -> list[str]:
        """Puts everything back. Returns a sentence about each swap that could not be made, or that nothing called."""
        self._call.remove()
        unused = [each for each in self._requested if not each.swap.calls]
        for _, swap in self._requested:
            swap.note_unused()
        for _, swap in reversed(self._requested):
            swap.end()
        return self._problems + [self._why_unused(each) for each in unused]

    def _why_unused(self, requested: _Requested) -> str:
        option, swap = requested
        if swap.is_found:
            return f"--swap {option} changed nothing: {option.what} was never called. {NOT_SEEN}"
        wanted = FunctionPattern.read(option.what).module if "/" in option.what else option.what
        known = f" {suggestion(wanted, self._known)}" if self._known else ""
        return f"--swap {option} changed nothing: no module and no callable is called {wanted}.{known}"

    # -- models ------------------------------------------------------------------------------------------------------

    @never_compiled
    def _module_called(self, module: nn.Module, frame: Any) -> None:
        """A module is about to be called, by this frame."""
        for option, swap in self._requested:
            if not swap.is_found:
                self._trying(option, swap.find_callable)
        if module in self._sites or is_compiled_graph(module, frame) or os.getpid() != self._process:
            return
        before = len(self._known)
        for root, label in self._roots.items():  # a part that was put into a known model since
            add_sites(self._known, self._sites, root, label)
        if module not in self._sites:
            given = name_in_step(frame, module)
            label = self._names.add(module, type_name(module), partial(has_parameters, module), given)
            self._roots[module] = label
            add_sites(self._known, self._sites, module, label)
        new = dict(list(self._known.items())[before:])
        for option, swap in self._requested:
            self._trying(option, partial(swap.add_modules, new))

    def _trying(self, option: SwapOption, attempt: Callable[[], bool]) -> None:
        try:
            attempt()
        except UsageError as error:
            if str(error) not in self._problems:
                self._problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            pass_interrupt(error)
            self._problems.append(f"--swap {option} failed: {type(error).__name__}: {error}.")


def _wrap_call(called: Callable[[nn.Module, Any], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.__call__` that tells which module is called."""

    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            called(module, sys._getframe(1))
        return call(module, *args, **kwargs)

    return compiled_inside_only(wrapper)
