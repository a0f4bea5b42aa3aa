"""Keeps dynamo off our hooks, so that compiled code runs as it would without astray, and reports what that hides.

Used by every hook that torch calls, and by `modules`. Nothing here imports torch._dynamo, which takes seconds: programs
that compile have imported it. The parts of dynamo that are used have no public names, so all of their uses are in this
module.
"""

from __future__ import annotations

import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame as dynamo

from astray.capture.engine import Engine
from astray.capture.pytorch.calls.wrappers import forward_of
from astray.capture.pytorch.native.core import Site
from astray.capture.pytorch.torch_code import TORCH, torch_folder
from astray.records import ROOT

AS_ONE = "torch.compile runs them as one graph"

_OPTIMIZERS = torch_folder("optim")
_COMPILERS = (torch_folder("_functorch"), torch_folder("_dynamo"))
_CALLERS = (nn.modules.module.__file__, torch_folder("fx"))
_PYTHON = sysconfig.get_path("stdlib")

_SKIP_ALL = ("SKIP", "SKIP")  # neither the function nor what it calls
_SKIP_ITSELF = ("SKIP", "DEFAULT")
_DEFAULT = ("DEFAULT", "DEFAULT")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Keeps dynamo from compiling a function that torch calls back, and the functions that it calls.

    While a compiled region runs, dynamo compiles every function that starts: a hook would become one that does nothing,
    since it does nothing while it is traced. It is still traced where compiled code calls it.
    """
    _set_strategy(function.__code__, _SKIP_ALL)
    return function


def compiled_inside_only(function: _Function) -> _Function:
    """Keeps dynamo from compiling a function by itself while a compiled region runs; what it calls is as without it."""
    _set_strategy(function.__code__, _SKIP_ITSELF)
    return function


def uncompiled(function: _Function) -> _Function:
    """Has compiled code stop for a call of a function, which runs as it would without torch.compile, and all in it.

    As `torch.compiler.disable`, which would import dynamo.
    """
    vars(function)["_torchdynamo_disable"] = True
    return never_compiled(function)


def _set_strategy(code: CodeType, actions: tuple[str, str]) -> None:
    """Sets what dynamo does with a function that starts while compiled code runs, and with those that it calls."""
    try:
        strategy = dynamo._FrameExecStrategy(*(getattr(dynamo._FrameAction, action) for action in actions))
        dynamo.set_code_exec_strategy(code, strategy)
    except AttributeError:  # another version of torch has other names for these; then fewer calls are seen
        pass


def _compiled_versions(code: CodeType) -> list[Any]:
    """The compiled versions of a function that dynamo has cached."""
    versions: Callable[[CodeType], list[Any]] = getattr(dynamo, "_debug_get_cache_entry_list", lambda _: [])
    return versions(code)


def _set_guard_hook(hook: Any) -> Any:
    """Has dynamo call `hook` whenever it is about to run compiled code; returns the previous hook."""
    return getattr(dynamo, "set_guard_complete_hook", lambda _: None)(hook)


class BuiltinForwards:
    """Keeps dynamo from compiling layers of torch.nn only because they have hooks now.

    Where a compiled region falls back to eager execution, dynamo skips these layers, but not those with hooks.
    Compiled, they round differently.
    """

    _skipped: ClassVar[Counter[CodeType]] = Counter()  # over all recordings

    def __init__(self) -> None:
        self._own: set[CodeType] = set()

    def skip(self, modules: Iterable[nn.Module]) -> None:
        """Called before hooks are added. Classes of which a module already has hooks are left to dynamo."""
        codes: set[CodeType] = set()
        hooked: set[CodeType] = set()
        for module in modules:
            code = getattr(forward_of(type(module)), "__code__", None)
            if code is not None and code.co_filename.startswith(TORCH):
                (hooked if _has_hooks(module) else codes).add(code)
        for code in codes - hooked - self._own:
            if not _compiled_versions(code):
                self._own.add(code)
                self._skipped[code] += 1
                _set_strategy(code, _SKIP_ITSELF)

    def remove(self) -> None:
        """Restores dynamo's default for these layers."""
        for code in self._own:
            self._skipped[code] -= 1
            if not self._skipped[code]:
                del self._skipped[code]
                _set_strategy(code, _DEFAULT)
        self._own.clear()


