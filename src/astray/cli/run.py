"""`astray run`: records a script that knows nothing of astray.

Nothing heavy is imported before the script does so itself: a script may set environment variables first, and its
framework must see them. Recording starts the moment the framework has been imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

from astray.capture.settings import KEEPS, LEVELS, OPTIMIZER, PHASES, ROLES, Given, Settings
from astray.errors import AstrayError, UsageError

if TYPE_CHECKING:
    from astray.capture.recorder import Recorder

FRAMEWORK = "torch"


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="record a script, unchanged",
        description="Runs a Python script as `python` would, and records the calls of its models. The outermost "
        "modules are found by themselves; a step ends at each optimizer.step(), of the first optimizer if there are "
        "several. docs/recording.md explains every setting with examples.",
        usage="astray run -o RUN [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
    )
    parser.add_argument("-o", "--output", required=True, metavar="RUN", help="the folder to record into")
    parser.add_argument("--force", action="store_true", help="replace a run that is there already")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the script gets as its own"
    )
    _add_settings(parser)
    parser.set_defaults(main=main)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """An option for each setting. None of them has a default here: what is not given is left to the file, or to
    `Settings`."""
    usual = Settings()
    what = parser.add_argument_group("what is recorded", "WORDS are one or more of those named, with commas.")
    what.add_argument("--config", metavar="FILE", help="a YAML, JSON or TOML file of settings; options win over it")
    what.add_argument("--level", metavar="WORDS", help=f"{', '.join(LEVELS)} (default {', '.join(usual.level)})")
    what.add_argument("--keep", metavar="WORDS", help=f"{', '.join(KEEPS)} (default {', '.join(usual.keep)})")
    what.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"how many values --keep sample keeps of a tensor (default {usual.samples:,})",
    )
    what.add_argument("--slice", metavar="PART", help="keep only the values of this part, such as '0:1, ..., :64'")
    what.add_argument(
        "--optimizer", metavar="WORDS", help=f"of each parameter after an update: {', '.join(OPTIMIZER)} (default none)"
    )
    what.add_argument("--compiled", metavar="WORDS", help="what is seen inside compiled code: modules (default none)")
    what.add_argument(
        "--perturb",
        nargs="?",
        type=int,
        metavar="SEED",
        help="change the model's inputs by roundings, for `astray compare --noise`; a seed (default 0) comes behind an "
        "equals sign",
    )
    _let_the_script_follow(parser, "--perturb", "--perturb=0")

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

    limits = parser.add_argument_group("how much at most", "What is beyond is counted, and listed in the run.")
    limits.add_argument("--max-tensors", type=int, metavar="N", help="so many tensors in all")
    limits.add_argument("--max-tensors-per-step", type=int, metavar="N", help="so many tensors in each step")
    limits.add_argument("--max-bytes", metavar="SIZE", help="so many bytes of values in all, such as 2GB or 500MiB")
    limits.add_argument(
        "--queue-bytes",
        metavar="SIZE",
        help=f"what may wait for the disk before the program does (default {usual.queue_bytes >> 20} MiB)",
    )


def _let_the_script_follow(parser: argparse.ArgumentParser, bare: str, meant: str) -> None:
    """Has an option take a value behind an equals sign alone. Else argparse would take the next word: the script."""
    parse = parser._parse_optional
    vars(parser)["_parse_optional"] = lambda word: parse(meant if word == bare else word)


def _given(options: argparse.Namespace) -> Given:
    """The settings among the options; None for each that is not given."""
    return cast(Given, {name: getattr(options, name) for name in Given.__optional_keys__})


def main(options: argparse.Namespace) -> int:
    from astray.capture.on_import import OnImport

    _refuse(options)
    program = _module(options) if options.module else _script(options)
    recording = _Recording(options)
    watch = OnImport(FRAMEWORK, recording.start).install()
    sys.argv = [options.script, *options.arguments]
    try:
        code, ended = _outcome(program)
    except _CannotRecordError as refused:
        raise refused.reason from None
    finally:
        watch.remove()
    return recording.finish(ended) or code


def _refuse(options: argparse.Namespace) -> None:
    """Says before the script runs, not in the middle of it, that a setting is wrong or the folder is taken."""
    from astray.capture.ranks import rank_and_world_size

    Settings.check(**_given(options))
    # Looking into a folder loads numpy, which a script that is about to run should do itself. So look only where
    # something is there, and leave the other ranks, which may find what rank 0 has just made, to the recorder.
    folder = Path(options.output)
    if folder.exists() and rank_and_world_size(os.environ)[0] == 0 and (folder.is_file() or any(folder.iterdir())):
        from astray.store.native.folder import refuse

        refuse(folder, 0, overwrite=options.force)


class _CannotRecordError(BaseException):
    """Leaves the script, from the middle of its imports; no exception that a script would think of catching."""

    def __init__(self, reason: AstrayError) -> None:
        self.reason = reason


class _Recording:
    """The recorder of this command, which starts in the middle of the script's imports."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._process = os.getpid()
        self._recorder: Recorder | None = None

    def start(self) -> None:
        from astray.capture.adapters import discovering_adapter
        from astray.capture.recorder import Recorder

        options = self._options
        recorder = Recorder.discovering(
            options.output,
            discovering_adapter(FRAMEWORK),
            overwrite=options.force,
            **_given(options),
        )
        try:
            self._recorder = recorder.start()
        except AstrayError as error:
            raise _CannotRecordError(error) from None

    def finish(self, ended: str) -> int:
        """Closes the run and says in one line what it holds."""
        if os.getpid() != self._process:  # a child that the script forked and let run to the end
            return 0
        if self._recorder is None:
            print(
                f"astray run: nothing was recorded, since {self._options.script} never imported {FRAMEWORK}.",
                file=sys.stderr,
            )
            return 2
        self._recorder.stop(ended)
        print(f"astray: {self._recorder.summary()}", file=sys.stderr)
        return 0


def _script(options: argparse.Namespace) -> Callable[[], None]:
    path = Path(options.script)
    if not path.is_file():
        raise UsageError(f"There is no script {options.script}. Give the path of a Python file, or -m and a module.")
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{options.script} is not a Python script: {error}.") from None
    return lambda: _execute(code, path)


def _execute(code: CodeType, path: Path) -> None:
    """As `python SCRIPT` does: a new `__main__`, and the script's folder first on the path."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    sys.path[0] = str(path.resolve().parent)
    exec(code, module.__dict__)


def _module(options: argparse.Namespace) -> Callable[[], None]:
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as `python -m` does
    try:
        found = importlib.util.find_spec(options.script)
    except (ImportError, ValueError):  # of a package in front of it
        found = None
    if found is None:
        raise UsageError(f"There is no module {options.script}. It is looked for here and where Python looks.")
    return lambda: _discard(runpy.run_module(options.script, run_name="__main__", alter_sys=True))


def _discard(_: object) -> None:
    return None


def _outcome(program: Callable[[], None]) -> tuple[int, str]:
    """Runs the program; its exit code, and how it ended in words."""
    try:
        program()
    except SystemExit as request:
        return _exit_code(request.code), "normally" if not request.code else f"exit: {request.code}"
    except KeyboardInterrupt:
        return 130, "interrupted from the keyboard"
    except _CannotRecordError:
        raise
    except BaseException as error:  # noqa: BLE001 - reported just as Python would, below
        error.__traceback__ = _users_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1, f"{type(error).__name__}: {error}"
    return 0, "normally"


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead from this command to the script."""
    here = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in here:
        traceback = traceback.tb_next
    return traceback
