"""A script that knows nothing of astray, run as `python` would run it: what `astray run` and `astray check` share.

Nothing heavy is imported before the script does so itself: a script may set environment variables first, and its
framework must see them. What watches it starts the moment the framework has been imported; what it finds is printed to
stderr at once (`TripPrinter`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

from astray.errors import AstrayError, UsageError
from astray.formatting.terminal import tell
from astray.process import absolute

if TYPE_CHECKING:
    from astray.guarding.trip import Trip


FRAMEWORK = "torch"

Program = Callable[[], None]


class Outcome(NamedTuple):
    """How a program ended: its exit code, the same in words, and the exception that ended it, if one did."""

    code: int
    ended: str
    error: BaseException | None = None


def add_program(parser: argparse.ArgumentParser) -> None:
    """The script and its arguments, behind all options of ours."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the script gets as its own"
    )
    rest.required = False  # else argparse asks for it, too, where there is no script


def load_program(options: argparse.Namespace) -> Program:
    """Finds the script or module. Raises a UsageError before anything runs if there is none, or it is not Python."""
    if (instead := instead_of_launcher(options)) is not None:
        raise UsageError(instead)
    return _module(options.script) if options.module else _script(options.script)


LAUNCHERS = {
    "torchrun": "-m", "torch.distributed.run": "-m", "torch.distributed.launch": "-m", "accelerate": "-m",
    "deepspeed": "--module", "mpirun": "python -m", "srun": "python -m",
}  # fmt: skip
"""Programs that start Python themselves, and the option by which each starts a module, here astray."""


def instead_of_launcher(options: argparse.Namespace) -> str | None:
    """The right command, in a sentence, where a launcher was given as the script."""
    name = options.script if options.module else Path(options.script).name
    is_python = not options.module and re.fullmatch(r"python[\d.]*", name) is not None
    if is_python and options.arguments[:1] == ["-m"] and options.arguments[1:2] and options.arguments[1] in LAUNCHERS:
        started = {"script": options.arguments[1], "module": True, "arguments": options.arguments[2:]}
        return instead_of_launcher(argparse.Namespace(**vars(options) | started))
    if not is_python and (name not in LAUNCHERS or (not options.module and Path(options.script).suffix == ".py")):
        return None
    words = list(options.arguments)
    at = next((i for i, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module")), len(words))
    own, program = words[:at], words[at:] or ["SCRIPT"]
    astray = f"astray {options.command} [options]" + (" -o RUN" if options.command == "run" else "")
    if is_python:
        return f"{options.script} runs scripts, and so does astray. Say: {' '.join([astray, *program])}"
    launcher = f"python -m {name}" if options.module else options.script
    command = " ".join([launcher, *own, LAUNCHERS[name], astray, *program])
    return f"{options.script} starts the processes, and each of them has to start astray. Say: {command}"


def run_program(
    program: Program,
    options: argparse.Namespace,
    start: Callable[[], None],
    is_ours: Callable[[BaseException], bool] = lambda _: False,
) -> Outcome:
    """Runs the program, and calls `start` as soon as it has imported its framework.

    An exception that ends it is shown as Python would show it, without the frames in front of the script's; one that
    is ours is left to the caller. If `start` raises an AstrayError, that ends the program and is raised from here.
    """
    from astray.capture.children import ImportHook

    watch = ImportHook(FRAMEWORK, lambda: _starting(start)).install()
    sys.argv = [options.script, *options.arguments]
    try:
        return _outcome(program, is_ours)
    except _StartError as refused:
        raise refused.reason from None
    finally:
        watch.remove()


class _StartError(BaseException):
    """Leaves the script from the middle of its imports; a BaseException, so that scripts do not catch it."""

    def __init__(self, reason: AstrayError) -> None:
        self.reason = reason


def _starting(start: Callable[[], None]) -> None:
    try:
        start()
    except AstrayError as error:
        raise _StartError(error) from None


def _script(name: str) -> Program:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"There is no script {name}. Give the path of a Python file, or -m and a module.")
    try:
        code = compile(path.read_bytes(), str(absolute(path)), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{name} is not a Python script: {error}.") from None
    return lambda: _execute(code, path)


def _execute(code: CodeType, path: Path) -> None:
    """As `python SCRIPT` does: a new `__main__`, and the script's folder first on the path."""
    module = ModuleType("__main__")
    module.__file__ = str(absolute(path))
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.path[0] = str(path.resolve().parent)
    exec(code, module.__dict__)


def _module(name: str) -> Program:
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package in front of it
        found = None
    if found is None:
        raise UsageError(f"There is no module {name}. It is looked for here and where Python looks.")
    return lambda: _discard(runpy.run_module(name, run_name="__main__", alter_sys=True))


def _discard(_: object) -> None:
    return None


def _outcome(program: Program, is_ours: Callable[[BaseException], bool]) -> Outcome:
    try:
        program()
    except SystemExit as request:
        return Outcome(_exit_code(request.code), "normally" if not request.code else f"exit: {request.code}")
    except KeyboardInterrupt:
        return Outcome(130, "interrupted from the keyboard")
    except _StartError:
        raise
    except BaseException as error:  # noqa: BLE001 - reported just as Python would, below
        if not is_ours(error):
            _leave_out_ours(error)
            sys.excepthook(type(error), error, error.__traceback__)
        return Outcome(1, f"{type(error).__name__}: {error}", error)
    return Outcome(0, "normally")


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _leave_out_ours(error: BaseException) -> None:
    """Removes our frames from the tracebacks of an exception, its causes and its contexts."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _users_part(one.__traceback__)
            if isinstance(one, AstrayError):  # its text says all; our frames add nothing
                _cut_behind(one.__traceback__)
            left += [one.__cause__, one.__context__]


def _cut_behind(traceback: TracebackType | None) -> None:
    """Ends a traceback at the last frame that is not of this package."""
    package, last = str(Path(__file__).parents[1]), None
    frame = traceback
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(package):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead from this command to the script."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in here:
        traceback = traceback.tb_next
    return traceback


# -- what a guard has found in the script ------------------------------------------------------------------------------


_SETTING = re.compile(r"\b(level|keep)='(\w+)'")


class TripPrinter:
    """Prints each trip. Stops the script at the first one, if it `may_stop` it."""

    def __init__(self, may_stop: bool) -> None:
        self.may_stop = may_stop
        self._told: list[Trip] = []

    def __call__(self, trip: Trip) -> None:
        """Prints it at once, since the script may take its time to end."""
        from astray.guarding.trip import Tripped

        self._told.append(trip)
        if self.may_stop and trip.what != "signal":  # which ends it anyway
            self.may_stop = False  # a script that catches it goes on
            tell(f"{in_options(trip.text)}\n")  # where to look closer is said at the end
            raise Tripped(trip)
        tell(f"{in_options(str(trip))}\n")

    def tell_rest(self, trips: Iterable[Trip]) -> None:
        """Prints the trips that were not printed because the script was stopped before."""
        for trip in trips:
            if trip not in self._told:
                self._told.append(trip)
                tell(f"{in_options(trip.text)}\n")


def look_closer(trips: Iterable[Trip]) -> str:
    """The command that shows more, to be appended to a line; empty when there is nothing to show."""
    return next((f" Look closer: {trip.look}" for trip in trips if trip.look is not None), "")


def in_options(text: str) -> str:
    """A text that advises a setting of a recording, with that setting as a command line option.

    >>> in_options("Record the same step with level='function' to see which line.")
    'Record the same step with --level function to see which line.'
    """
    return _SETTING.sub(r"--\1 \2", text)