class CompileWarningFilter:
    """Suppresses the warning of torch.compile that global module hooks see its wrappers too, which ours expect.

    The filter comes first, unless the program has added others since.
    """

    _active_recordings: ClassVar[int] = 0
    _text: ClassVar[str] = r"Using `torch\.compile\(module\)` when there are global hooks"

    def __init__(self) -> None:
        if not CompileWarningFilter._active_recordings:
            warnings.filterwarnings("ignore", message=self._text, category=UserWarning)
        CompileWarningFilter._active_recordings += 1

    def remove(self) -> None:
        CompileWarningFilter._active_recordings -= 1
        if not CompileWarningFilter._active_recordings:
            ours = [entry for entry in warnings.filters if getattr(entry[1], "pattern", None) == self._text]
            for entry in ours:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class CompiledCodeWatch:
    """Notices compiled code that runs while recording, and reports that the calls inside it are not seen.

    Code that is compiled already is noticed whenever its guards pass. What is compiled while recording runs once
    without a guard check, and is found in dynamo's compilation metrics afterwards.
    """

    _active: ClassVar[list[CompiledCodeWatch]] = []  # of all recordings, for dynamo has room for one hook only
    _previous_hook: ClassVar[Any] = None  # the hook that was there before ours

    def __init__(self, engine: Engine, site: Callable[[nn.Module], Site | None], *, tapped: bool) -> None:
        self._engine = engine
        self._site = site
        self._tapped = tapped  # whether the calls inside are seen all the same
        self._last_look = time.time_ns() // 1000
        self._forwards: dict[tuple[str, int], set[str]] = {}  # whose code it is, by file and line
        self._reported: set[str] = set()
        self._ran = False
        self._functions_ran = False

    def start(self) -> None:
        cls = CompiledCodeWatch
        if not cls._active:
            cls._previous_hook = _set_guard_hook(_guards_passed)
        cls._active.append(self)

    def stop(self, recorded: bool) -> None:
        """Ends watching. recorded: whether the step that ends was."""
        self.look_back(recorded)
        cls = CompiledCodeWatch
        if self in cls._active:
            cls._active.remove(self)
            if not cls._active:
                hook = _set_guard_hook(cls._previous_hook)
                if hook is not _guards_passed:  # another was put in its place
                    _set_guard_hook(hook)
                cls._previous_hook = None

    def add_module(self, module: nn.Module) -> None:
        """Registers a module whose calls are recorded, though perhaps not the calls inside it."""
        code, site = getattr(forward_of(type(module)), "__code__", None), self._site(module)
        if code is not None and site is not None:
            self._forwards.setdefault((code.co_filename, code.co_firstlineno), set()).add(site.name)

    def was_called(self, site: Site) -> None:
        """A compiled module was called, though torch.compile may have fallen back to eager execution."""
        if self._ran and not self._tapped and site.name not in self._reported:
            self._report_inside(site.name)

    def was_not_called(self, site: Site) -> None:
        """No call of this module was seen in the whole recording."""
        inside_root = ROOT in self._reported and not site.root
        if (
            self._functions_ran
            and not inside_root
            and not any(site.name.startswith(f"{name}.") for name in self._reported)
        ):
            self._engine.missed(f"calls of {site.name}", "if there were any, a compiled function made them")

    def before_compiled_call(self, caller: FrameType) -> None:
        """Compiled code is about to run, called from this frame."""
        engine = self._engine
        if not engine.recording or not engine.in_own_process:
            return
        engine.tensors.forget()  # it may reuse memory without changing version counters
        self._ran = True
        if self._tapped:
            return
        if caller.f_code.co_name == "compile_wrapper":  # what torch.compile made of a function
            function = caller.f_locals["fn"]
            module = _module_of(function)
            if module is not None:
                self._entered_module(module)
            else:
                code = function.__code__
                self._report_function(code.co_name, code.co_filename, code.co_firstlineno)
        elif caller.f_code.co_filename.startswith(_OPTIMIZERS):
            self._report_optimizer()
        elif caller.f_code.co_filename == nn.modules.module.__file__:  # on its way from a call to `forward`
            self._entered_module(caller.f_locals["self"])

    def _entered_module(self, module: nn.Module) -> None:
        site = self._site(module)
        if site is not None and self._engine.innermost(site) is not None:
            self._report_inside(site.name)
        elif site is not None:
            self._engine.missed(f"calls of {site.name}", "torch.compile has taken its hooks into the graph")
        elif type(module).__name__.startswith("CompiledAutograd"):
            self._report_backward()

    def look_back(self, recorded: bool) -> None:
        """Reads what was compiled in the step that ends, if that step was `recorded`."""
        utils = sys.modules.get("torch._dynamo.utils")
        since, self._last_look = self._last_look, time.time_ns() // 1000
        if utils is None or self._tapped or not recorded:
            return
        for metrics in utils.get_compilation_metrics():
            name, file, line = metrics.co_name, metrics.co_filename, metrics.co_firstlineno
            is_code = metrics.is_forward and metrics.fail_type is None and None not in (name, file, line)
            if is_code and (metrics.start_time_us or 0) >= since:
                self._ran = True
                self._compiled(name, file, line)

    def _compiled(self, name: str, file: str, line: int) -> None:
        modules = self._forwards.get((file, line), ())
        if len(modules) == 1:
            self._report_inside(*modules)
        elif file.startswith("<eval_with_key>"):  # code that torch has written itself
            self._report_backward()
        elif file.startswith(_OPTIMIZERS) and name == "step":
            self._report_optimizer()
        elif modules or name.startswith("torch_dynamo_resume_in_") or _is_internal(file):
            return  # `was_called` tells which; or it is the rest of another function, or one that it calls
        else:
            self._report_function(name, file, line)

    def _report_optimizer(self) -> None:
        self._engine.missed("what happens inside a step of an optimizer", "torch.compile runs it as one graph")

    def _report_backward(self) -> None:
        self._engine.missed("the gradients of a backward pass", "compiled autograd runs it as one graph")

    def _report_inside(self, site: str) -> None:
        self._reported.add(site)
        self._engine.missed(f"calls inside {site}", AS_ONE)

    def _report_function(self, name: str, file: str, line: int) -> None:
        self._functions_ran = True
        self._engine.missed(f"calls inside the compiled function {name} ({Path(file).name}:{line})", AS_ONE)

    def failed(self, error: Exception) -> None:
        self._engine.failed("what torch.compile has compiled", error)


