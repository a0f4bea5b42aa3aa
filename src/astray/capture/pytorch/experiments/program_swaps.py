"""`astray run --swap`: swaps in a program that knows nothing of astray, as its models and callables come to be.

Models are found and named as `discovery` finds and names them, but before their call begins: torch reads `forward`
before it calls any hook. So `Module.__call__` is replaced meanwhile. Callables are looked for whenever a module is
imported that they may be in, and, for those that the script itself defines, when a module of the program is called.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from astray.capture.patched_function import PatchedFunction
from astray.capture.pytorch.calls.wrappers import has_parameters, type_name
from astray.capture.pytorch.compiled.dynamo import compiled_inside_only, is_compiled_graph, never_compiled
from astray.capture.pytorch.discovery import name_in_step
from astray.capture.pytorch.experiments.destination import Destination
from astray.capture.pytorch.experiments.program_callables import find
from astray.capture.pytorch.experiments.swap_words import SwapOption
from astray.capture.pytorch.experiments.swapped_functions import ModuleSites
from astray.capture.pytorch.experiments.swapping import Swap, add_sites, why_nothing
from astray.capture.step_ends import ModelNames
from astray.errors import UsageError
from astray.interrupts import pass_interrupt

_OF_SCRIPT = (
    " A callable of the script itself is swapped when the next module is called; in a file of its own it is swapped as "
    "soon as that is imported."
)


class ProgramSwaps:
    """What `--swap` asks for, from the moment that torch has been imported until `end`."""

    def __init__(self, options: Sequence[SwapOption]) -> None:
        self._sites: ModuleSites = ModuleSites()
        self._roots: ModuleSites = ModuleSites()  # the labels of models
        self._labels = ModelNames({})
        self._names: dict[str, None] = {}  # the sites of all modules
        self._problems: dict[SwapOption, str] = {}
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._swaps = {option: Swap(option.what, Destination(option.to), self._sites) for option in options}
        for option, swap in self._swaps.items():
            swap.begin()
            if swap.may_be_callable:
                swap.wait_for_import(partial(self._try, [option], swap.find_callable))
        self._call = PatchedFunction(nn.Module, "__call__", partial(_wrap_call, self._module_called))

    def end(self) -> list[str]:
        """Puts everything back. Returns a sentence about each swap that could not be made, or that had no effect."""
        with self._lock:
            self._call.remove()
            sentences = [self._problem(option, swap) for option, swap in self._swaps.items()]
            for swap in self._swaps.values():
                swap.note_unused()
            for swap in reversed(self._swaps.values()):
                swap.end()
            self._swaps = {}
        return [sentence for sentence in sentences if sentence is not None]

    def _problem(self, option: SwapOption, swap: Swap) -> str | None:
        if option in self._problems:
            return f"--swap {option}: {self._problems[option]}"
        if swap.is_found:
            if swap.why_unused is None:
                return None
            why = f"{option.what} {swap.why_unused}"
        elif swap.may_be_callable and find(option.what) is not None:
            why = f"{option.what} was defined too late."
        else:
            why = why_nothing(option.what, self._names) or f"{option.what} was never imported."
        return f"--swap {option}: {why}{_OF_SCRIPT if option.what.startswith('__main__.') else ''}"

    # -- models ------------------------------------------------------------------------------------------------------

    @never_compiled
    def _module_called(self, module: nn.Module, frame: Any) -> None:
        """A module is about to be called, by this frame."""
        if module in self._sites and all(swap.is_found for swap in self._swaps.values()):
            return
        if os.getpid() != self._process or is_compiled_graph(module, frame):
            return
        with self._lock:
            new: dict[str, nn.Module] = {}
            if module not in self._sites:
                self._try([*self._swaps], partial(self._add_sites, new, module, frame))
            for option, swap in self._swaps.items():
                self._try([option], swap.find_callable)
                self._try([option], partial(swap.add_modules, new))

    def _add_sites(self, new: dict[str, nn.Module], module: nn.Module, frame: Any) -> None:
        """Finds the modules that have no site yet: of known models, and of the one that this is."""
        for root, label in self._roots.items():
            add_sites(new, self._sites, root, label)
        if module not in self._sites:
            given = name_in_step(frame, module)
            label = self._labels.add(module, type_name(module), partial(has_parameters, module), given)
            self._roots[module] = label
            add_sites(new, self._sites, module, label)
        self._names.update(dict.fromkeys(new))

    def _try(self, options: Sequence[SwapOption], attempt: Callable[[], object]) -> None:
        """Notes why these swaps could not be made, if they could not."""
        try:
            attempt()
        except UsageError as error:
            self._problems.update(dict.fromkeys(options, str(error)))
        except Exception as error:  # noqa: BLE001 - the user's program must not fail because we did
            pass_interrupt(error)
            self._problems.update(dict.fromkeys(options, f"{type(error).__name__}: {error}."))


def _wrap_call(called: Callable[[nn.Module, Any], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.__call__` that tells which module is called."""

    @functools.wraps(call)
    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            called(module, sys._getframe(1))
        return call(module, *args, **kwargs)

    return compiled_inside_only(wrapper)
