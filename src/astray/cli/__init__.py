"""The command line: one module per command, each with `add` (its options) and `main` (its work).

program.py runs a script for run.py and check.py, and has the options of a recording. Commands import what they need
when they run, so `astray --help` is quick and `astray run` does not change the order in which the user's script
imports things.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from astray.cli import check, compare, convert, help, locate, map, replay, run, show, view
from astray.errors import AstrayError
from astray.formatting.terminal import COULD_NOT, print_note
from astray.process import reason
from astray.wording import printable

_NO_THREAD = "can't start new thread"  # as Python says it
_MEMORY_ADVICE = (
    "Give it less, such as some of the steps (--steps) or ranks, or more memory (`ulimit -v`, or the container's)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = compare.with_descending_sort(sys.argv[1:] if argv is None else argv)
    if not words:
        parser().print_help()
        return 0
    options = parser().parse_args(words)
    try:
        code: int = options.main(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except AstrayError as error:
        return _could_not(options.command, str(error))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        file = f"{error.filename}: " if error.filename else ""
        return _could_not(options.command, f"{file}{reason(error)}.")
    except MemoryError:
        return _could_not(options.command, f"there is not enough memory for this. {_MEMORY_ADVICE}")
    except Exception as error:  # noqa: BLE001 - Python's exit code, 1, would mean that the runs diverge
        if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
            return _could_not(
                options.command,
                "it takes a thread of its own, and the system starts no more. Allow more of them (`ulimit -u`, or the "
                "limit of the container).",
            )
        traceback.print_exc()
        return _could_not(options.command, "this is a fault in astray itself; please report it.")


def _could_not(command: str, why: str) -> int:
    print_note(f"astray {command}: {printable(why)}")
    return COULD_NOT


def _discard_output() -> None:
    """Redirects a broken stdout to the null device, since flushing it would fail again when Python ends."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # it may not be a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> _CommandParser:
    """All commands and their options."""
    top = _CommandParser(
        prog="astray",
        description="Where did it go astray? Record the tensors of two runs, and learn which call went wrong first; or "
        "check one, and learn which call NaN and infinity come from.",
    )
    top.add_argument("--version", action=_VersionAction)
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for command in (run, check, compare, locate, replay, map, show, view, convert, help):
        command.add(commands)
    top.commands = commands.choices
    return top


class _CommandParser(argparse.ArgumentParser):
    """The parser of `astray`, with the parsers of its commands."""

    commands: Mapping[str, argparse.ArgumentParser]


class _VersionAction(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, *_: object) -> None:
        import astray

        print(f"astray {astray.__version__}")
        raise SystemExit(0)