def is_compiled_graph(module: nn.Module, frame: FrameType | None) -> bool:
    """Whether it is a graph that torch.compile has generated, rather than a module of the program. `frame` calls it."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    while frame is not None and frame.f_code.co_filename.startswith(_CALLERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_COMPILERS)


def _is_internal(file: str) -> bool:
    """Whether a file is part of torch or of Python itself."""
    return file.startswith(TORCH) or (file.startswith(_PYTHON) and "-packages" not in file)


def _module_of(function: Any) -> nn.Module | None:
    """The module whose call was passed to torch.compile; None when that was a function of the user's."""
    inner = function
    while not isinstance(inner, nn.Module) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    module = inner if isinstance(inner, nn.Module) else getattr(inner, "__self__", None)
    is_call = module is inner or getattr(inner, "__name__", "") in ("_call_impl", "_wrapped_call_impl")
    return module if isinstance(module, nn.Module) and is_call else None


@never_compiled
def _guards_passed(hit: bool) -> bool:
    """Called by dynamo before it runs compiled code. Returns its own answer unchanged."""
    if hit:
        caller = sys._getframe(1)
        for watch in list(CompiledCodeWatch._active):
            try:
                watch.before_compiled_call(caller)
            except Exception as error:  # noqa: BLE001, PERF203 - the user's program must not fail because we did
                watch.failed(error)
    previous = CompiledCodeWatch._previous_hook
    return hit if previous is None else bool(previous(hit))
