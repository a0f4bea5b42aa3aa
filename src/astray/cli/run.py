"""`astray run`: records an unchanged script."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.graft_words import Graft
from astray.capture.pytorch.experiments.swap_words import read_option
from astray.capture.settings import Settings, with_absolute_paths
from astray.cli.program import (
    Outcome,
    TripPrinter,
    add_limits,
    add_program,
    add_what,
    add_which,
    load_program,
    look_hint,
    run_program,
    settings_of,
)
from astray.errors import UsageError
from astray.formatting.terminal import print_note
from astray.process import absolute, relative_to_cwd
from astray.wording import counted

if TYPE_CHECKING:
    from astray.capture.children import ChildProcesses, Note
    from astray.capture.pytorch.experiments.program_swaps import ProgramSwaps
    from astray.recorder import Recorder

_CHILD_STARTUP = Path(__file__).parent / "child_startup"
_MOST_REASONS = 3
"""The most child processes of which it is printed why they were not recorded."""


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="record a script, unchanged",
        description="Runs a Python script as `python` would, and records the calls of its models. The outermost "
        "modules are found by themselves; a step ends at each optimizer.step(), of the first optimizer if there are "
        "several. `astray help settings` explains every setting with examples.",
        usage="astray run [-o RUN] [options] (SCRIPT | -m MODULE) [ARGUMENTS ...]",
    )
    parser.add_argument(
        "-o", "--output", metavar="RUN", help="the folder to record into (default: a new one, runs/SCRIPT-N)"
    )
    parser.add_argument("--force", action="store_true", help="replace a run that is there already")
    add_program(parser)
    what = add_what(parser)
    what.add_argument(
        "--perturb",
        nargs="?",
        type=int,
        metavar="SEED",
        help="change the model's inputs by roundings, for `astray compare --noise`; --perturb=SEED "
        "sets the seed (default 0)",
    )
    _require_equals_sign(parser, "--perturb", "--perturb=0")
    what.add_argument(
        "--swap",
        action="append",
        metavar="WHAT=TO",
        help="run a module, function or callable on another device (cpu), in another dtype (float64; cpu,float64), "
        "uncompiled (eager) or as another callable (mypkg.fixes.softmax); may be given again: astray help experiments",
    )
    what.add_argument(
        "--graft",
        action="append",
        metavar="RUN:SITE",
        help="put what RUN recorded of a site in the place of what the program computes there: its results, or "
        "SITE@inputs, @parameters, @gradients; may be given again: astray help experiments",
    )
    what.add_argument(
        "--single-step",
        action="append",
        metavar="RUN",
        help="give every call the inputs and parameters that RUN recorded, so that each is judged alone",
    )
    _add_guard(parser)
    add_which(parser)
    add_limits(parser).add_argument(
        "--until", type=int, metavar="STEP", help="end the program after this step; steps are counted from 0"
    )
    parser.set_defaults(main=main, own_options=tuple(parser._option_string_actions))


def _add_guard(parser: argparse.ArgumentParser) -> None:
    watched = parser.add_argument_group("what is watched", "`astray help guard` has more. It needs statistics.")
    watched.add_argument(
        "--guard",
        nargs="?",
        choices=("raise", "warn"),
        metavar="HOW",
        help="also say which call NaN or infinity come from, and stop there; --guard=warn reports and continues",
    )
    watched.add_argument(
        "--spike",
        type=float,
        metavar="X",
        help="with --guard, also when a loss or the norm of all gradients is X times the usual",
    )
    _require_equals_sign(parser, "--guard", "--guard=raise")


def _require_equals_sign(parser: argparse.ArgumentParser, option: str, default: str) -> None:
    """Lets an option have a value only after an equals sign. Else argparse would take the next word: the script."""
    parse = parser._parse_optional
    vars(parser)["_parse_optional"] = lambda word: parse(default if word == option else word)


def main(options: argparse.Namespace) -> int:
    program = load_program(options)
    options.graft = _grafts(options)
    if options.output is None:
        _choose_folder(options)
    _check_options(options)
    recording = _ScriptRecording(options)
    with recording.recording_children():
        outcome = run_program(program, options, recording.start, recording.is_ours)
    if outcome.code:
        _print_misplaced_hint(options)
    return recording.finish(outcome) or outcome.code


def _grafts(options: argparse.Namespace) -> list[str] | None:
    """All grafts that the options ask for; None without any, so that those of `--config` hold."""
    for run in options.single_step or ():
        if not Graft.read(run).is_single_step:
            raise UsageError(
                f"--single-step {run} is not a run alone. For one site, say --graft {run}@inputs,parameters."
            )
    texts = [*(options.graft or ()), *(options.single_step or ())]
    for text in texts:
        run = Graft.read(text).run
        if not Path(run).exists():
            raise UsageError(f"{run} does not exist, from which {text} is to be grafted. Give the folder of a run.")
    return texts or None


def _choose_folder(options: argparse.Namespace) -> None:
    """Records into the first of runs/SCRIPT-1, runs/SCRIPT-2, … that is not there, and says so."""
    from astray.process import rank_and_world_size

    if rank_and_world_size(os.environ)[1] > 1:
        raise UsageError("Give -o RUN: the ranks of a distributed program all record into one folder.")
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    folder = next(path for path in (Path("runs") / f"{name}-{n}" for n in itertools.count(1)) if not path.exists())
    options.output = str(folder)
    misplaced = [word for word in _misplaced(options) if word in ("-o", "--output")]
    why = f" {_misplaced_hint(misplaced[0], options)}" if misplaced else ""
    print_note(f"astray: recording into {folder}.{why}")


def _misplaced(options: argparse.Namespace) -> list[str]:
    """Options behind the script that are written like ours. The program may have options of the same names."""
    return [word for word in options.arguments if word.partition("=")[0] in options.own_options and word != "-m"]


def _misplaced_hint(word: str, options: argparse.Namespace) -> str:
    return f"{word} stands behind {options.script}, and was given to the program; astray's own stand in front of it."


def _print_misplaced_hint(options: argparse.Namespace) -> None:
    """A hint for a program that has ended in an error: it may not know an option that was meant for astray."""
    misplaced = [word for word in _misplaced(options) if word not in ("-h", "--help")]
    if misplaced:
        print_note(f"astray: {_misplaced_hint(misplaced[0], options)}")


def _check_options(options: argparse.Namespace) -> None:
    """Raises before the script runs, not in the middle of it, if a setting is wrong or the folder is taken."""
    from astray.process import rank_and_world_size

    settings = Settings.check(**settings_of(options))
    for text in options.swap or ():
        read_option(text)
    if options.until is not None and options.until < 0:
        raise UsageError(f"--until {options.until} is before the first step. Steps are counted from 0.")
    if options.guard is not None:
        from astray.guarding.options import check_has_statistics, check_recording_guard

        check_recording_guard({"spike": options.spike})
        check_has_statistics(settings)
    elif options.spike is not None:
        raise UsageError(f"--spike {options.spike:g} is for a guard. Give --guard, too.")
    # Reading a folder's run loads numpy, which the script should load itself. So only a folder that is not empty is
    # checked here. The recorder checks for the other ranks, which may see what rank 0 has just made.
    folder = Path(options.output)
    if folder.exists() and rank_and_world_size(os.environ)[0] == 0 and (folder.is_file() or any(folder.iterdir())):
        from astray.store.run_format.folder import check_recordable

        check_recordable(folder, 0, overwrite=options.force)


class _ScriptRecording:
    """The recorder of this command, which starts in the middle of the script's imports."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._path = absolute(options.output)  # now: the script may change the folder before it imports torch
        self._settings = with_absolute_paths(settings_of(options))
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._children: ChildProcesses | None = None
        self._swaps: ProgramSwaps | None = None
        self._printer = TripPrinter(may_stop=options.guard == "raise")

    @contextlib.contextmanager
    def recording_children(self) -> Iterator[None]:
        """Also records the processes that the script starts, if they are ranks."""
        from astray.capture.children import ChildProcesses, disarm_child
        from astray.process import rank_and_world_size

        disarm_child()
        if rank_and_world_size(os.environ)[1] > 1:  # a launcher has started one of these for each rank
            yield
            return
        options = self._options
        guard = None if options.guard is None else {"on": options.guard, "spike": options.spike}
        self._children = ChildProcesses(self._path, self._settings, guard, _CHILD_STARTUP, options.until)
        self._children.check_folder(overwrite=options.force)
        self._children.set_environment(os.environ)
        try:
            yield
        finally:
            self._children.restore_environment(os.environ)

    def start(self, framework: str) -> None:
        """The script has imported a framework. Of several, that of the first module that is called is recorded."""
        if self._options.swap:
            self._start_swaps(framework)
        if self._recorder is None:
            self._record(framework)
        else:
            from astray.capture.imports import after_first_call

            after_first_call(framework, lambda _: self._take_over(framework))

    def _start_swaps(self, framework: str) -> None:
        if framework == "torch":
            from astray.capture.pytorch.experiments.program_swaps import ProgramSwaps

            self._swaps = ProgramSwaps([read_option(text) for text in self._options.swap])
        elif "torch" not in sys.modules:
            raise UsageError(
                f"--swap works with PyTorch so far, and {self._options.script} imports {framework}. Leave it out."
            )

    def _end_swaps(self) -> None:
        """Puts back what was swapped, and says what never was."""
        for problem in self._swaps.end() if self._swaps is not None else ():
            print_note(f"astray: {problem}")

    def _record(self, framework: str) -> Recorder:
        from astray.capture.adapters import discovering_adapter
        from astray.recorder import Recorder

        options = self._options
        recorder = Recorder.discovering(
            self._path,
            discovering_adapter(framework),
            overwrite=options.force,
            guard=None if options.guard is None else {"on": self._printer, "spike": options.spike},
            **self._settings,
        )
        recorder.report_forecast = lambda text: print_note(f"astray: {text}")
        if options.until is not None:
            from astray.capture.children import end_after

            recorder.on_step_end = partial(end_after, options.until)
        self._recorder = recorder.start()
        return recorder

    def _take_over(self, framework: str) -> Recorder | None:
        """A module of a framework is called that was not the first to be imported."""
        if self._recorder is None or os.getpid() != self._process:
            return None
        if not self._recorder.is_untouched:
            self._recorder.missed(
                f"calls of {framework}'s modules", "a run records one framework, and another's came first"
            )
            return None
        self._recorder.discard()
        return self._record(framework)

    def is_ours(self, error: BaseException) -> bool:
        """Whether the guard of this recording has stopped the script."""
        guard = self._recorder.guard if self._recorder is not None else None
        return guard is not None and guard.ended(error) is not None

    def finish(self, outcome: Outcome) -> int:
        """Closes the run, and prints a line about it and one about its guard; returns 1 if the guard has stopped it."""
        if os.getpid() != self._process:  # a child that the script forked and let run to the end
            return 0
        self._end_swaps()
        notes = self._children.notes() if self._children is not None else []
        if self._recorder is None:
            if not self._gather(notes):
                from astray.capture.imports import SHOWN

                print_note(f"astray run: nothing was recorded, since {self._options.script} never imported {SHOWN}.")
            return 0 if any(note.why is None for note in notes) else 2
        guard = self._recorder.guard
        has_stopped, self._printer.may_stop = self._options.guard == "raise" and not self._printer.may_stop, False
        by_guard = guard.ended(outcome.error) if guard is not None and outcome.error is not None else None
        self._recorder.stop(by_guard or outcome.ended, self._why_nothing(outcome, notes))
        if guard is not None:
            self._printer.print_rest(guard.trips)
        from astray.process import rank_and_world_size

        gathered = self._gather(notes)
        if not gathered and (rank_and_world_size(os.environ)[0] == 0 or self._recorder.is_incomplete):
            print_note(f"astray: {self._recorder.summary()}")
        for remark in self._recorder.remarks if rank_and_world_size(os.environ)[0] == 0 else ():
            print_note(f"astray: {remark}")
        if guard is not None and guard.has_seen_any:
            print_note(f"astray: {guard.summary}.{look_hint(guard.trips)}")
        return int(has_stopped)

    def _why_nothing(self, outcome: Outcome, notes: list[Note]) -> str:
        """The likely reason for a recording without a call."""
        script = self._options.script
        if outcome.code or outcome.error is not None:
            return f"{script} ended before it called a module ({outcome.ended})"
        if notes:
            return "the modules were called in child processes"
        return f"{script} called no module in its own process; functions alone, and forked children, are not recorded"

    def _gather(self, notes: list[Note]) -> bool:
        """Puts the recordings of child processes into the run, and prints that. False when there are none."""
        children = self._children
        if children is None:
            return False
        ranks = [note for note in notes if note.why is None]
        if ranks and self._options.swap:
            print_note(
                "astray: --swap changes the process that `astray run` starts; those in child processes ran without."
            )
        own = self._recorder.calls if self._recorder is not None else 0
        is_one = children.gather(notes, has_own=own > 0)
        if ranks and is_one:
            print_note(f"astray: {children.summary(len(ranks) + (own > 0))}")
        elif ranks:
            number = counted(len(ranks), "rank")
            print_note(
                f"astray: {number} in child processes are a run of their own, {relative_to_cwd(children.folder)}, "
                "since the process that started them has called modules too."
            )
        for note in [note for note in notes if note.why is not None][:_MOST_REASONS]:
            print_note(f"astray: process {note.process} called modules and was not recorded: {note.why}.")
        return bool(ranks) and is_one
