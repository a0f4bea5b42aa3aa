"""An unchanged script, run as `python` would run it: what `astray run` and `astray check` share, with their options.

Nothing heavy is imported before the script does so itself: a script may set environment variables first, and its
framework must see them. The recorder or guard starts the moment the framework has been imported; trips are printed to
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
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, cast

from astray.capture.children import LastStep
from astray.capture.settings import KEEPS, LEVELS, OPTIMIZER, PHASES, ROLES, RecordingOptions, Settings
from astray.errors import AstrayError, UsageError
from astray.formatting.terminal import print_note
from astray.process import absolute

if TYPE_CHECKING:
    from astray.guarding.trip import Trip


Program = Callable[[], None]


class Outcome(NamedTuple):
    """How a program ended: its exit code, the same in words, and the exception that ended it, if one did."""

    code: int
    ended: str
    error: BaseException | None = None


def add_program(parser: argparse.ArgumentParser) -> None:
    """The script and its arguments, after all options of astray."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the script gets as its own"
    )
    rest.required = False  # else argparse demands it, too, where there is no script


def load_program(options: argparse.Namespace) -> Program:
    """Finds the script or module. Raises a UsageError before anything runs if there is none, or it is not Python."""
    if (hint := launcher_hint(options)) is not None:
        raise UsageError(hint)
    return _module(options.script) if options.module else _script(options.script)


LAUNCHERS = {
    "torchrun": "-m astray", "torch.distributed.run": "-m astray", "torch.distributed.launch": "-m astray",
    "accelerate": "-m astray", "deepspeed": "--module astray", "mpirun": "python -m astray",
    "srun": "python -m astray", "paddle.distributed.launch": "$(command -v astray)",
}  # fmt: skip
"""Programs that start Python themselves, and how each starts astray. That of Paddle takes the path of a command."""


class Launched(NamedTuple):
    """A command line that begins with a launcher: its words, those that make it start astray, and the program."""

    launcher: list[str]
    astray: list[str]
    program: list[str]


def launched(script: str, module: bool, arguments: list[str], python: str = "python") -> Launched | None:
    """The parts of a command line whose script is a launcher, or Python itself, whose `astray` is empty; else None.

    python: what starts a launcher that is a module.
    """
    name = script if module else Path(script).name
    is_python = not module and re.fullmatch(r"python[\d.]*", name) is not None
    if is_python and arguments[:1] == ["-m"] and arguments[1:2] and arguments[1] in LAUNCHERS:
        return launched(arguments[1], True, arguments[2:], script)
    if not is_python and (name not in LAUNCHERS or (not module and Path(script).suffix == ".py")):
        return None
    at = next(
        (i for i, word in enumerate(arguments) if word.endswith(".py") or word in ("-m", "--module")), len(arguments)
    )
    own, program = arguments[:at], arguments[at:]
    first = [python, "-m", name] if module else [script]
    return Launched([*first, *own], [] if is_python else LAUNCHERS[name].split(), program)


def launcher_hint(options: argparse.Namespace) -> str | None:
    """The right command, in a sentence, where a launcher was given as the script."""
    parts = launched(options.script, options.module, list(options.arguments))
    if parts is None:
        return None
    program = parts.program or ["SCRIPT"]
    asked = f"{options.command} [options]" + (" -o RUN" if options.command == "run" else "")
    if not parts.astray:
        return f"{options.script} runs scripts, and so does astray. Say: {' '.join(['astray', asked, *program])}"
    command = " ".join([*parts.launcher, *parts.astray, asked, *program])
    return f"{options.script} starts the processes, and each of them has to start astray. Say: {command}"


def run_program(
    program: Program,
    options: argparse.Namespace,
    start: Callable[[str], None],
    is_ours: Callable[[BaseException], bool] = lambda _: False,
) -> Outcome:
    """Runs the program, and calls `start` with each framework as soon as the program has imported it.

    An exception that ends it is printed as Python would print it, without the frames before the script's. One that
    `is_ours` is not printed. If `start` raises an AstrayError, that ends the program and is raised from here.
    """
    from astray.capture.imports import FRAMEWORKS, ImportHook

    hooks = [ImportHook(framework, partial(_starting, start, framework)).install() for framework in FRAMEWORKS]
    sys.argv = [options.script, *options.arguments]
    try:
        return _outcome(program, is_ours)
    except _StartError as refused:
        raise refused.reason from None
    finally:
        for hook in hooks:
            hook.remove()


class _StartError(BaseException):
    """Ends the script in the middle of its imports; a BaseException, so that `except Exception` does not catch it."""

    def __init__(self, reason: AstrayError) -> None:
        self.reason = reason


def _starting(start: Callable[[str], None], framework: str) -> None:
    try:
        start(framework)
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
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # raised by its parent package
        spec = None
    if spec is None:
        raise UsageError(f"There is no module {name}. It is looked for here and where Python looks.")
    return lambda: _discard(runpy.run_module(name, run_name="__main__", alter_sys=True))


def _discard(_: object) -> None:
    return None


def _outcome(program: Program, is_ours: Callable[[BaseException], bool]) -> Outcome:
    try:
        program()
    except LastStep:
        return Outcome(0, "normally")
    except SystemExit as request:
        return Outcome(_exit_code(request.code), "normally" if not request.code else f"exit: {request.code}")
    except KeyboardInterrupt:
        return Outcome(130, "interrupted from the keyboard")
    except _StartError:
        raise
    except BaseException as error:  # noqa: BLE001 - reported just as Python would, below
        if not is_ours(error):
            _remove_our_frames(error)
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


