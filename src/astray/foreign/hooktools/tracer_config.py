"""What stands in a tracer's YAML file: where to, which calls, which modules and functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.errors import RecordError
from astray.foreign.hooktools.config_keys import Given, Keys, expressions, folder_name, one_of, text, texts, truth
from astray.paths import absolute
from astray.records import ROOT
from astray.wording import did_you_mean

if TYPE_CHECKING:
    from torch import nn

HOOK = "dump_pt_hook"
FORWARD, BACKWARD = ("forward",), ("backward",)
PHASES: dict[int, tuple[str, ...]] = {0: (), 1: FORWARD, 2: BACKWARD, 3: FORWARD + BACKWARD}
"""What each trace_mode records."""

HOMES = ("torch.nn.functional", "torch", "torch.Tensor")
"""Where functions are looked for that somebody wants by the beginning of their names."""


@dataclass(frozen=True)
class TracerConfig:
    """What stands in a tracer's YAML file, checked."""

    log_dir: Path
    tracer_name: str
    phases: tuple[str, ...]
    only_model: bool
    roles: tuple[str, ...]
    starts_with: tuple[str, ...]
    regular_expression: tuple[str, ...]
    verbose: bool
    functions: tuple[str, ...] | None  # () for all there are, None for none
    names_functions: bool

    @classmethod
    def read(cls, config: Given) -> TracerConfig:
        """From a file or a dict. A RecordError says what is wrong, and what would be right."""
        keys = Keys.of(config, RecordError)
        hooks = keys.take("register_hooks", _hooks, (HOOK,))
        mode = keys.take("trace_mode", one_of(0, 1, 2, 3), 0)
        options = keys.inside("dump_pt_hook_options")
        modules = options.inside("hook_specifiy_modules", "hook_specify_modules")
        hacking = keys.take("hacker_non_nn_modules", truth, False)
        hacker = keys.inside("hacker_options")
        only_input, only_output = keys.take("only_input", truth, False), keys.take("only_output", truth, False)
        found = cls(
            log_dir=absolute(keys.take("log_dir", text, "./tmp")),
            tracer_name=keys.take("tracer_name", folder_name, ""),
            phases=PHASES[mode] if HOOK in hooks else (),
            only_model=keys.take("trace_granularity", one_of(0, 1), 0) == 1,
            roles=("input",) if only_input else ("output",) if only_output else ("input", "output"),
            starts_with=modules.take("starts_with", texts, ()),
            regular_expression=modules.take("regular_expression", expressions, ()),
            verbose=keys.take("verbose", truth, False),
            functions=_functions(hacker.take("supported_apis", _apis, ())) if hacking else None,
            names_functions=hacker.take("verbose", truth, False),
        )
        if not hacking:  # said without being asked for, as in the demo file
            hacker.take("supported_apis", _apis, ())
        for part in (modules, options, hacker, keys):
            part.done()
        return found

    def wants(self, name: str) -> bool:
        """Whether a name is one of those that were asked for."""
        if not self.starts_with and not self.regular_expression:
            return True
        return name.startswith(self.starts_with) or any(re.search(one, name) for one in self.regular_expression)

    def match(self, model: nn.Module) -> str | None:
        """What a recorder is told to record these; None for everything.

        A name is that of a module in the model; as hooktools knew modules by their reprs, and functions by their full
        names, those are understood too.
        """
        if not self.starts_with and not self.regular_expression:
            return None
        wanted = [*(f"^{re.escape(one)}" for one in self.starts_with), *self.regular_expression]
        for name, module in model.named_modules():
            described = repr(module) if next(module.children(), None) is None else type(module).__name__
            if self.wants(described):
                wanted.append(f"^{re.escape(name or ROOT)}$")
        if self.functions is not None:
            names = {one.rpartition(".")[2] for one in self.functions or _all_functions() if self.wants(one)}
            wanted += [f"/{re.escape(one)}$" for one in sorted(names)]
        return "|".join(f"(?:{one})" for one in wanted)


def _hooks(value: Any) -> tuple[str, ...]:
    found = texts(value)
    for one in found:
        if one != HOOK:
            raise ValueError(f"there is no hook {one!r}; there is {HOOK}")
    return found


def _apis(value: Any) -> tuple[str, ...]:
    """The functions of all groups."""
    if isinstance(value, dict):
        return tuple(dict.fromkeys(name for names in value.values() for name in texts(names or [])))
    return texts(value)


def _functions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Functions that torch has, by their full names."""
    import torch

    for name in names:
        place: Any = torch
        first, *parts = name.split(".")
        for part in parts if first == "torch" else [None]:
            place = getattr(place, part, None) if part else None
            if place is None:
                known = did_you_mean(name, _all_functions())
                raise RecordError(
                    f"hacker_options.supported_apis has {name!r}, which is no function of torch.{known} Functions of "
                    "others are made of torch's; to see what goes in and out of one, use astray.record and rec.save."
                )
    return names


def _all_functions() -> Iterator[str]:
    import torch

    places = {"torch.nn.functional": torch.nn.functional, "torch": torch, "torch.Tensor": torch.Tensor}
    return (f"{home}.{name}" for home in HOMES for name in dir(places[home]) if not name.startswith("_"))
