"""`astray check`: runs an unchanged script, and says where its NaN and infinity come from."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import TYPE_CHECKING, Any

from astray.capture.config_file import settings_in
from astray.capture.settings import RecordingOptions, Settings, with_absolute_paths
from astray.cli.program import (
    Outcome,
    TripPrinter,
    add_program,
    add_what,
    add_which,
    load_program,
    look_hint,
    run_program,
    settings_of,
)
from astray.formatting.terminal import COULD_NOT, print_note
from astray.process import absolute, rank_and_world_size

if TYPE_CHECKING:
    from astray.guarding.guard import Guard

LEVEL = "function"
"""The level that names the line. Modules alone are cheaper, and name the module in whose code it is."""
REMEMBER = 5
MEMORY = "512MiB"
FOUND = 1
"""The exit code when a guard has tripped."""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="run a script, unchanged, and name the call that NaN or infinity come from",
        description="Runs a Python script as `python` would, and looks at what its models compute. When NaN or "
        "infinity reach a result, a gradient or a weight, it says which call they come from, and writes the last steps "
        "as a run. `astray help guard` has more.",
        epilog="Exit codes: 1 if something was found, 2 if the script could not be checked, else the script's own.",
        usage="astray check [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
    )
    parser.add_argument(
        "--on", choices=("raise", "warn"), default="raise", help="whether to stop there, or go on (default raise)"
    )
    parser.add_argument(
        "--gradients",
        choices=("parameters", "all"),
        help="which are read while nothing is wrong: with modules alone those of parameters, else all (default)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="stop at the very call, and keep the tensors; slow, for looking closer"
    )
    parser.add_argument(
        "--spike", type=float, metavar="X", help="also when a loss or the norm of all gradients is X times the usual"
    )
    parser.add_argument(
        "--remember",
        type=int,
        default=REMEMBER,
        metavar="N",
        help=f"how many steps are kept, and written when something is found (default {REMEMBER})",
    )
    parser.add_argument(
        "--max-memory", default=MEMORY, metavar="SIZE", help=f"what these steps may take (default {MEMORY})"
    )
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="where they are written (default: a new folder in astray-guard)"
    )
    add_program(parser)
    add_what(parser, level=LEVEL)
    add_which(parser)
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    settings = _settings(options)
    _check_options(options, settings)
    program = load_program(options)
    guard = _ScriptGuard(options, settings)
    return guard.finish(run_program(program, options, guard.start, guard.is_ours))


def _settings(options: argparse.Namespace) -> RecordingOptions:
    settings = settings_of(options)
    if options.level is None and (options.config is None or "level" not in settings_in(options.config)):
        settings["level"] = LEVEL
    return settings


def _check_options(options: argparse.Namespace, settings: RecordingOptions) -> None:
    """Raises before the script runs, not in the middle of it, if an option is wrong."""
    from astray.guarding.options import check_guard, check_has_statistics
    from astray.guarding.trip import SnapshotFolder

    check_guard(options.on, options.gradients, options.exact, options.remember, options.spike, None, options.max_memory)
    check_has_statistics(Settings.check(**settings))
    SnapshotFolder(options.output, *rank_and_world_size(os.environ))


class _ScriptGuard:
    """The guard of this command, which starts in the middle of the script's imports."""

    def __init__(self, options: argparse.Namespace, settings: RecordingOptions) -> None:
        self._options = options
        self._settings = with_absolute_paths(settings)
        self._path = None if options.output is None else absolute(options.output)
        self._process = os.getpid()
        self._guard: Guard | None = None
        self._printer = TripPrinter(may_stop=options.on == "raise")

    def start(self, framework: str) -> None:
        """The script has imported a framework. Of several, that of the first module that is called is watched."""
        if self._guard is None:
            self._watch(framework)
        else:
            from astray.capture.imports import after_first_call

            after_first_call(framework, lambda _: self._take_over(framework))

    def _watch(self, framework: str) -> Guard:
        from astray.capture.adapters import discovering_adapter
        from astray.guarding.guard import Guard

        options = self._options
        guard = self._guard = Guard.of_program(
            discovering_adapter(framework),
            on="raise" if options.exact else self._printer,
            gradients=options.gradients,
            exact=options.exact,
            remember=options.remember,
            path=self._path,
            spike=options.spike,
            max_memory=options.max_memory,
            **self._settings,
        )
        return guard.start()

    def _take_over(self, framework: str) -> Guard | None:
        """A module of a framework is called that was not the first to be imported."""
        guard = self._guard
        if guard is None or os.getpid() != self._process or not guard.is_untouched:
            return None
        guard.stop()
        return self._watch(framework)

    def is_ours(self, error: BaseException) -> bool:
        """Whether this guard has stopped the script, and not one that the script made itself."""
        if self._guard is None:
            return False
        from astray.guarding.exact import ExactStop
        from astray.guarding.trip import Tripped

        return isinstance(error, ExactStop) or (isinstance(error, Tripped) and error.trip in self._guard.trips)

    def finish(self, outcome: Outcome) -> int:
        """Ends the guard, prints its summary, and returns the exit code."""
        guard, self._printer.may_stop = self._guard, False
        if os.getpid() != self._process:  # a child that the script forked and let run to the end
            return outcome.code
        if guard is None:
            from astray.capture.imports import SHOWN

            print_note(f"astray check: nothing was watched, since {self._options.script} never imported {SHOWN}.")
            return COULD_NOT
        self._end(guard, outcome.error)
        is_distributed = rank_and_world_size(os.environ)[1] > 1
        name = f"astray check, rank {guard.rank}" if is_distributed else "astray check"
        print_note(f"{name}: {guard.summary}.{look_hint(guard.trips)}")
        if guard.trips:
            return FOUND
        saw_nothing = guard.unwatched is not None and guard.rank in Settings.check(**self._settings).ranks
        return outcome.code or (COULD_NOT if saw_nothing else 0)

    def _end(self, guard: Guard, error: BaseException | None) -> None:
        from astray.guarding.trip import Tripped

        with contextlib.suppress(Tripped):  # by an exact guard, when the script has caught the first one
            guard.stop() if error is None else guard.stop_after(error)
        self._printer.print_rest(guard.trips)
