"""`astray locate`: from a run that is right and a program that may be wrong to a proven culprit."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astray.cli.program import add_program, launched, load_program
from astray.errors import AstrayError, UsageError

if TYPE_CHECKING:
    from astray.locate.programs import ScriptProgram


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "locate",
        help="run a program as often as it takes to find what is wrong in it, and prove it",
        description="Records a program as a run that is right was recorded, and compares. If they part, it does the "
        "walk by itself: does the program repeat itself; the guilty step again, with functions and values around the "
        "suspect; the suspect executed again, given the reference's inputs, replaced by the reference's results. "
        "`astray help locate` has an example.",
        epilog="Exit code: 0 the program agrees with the reference, 1 it does not, 125 it cannot be told, as "
        "`git bisect run` takes them.",
        usage="astray locate [options] REFERENCE [--] (SCRIPT | -m MODULE | LAUNCHER …) [ARGUMENTS ...]",
    )
    parser.add_argument("reference", metavar="REFERENCE", help="the run that is right")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="where the recordings go (default: a new one, runs/locate-SCRIPT-N)"
    )
    parser.add_argument("--force", action="store_true", help="use a folder that is there already")
    parser.add_argument("--steps", metavar="B:E:S", help="compare only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--quick", action="store_true", help="say whether it agrees, and prove nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    values = parser.add_argument_group("the reference's values", "Needed to put them in place of the suspect's.")
    values.add_argument(
        "--details", action="append", metavar="RUN", help="a further recording of the reference, which kept values"
    )
    values.add_argument(
        "--reference-command",
        metavar="'SCRIPT ARGUMENTS'",
        help="the reference's program, if it runs here: it is recorded again where values are needed",
    )
    judging = parser.add_argument_group("judging", "As of `astray compare`.")
    judging.add_argument("--noise", action="append", metavar="RUN", help="how far apart right runs get")
    judging.add_argument("--tolerance", action="append", metavar="WHAT=ERROR", help="allow this error")
    judging.add_argument("--map", metavar="FILE", help="what the candidate's names are in the reference")
    add_program(parser)
    parser.set_defaults(main=main, own_options=tuple(parser._option_string_actions))


def main(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import print_note
    from astray.locate.located import CANNOT_TELL

    try:
        return _main(options)
    except AstrayError as error:  # for `git bisect run` 2 would be a bad commit
        print_note(f"astray locate: {error}")
        return CANNOT_TELL


def _main(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import print_note, print_report, wants_colour, width
    from astray.locate.locate import locate
    from astray.locate.report import as_json, render
    from astray.results.run import Run
    from astray.store import open_run
    from astray.web.options import tolerances_of

    words = [options.script, *options.arguments]
    program = _program([*(["-m"] if options.module else []), *words])
    again = None if options.reference_command is None else _program(shlex.split(options.reference_command))
    found = locate(
        Run.of(open_run(options.reference)),
        program,
        _folder(options),
        steps=options.steps,
        details=[Run.of(open_run(path)) for path in options.details or ()],
        reference_program=again,
        prove=not options.quick,
        options={
            "noise": options.noise,
            "tolerances": tolerances_of("--tolerance", options.tolerance or []),
            "mapping": options.map,
        },
        say=lambda text: print_note(f"astray: {text}"),
    )
    print_report(as_json(found) if options.json else render(found, width=width(), colour=wants_colour(sys.stdout)))
    return found.exit_code


def _program(words: list[str]) -> ScriptProgram:
    """The program of a command line, checked as far as it can be before it runs."""
    from astray.locate.programs import ScriptProgram

    module = words[:1] == ["-m"]
    script, *arguments = words[module:] or [""]
    if not script:
        raise UsageError("There is no script to run. Give it after REFERENCE: astray locate runs/a train.py --its 1")
    parts = launched(script, module, arguments, sys.executable)
    if parts is not None and parts.astray:
        return ScriptProgram(parts.program, [*parts.launcher, *parts.astray])
    if parts is not None:  # Python itself
        module, (script, *arguments) = parts.program[:1] == ["-m"], parts.program[parts.program[:1] == ["-m"] :] or [""]
    load_program(argparse.Namespace(script=script, module=module, arguments=arguments, command="locate"))
    return ScriptProgram([*(["-m"] if module else []), script, *arguments])


def _folder(options: argparse.Namespace) -> Path:
    if options.output is None:
        stem = Path(options.script).stem or "program"
        number = 1
        while (folder := Path("runs") / f"locate-{stem}-{number}").exists():
            number += 1
        return folder
    folder = Path(options.output)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not options.force):
        raise UsageError(f"{folder} is there already. Give another folder, or --force to use it.")
    return folder
