"""`astray run`: records a script that knows nothing of astray."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.capture.settings import Settings
from astray.cli.program import FRAMEWORK, add_program, load_program, run_program
from astray.cli.settings import add_limits, add_what, add_which, settings_of

if TYPE_CHECKING:
    from astray.capture.recorder import Recorder


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
    add_program(parser)
    what = add_what(parser)
    what.add_argument(
        "--perturb",
        nargs="?",
        type=int,
        metavar="SEED",
        help="change the model's inputs by roundings, for `astray compare --noise`; a seed (default 0) comes behind an "
        "equals sign",
    )
    _let_the_script_follow(parser, "--perturb", "--perturb=0")
    add_which(parser)
    add_limits(parser)
    parser.set_defaults(main=main)


def _let_the_script_follow(parser: argparse.ArgumentParser, bare: str, meant: str) -> None:
    """Has an option take a value behind an equals sign alone. Else argparse would take the next word: the script."""
    parse = parser._parse_optional
    vars(parser)["_parse_optional"] = lambda word: parse(meant if word == bare else word)


def main(options: argparse.Namespace) -> int:
    _refuse(options)
    program = load_program(options)
    recording = _Recording(options)
    outcome = run_program(program, options, recording.start)
    return recording.finish(outcome.ended) or outcome.code


def _refuse(options: argparse.Namespace) -> None:
    """Says before the script runs, not in the middle of it, that a setting is wrong or the folder is taken."""
    from astray.capture.ranks import rank_and_world_size

    Settings.check(**settings_of(options))
    # Looking into a folder loads numpy, which a script that is about to run should do itself. So look only where
    # something is there, and leave the other ranks, which may find what rank 0 has just made, to the recorder.
    folder = Path(options.output)
    if folder.exists() and rank_and_world_size(os.environ)[0] == 0 and (folder.is_file() or any(folder.iterdir())):
        from astray.store.native.folder import refuse

        refuse(folder, 0, overwrite=options.force)


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
            **settings_of(options),
        )
        self._recorder = recorder.start()

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
