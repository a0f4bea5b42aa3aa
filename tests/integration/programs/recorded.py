"""Runs a program with and without a recorder, and looks for whatever a recorder may have left behind."""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed
import torch.optim.optimizer as every_optimizer
import torch.utils.checkpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import astray
from integration.programs.program import PROGRAMS, Program, Setup, state_after

FAILURE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Iteration|Warning): |AssertionError")
"""How the run words a failure of ours: the type of the exception, then what it says."""

NAMESPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.nn.Parameter, torch.autograd,
    torch.autograd.Function, torch.optim.Optimizer, torch.utils.checkpoint, torch.distributed, torch.linalg, torch.fft,
    torch.special, torch._C._nn, torch._C._VariableFunctionsClass, torch._C.TensorBase, threading.Thread,
)  # fmt: skip
"""Where a tool that replaces functions would replace them."""


class Bare(NamedTuple):
    """A program that ran without a recorder: its results, and the hooks that it left on its models itself."""

    state: dict[str, Any]
    left: dict[str, Any]


class Recorded(NamedTuple):
    """A program that was recorded: the run, its results, what remained of the recorder, and its warnings."""

    path: Path
    state: dict[str, Any]
    left: list[str]
    complaints: list[str]


@cache
def bare(name: str) -> Bare:
    """Runs a program as it is."""
    program = PROGRAMS[name]
    with _quiet(program):
        setup, steps = program.start()
        state = state_after(setup, list(steps))
    return Bare(state, _on_models(setup))


def record(program: Program, path: Path, **settings: Any) -> Recorded:
    """Runs a program from its first step to its last under a recorder."""
    alone = bare(program.name)  # first: it may load or install something that then stays, in any run
    results = []
    with _quiet(program), _complaints() as complaints:
        setup, steps = program.start()
        classes = _classes(setup)
        before = _on_everything(classes)
        with astray.record(path, setup.models, **settings) as recorder:
            for result in steps:
                results.append(result)
                recorder.step()
        left = _differences(before, _on_everything(classes)) + _differences(alone.left, _on_models(setup))
        state = state_after(setup, results)
    end = astray.open(path).ranks[0].end
    assert end is not None
    complaints += [f"{missed.what}: {missed.why}" for missed in end.missed if FAILURE.match(missed.why)]
    return Recorded(path, state, left, complaints)


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{where}: {found.get(where)} instead of {expected.get(where)}"
        for where in {**expected, **found}
        if expected.get(where) != found.get(where)
    ]


@contextmanager
def _quiet(program: Program) -> Iterator[None]:
    with warnings.catch_warnings():
        for message in program.warns:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What astray logs, which it does only when something went wrong."""
    found: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Listening(logging.WARNING)
    logger = logging.getLogger("astray")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _classes(setup: Setup) -> list[type]:
    """The classes of all modules of a program, with those they are derived from."""
    modules = (module for model in setup.by_name.values() for module in model.modules())
    return list(dict.fromkeys(kind for module in modules for kind in type(module).__mro__))


def _on_everything(classes: Sequence[type]) -> dict[str, Any]:
    """What is there once in a process, by where it is.

    Classes are among it: whatever else the process has run since a bare run may have changed them, as torch.compile
    does with `nn.Module` when it first compiles.
    """
    found: dict[str, Any] = {
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "gradients and inference": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("astray")],
        "import hooks": list(sys.meta_path),
        "trace and profile functions": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "hooks on all modules": _global_hooks(torch.nn.modules.module),
        "hooks on all optimizers": _global_hooks(every_optimizer),
    }
    for namespace in NAMESPACES:
        for name, value in vars(namespace).items():
            if callable(value):
                found[f"{namespace.__name__}.{name}"] = id(value)
    for number, kind in enumerate(classes):  # numbered: parametrizations make classes that share a name
        methods = {name: id(value) for name, value in vars(kind).items() if callable(value)}
        found |= {f"{_name(kind)}.{name} of class {number}": value for name, value in methods.items()}
    return found


def _global_hooks(module: ModuleType) -> dict[str, list[Any]]:
    tables = {name: value for name, value in vars(module).items() if name.startswith("_global") and "hook" in name}
    assert tables
    return {name: list(value.items()) for name, value in tables.items() if isinstance(value, dict)}


def _on_models(setup: Setup) -> dict[str, Any]:
    """The hooks on the models and optimizers of a program, as texts that are equal in another run of it."""
    found: dict[str, Any] = {}
    for label, model in setup.by_name.items():
        for name, module in model.named_modules(remove_duplicate=False):
            found |= _on_module(f"{label}.{name}", module)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tables = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
            found[f"hooks of tensor {label}.{name}"] = [_names(table or {}) for table in tables]
            found[f"attributes of tensor {label}.{name}"] = sorted(getattr(tensor, "__dict__", ()))
    for number, optimizer in enumerate(setup.optimizers):
        attributes = vars(optimizer)
        hooks = {name: _names(value) for name, value in attributes.items() if name.endswith("_hooks")}
        found[f"hooks of optimizer {number}"] = hooks
        found[f"attributes of optimizer {number}"] = sorted(attributes)
    return found


def _on_module(name: str, module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    hooks = {key: _names(value) for key, value in attributes.items() if "_hooks" in key and isinstance(value, dict)}
    assert len(hooks) > 8
    methods = {key: _name(value) for key, value in attributes.items() if callable(value)}
    return {
        f"hooks of {name}": hooks,
        f"attributes of {name}": sorted(attributes),
        f"methods of {name}": methods,
        f"classes of {name}": [_name(kind) for kind in type(module).__mro__],
    }


def _names(table: dict[Any, Any]) -> list[str]:
    """What is in a table of hooks: the hooks themselves, or whether each is to be called in some way."""
    return [_name(value) if callable(value) else repr(value) for value in table.values()]


def _name(thing: Any) -> str:
    named = thing if hasattr(thing, "__qualname__") and hasattr(thing, "__module__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"
