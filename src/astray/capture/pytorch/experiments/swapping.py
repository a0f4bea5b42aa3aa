"""`astray.experiment.swap` in torch: what is swapped, from the name or object that was given, until it is put back.

A `Swap` is one thing to be swapped. It is given the modules that there are, and finds callables by their names; what is
done then is in `swapped_calls` and `swapped_functions`. `swapped` is the block around all that a call of `swap` names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from astray.capture.imports import ImportHook
from astray.capture.pytorch.calls.wrappers import chains
from astray.capture.pytorch.experiments import active_swaps
from astray.capture.pytorch.experiments.destination import Destination
from astray.capture.pytorch.experiments.program_callables import (
    find,
    layers_of_name,
    layers_of_object,
    why_not_found,
)
from astray.capture.pytorch.experiments.swap_words import FunctionPattern, check_pattern, is_dotted
from astray.capture.pytorch.experiments.swapped_calls import Layer, ModuleLayer, Place, module_place
from astray.capture.pytorch.experiments.swapped_functions import (
    FastPathsKept,
    FunctionChoice,
    ModeBelow,
    ModeLayer,
    ModuleSites,
    SwappedFunctions,
    SwappedOps,
)
from astray.capture.sites import site_name
from astray.errors import UsageError

What = str | re.Pattern[str] | Callable[..., Any]

NOT_CALLED = (
    "was not swapped: nothing called it meanwhile. What was compiled ahead of time runs without asking, and a function "
    "inside another of torch's is not seen."
)
NOTHING_MOVED = (
    "was called without any tensor that could be moved, so it ran as before. Tensors inside objects of the program's "
    "own stay where they are: swap what takes them as arguments."
)
"""Why a swap had no effect, as the rest of a sentence that begins with what was to be swapped."""


@contextmanager
def swapped(model: Any, what: Any, to: Any) -> Iterator[None]:
    """Inside the block, what was named runs at its destination."""
    names, sites = _modules_of(model)
    wanted = list(what) if isinstance(what, list | tuple | set | frozenset) else [what]
    if not wanted:
        raise UsageError("what=[] names nothing to swap. Give a site, a regular expression, a function, or several.")
    swaps = [Swap(each, Destination(to), sites) for each in wanted]
    with ExitStack() as ending:
        for swap in swaps:
            ending.callback(swap.end)
            swap.destination.prepare()
            swap.begin()
            if not swap.add_modules(names) and not swap.is_found and not swap.find_callable():
                if (why := why_nothing(swap.text, names)) is not None:
                    raise UsageError(why)
                swap.wait_for_import(swap.find_callable)
        yield
        for swap in swaps:
            swap.note_unused()
        for why in (NOT_CALLED, NOTHING_MOVED):
            unused = [swap.text for swap in swaps if swap.why_unused == why]
            if unused:
                warnings.warn(f"{_listed(unused)} {why}", stacklevel=5)  # through two context managers


class Swap:
    """One thing that is swapped, until `end`.

    `text` is what it was called. `is_found`: whether there is anything of that name.
    """

    def __init__(self, what: Any, destination: Destination, sites: ModuleSites | None) -> None:
        if not isinstance(what, str | re.Pattern | nn.Module) and not callable(what):
            raise UsageError(
                f"what={what!r} is nothing that can be swapped. It is a site such as 'h.2.attn', a regular expression "
                "that fits sites, the dotted name of a callable, or a callable."
            )
        self.text: str = what.pattern if isinstance(what, re.Pattern) else what if isinstance(what, str) else ""
        self.destination = destination
        self.is_found = False
        self._is_called = False
        self._what = what
        self._sites = sites
        self._noted: dict[str, None] = {}  # the sites that recordings were told of
        self._ending = ExitStack()
        self._choice: FunctionChoice | None = None
        self._mode: SwappedFunctions | SwappedOps | None = None
        self._pattern: FunctionPattern | None = None
        if self.text:
            check_pattern(self.text)
            if "/" in self.text:
                self._pattern = FunctionPattern.read(self.text)
        elif isinstance(what, str | re.Pattern):
            raise UsageError(f"what={what!r} is empty. Name a module, a function or a callable.")
        if self._pattern is not None and destination.is_eager:
            raise UsageError(
                f"{self.text} is a function of torch, and torch.compile compiles modules and functions of the program: "
                "name one of these with to='eager'."
            )

    @property
    def may_be_callable(self) -> bool:
        """Whether it is named as a callable would be, and not found yet."""
        return not self.is_found and self._pattern is None and is_dotted(self.text)

    def called(self, site: str) -> None:
        """A call at this site runs at the destination."""
        self._is_called = True
        self._note(site)

    def begin(self) -> None:
        """Swaps what needs no model and no name to be found: a given callable, functions outside of modules."""
        if self._pattern is not None:
            self._begin_functions(self._pattern)
        elif isinstance(self._what, nn.Module):
            site = (self._sites and self._sites.get(self._what)) or type(self._what).__name__
            self.text = site
            self._swap_module(site, self._what)
        elif not self.text:
            self.text, layers = layers_of_object(self, self._what)
            self._add(self.text, layers)

    def add_modules(self, modules: Mapping[str, nn.Module]) -> bool:
        """Swaps those of some modules that are meant, by their sites. Returns whether there are any."""
        if not self.text or isinstance(self._what, nn.Module):
            return False
        named = self.text if self._pattern is None else self._pattern.module
        matching = [named] if named in modules else [name for name in modules if re.fullmatch(named, name)]
        if isinstance(self._what, re.Pattern) and self._pattern is None:
            matching = [name for name in modules if self._what.fullmatch(name)]
        for name in matching:
            if self._choice is None:
                self._swap_module(name, modules[name])
            else:
                self._choice.modules.add(name)
                self._watch_functions(name, modules[name])
        return bool(matching)

    def find_callable(self) -> bool:
        """Swaps the callable of this name, if it has been imported."""
        if not self.may_be_callable:
            return False
        found = find(self.text)
        if found is None or isinstance(found.value, nn.Module):
            return False
        self._add(self.text, layers_of_name(self, self.text, found))
        return True

    def wait_for_import(self, find: Callable[[], Any]) -> None:
        """Looks for the callable of this name, by `find`, whenever a module is imported that it may be in."""
        parts = self.text.split(".")
        for end in range(1, len(parts)):
            hook = ImportHook(".".join(parts[:end]), find).install()
            self._ending.callback(hook.remove)

    def end(self) -> None:
        """Puts everything back."""
        self._ending.close()

    @property
    def why_unused(self) -> str | None:
        """Why it had no effect, in words that follow its name; None if it had one."""
        if not self._is_called:
            return NOT_CALLED
        return NOTHING_MOVED if self.destination.moves and not self.destination.has_moved else None

    def note_unused(self) -> None:
        """Tells recordings if it had no effect."""
        if self.why_unused == NOT_CALLED:
            why = "it was never called" if self.is_found else "there is nothing of that name"
            active_swaps.unused(f"the swap of {self.text}", why)
        elif self.why_unused is not None:
            active_swaps.unused(f"the swap of {self.text}", "no call of it had a tensor that could be moved")

    # -- swapping ------------------------------------------------------------------------------------------------

    def _swap_module(self, site: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{site} was compiled by torch.jit, and runs without Python: it cannot be swapped alone.")
        self._add(site, [(module_place(module), ModuleLayer(self, site, module))])

    def _begin_functions(self, pattern: FunctionPattern) -> None:
        choice = self._choice = FunctionChoice(self, pattern.function, self._sites, set())
        self._mode = SwappedOps(choice) if pattern.is_op else SwappedFunctions(choice)
        if pattern.is_outside:
            choice.modules.add("")
            self.is_found = True
        if isinstance(self._mode, SwappedFunctions):
            self._ending.callback(FastPathsKept(self._mode).remove)
        if pattern.is_outside or pattern.is_op:
            self._ending.enter_context(ModeBelow(self._mode))

    def _watch_functions(self, site: str, module: nn.Module) -> None:
        self.is_found = True
        if isinstance(self._mode, SwappedFunctions) and self._choice is not None:
            self._put(module_place(module), ModeLayer(self, site, self._mode, module))

    def _add(self, site: str, layers: list[tuple[Place, Layer]]) -> None:
        for place, layer in layers:
            self._put(place, layer)
        self.is_found = True
        self._note(site)

    def _put(self, place: Place, layer: Layer) -> None:
        place.add(layer)
        self._ending.callback(place.remove, layer)

    def _note(self, site: str) -> None:
        if site not in self._noted:
            self._noted[site] = None
            active_swaps.begin(site, self.destination.text)
            self._ending.callback(active_swaps.end, site, self.destination.text)


def _modules_of(model: Any) -> tuple[dict[str, nn.Module], ModuleSites | None]:
    """The modules of a model, or of a dict of them, by their sites; and the site of each. None: no model."""
    if model is None:
        return {}, None
    names: dict[str, nn.Module] = {}
    sites: ModuleSites = ModuleSites()
    for label, root in (model if isinstance(model, Mapping) else {"": model}).items():
        if not isinstance(root, nn.Module):
            raise UsageError(
                f"{type(root).__name__} is not a torch.nn.Module. Give swap() a module, a dict of them, or None."
            )
        add_sites(names, sites, root, label)
    return names, sites


def add_sites(names: dict[str, nn.Module], sites: ModuleSites, root: nn.Module, label: str) -> None:
    """Adds the modules of a model by their sites to both, without those that have one."""
    for chain in chains(root):
        if chain.inner in sites:
            continue
        site = site_name(label, chain.name)
        names[site] = chain.inner
        for module in chain.modules:
            sites[module] = site


def why_nothing(text: str, names: Mapping[str, object]) -> str | None:
    """Why there is nothing of a name; None where it may be that of a callable that is imported later."""
    module = FunctionPattern.read(text).module if "/" in text else text
    if is_dotted(text):
        why = why_not_found(text)
        top = text.partition(".")[0]
        if why is not None and top not in {name.partition(".")[0] for name in names}:
            return why
        if why is None and _exists(top):
            return None
    if not names:
        return (
            f"There is no callable {text}, and no model was given in which it could be a module. Give the model, or a "
            "dotted name such as mypkg.sampling.top_p."
        )
    both = "module and no callable" if is_dotted(text) else "module"
    return f"No {both} is called {module}. {_suggestion(module, names)}"


def _exists(package: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _suggestion(wanted: str, names: Mapping[str, object]) -> str:
    """What is called nearly so; else a few names that there are."""
    near = get_close_matches(wanted, names, n=3)
    listed = near or list(names)[:5]
    return f"{'Did you mean' if near else 'There are'} {', '.join(listed)}{'?' if near else ', for example.'}"


def _listed(texts: list[str]) -> str:
    return ", ".join(texts[:5]) + (" …" if len(texts) > 5 else "")