def _remove_our_frames(error: BaseException) -> None:
    """Removes our frames from the tracebacks of an exception, its causes and its contexts."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = _users_part(current.__traceback__)
            if isinstance(current, AstrayError):  # its text says all; our frames add nothing
                _cut_after_user_code(current.__traceback__)
            pending += [current.__cause__, current.__context__]


def _cut_after_user_code(traceback: TracebackType | None) -> None:
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
    launching = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in launching:
        traceback = traceback.tb_next
    return traceback


# -- trips of a guard --------------------------------------------------------------------------------------------------


_SETTING = re.compile(r"\b(level|keep)='(\w+)'")


class TripPrinter:
    """Prints each trip. Stops the script at the first one, if it `may_stop` it."""

    def __init__(self, may_stop: bool) -> None:
        self.may_stop = may_stop
        self._printed: list[Trip] = []

    def __call__(self, trip: Trip) -> None:
        """Prints it at once, since the script may take a while to end."""
        from astray.guarding.trip import Tripped

        self._printed.append(trip)
        if self.may_stop and trip.what != "signal":  # which ends it anyway
            self.may_stop = False  # only once: a script that catches it goes on
            print_note(f"{as_options(trip.text)}\n")  # where to look closer is printed at the end
            raise Tripped(trip)
        print_note(f"{as_options(str(trip))}\n")

    def print_rest(self, trips: Iterable[Trip]) -> None:
        """Prints the trips that were not printed because the script was stopped before."""
        for trip in trips:
            if trip not in self._printed:
                self._printed.append(trip)
                print_note(f"{as_options(trip.text)}\n")


def look_hint(trips: Iterable[Trip]) -> str:
    """The command that shows more, to be appended to a line; empty when there is nothing to show."""
    return next((f" Look closer: {trip.look}" for trip in trips if trip.look is not None), "")


def as_options(text: str) -> str:
    """The text with the settings of a recording that it advises as command line options.

    >>> as_options("Record the same step with level='function' to see which line.")
    'Record the same step with --level function to see which line.'
    """
    return _SETTING.sub(r"--\1 \2", text)


# -- the settings of a recording as options ----------------------------------------------------------------------------
# None of them has a default here: what is not given is left to the file of `--config`, or to `Settings`.


DEFAULTS = Settings()


def add_what(parser: argparse.ArgumentParser, level: str = ", ".join(DEFAULTS.level)) -> argparse._ArgumentGroup:
    """Options for what is recorded. level: the default that the help text names."""
    what = parser.add_argument_group("what is recorded", "WORDS are one or more of those named, with commas.")
    what.add_argument("--config", metavar="FILE", help="a YAML, JSON or TOML file of settings; options win over it")
    what.add_argument("--level", metavar="WORDS", help=f"{', '.join(LEVELS)} (default {level})")
    what.add_argument("--keep", metavar="WORDS", help=f"{', '.join(KEEPS)} (default {', '.join(DEFAULTS.keep)})")
    what.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"how many values --keep sample keeps of a tensor (default {DEFAULTS.samples:,})",
    )
    what.add_argument("--slice", metavar="PART", help="keep only the values of this part, such as '0:1, ..., :64'")
    what.add_argument(
        "--optimizer",
        metavar="WORDS",
        help=f"of each update, by parameter: {', '.join(OPTIMIZER[:-1])}; calls: its functions and ops (default none)",
    )
    what.add_argument("--compiled", metavar="WORDS", help="what is seen inside compiled code: modules (default none)")
    return what


def add_which(parser: argparse.ArgumentParser) -> None:
    """Options for which part of it."""
    which = parser.add_argument_group("which part of it", "Everything, unless one of these says otherwise.")
    which.add_argument("--steps", metavar="B:E:S", help="only these steps, such as 0:10:2 or 3,7")
    which.add_argument("--ranks", metavar="B:E:S", help="only these ranks, in the same way")
    which.add_argument(
        "--match", action="append", metavar="REGEX", help="only sites in whose name it is found; may be given again"
    )
    which.add_argument("--ignore", action="append", metavar="REGEX", help="no such sites; wins over --match")
    which.add_argument("--classes", metavar="NAMES", help="only these classes or functions, with commas")
    which.add_argument(
        "--scope",
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="only what runs from the start of one site to the end of the other",
    )
    which.add_argument("--phases", metavar="WORDS", help=", ".join(PHASES))
    which.add_argument("--roles", metavar="WORDS", help=", ".join(ROLES))
    which.add_argument("--functions", metavar="FILE", help="a YAML file with your own list of functions, by category")


def add_limits(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Options for how much of it at most."""
    limits = parser.add_argument_group("how much at most", "What is beyond is counted, and listed in the run.")
    limits.add_argument("--max-tensors", type=int, metavar="N", help="so many tensors in all")
    limits.add_argument("--max-tensors-per-step", type=int, metavar="N", help="so many tensors in each step")
    limits.add_argument("--max-bytes", metavar="SIZE", help="so many bytes of values in all, such as 2GB or 500MiB")
    limits.add_argument(
        "--queue-bytes",
        metavar="SIZE",
        help=f"what may wait for the disk before the program does (default {DEFAULTS.queue_bytes >> 20} MiB)",
    )
    return limits


def settings_of(options: argparse.Namespace) -> RecordingOptions:
    """The settings among the options; None for each that is not given, or that the command does not have."""
    return cast(RecordingOptions, {name: getattr(options, name, None) for name in RecordingOptions.__optional_keys__})
