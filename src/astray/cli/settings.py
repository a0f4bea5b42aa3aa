"""The settings of a recording as options of a command: of `astray run`, and of `astray check` those that apply to it.

None of them has a default here: what is not given is left to the file, or to `Settings`.
"""

from __future__ import annotations

import argparse
from typing import cast

from astray.capture.settings import KEEPS, LEVELS, OPTIMIZER, PHASES, ROLES, RecordingOptions, Settings

USUAL = Settings()


def add_what(parser: argparse.ArgumentParser, level: str = ", ".join(USUAL.level)) -> argparse._ArgumentGroup:
    """What is recorded. level: the default, for the reader."""
    what = parser.add_argument_group("what is recorded", "WORDS are one or more of those named, with commas.")
    what.add_argument("--config", metavar="FILE", help="a YAML, JSON or TOML file of settings; options win over it")
    what.add_argument("--level", metavar="WORDS", help=f"{', '.join(LEVELS)} (default {level})")
    what.add_argument("--keep", metavar="WORDS", help=f"{', '.join(KEEPS)} (default {', '.join(USUAL.keep)})")
    what.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help=f"how many values --keep sample keeps of a tensor (default {USUAL.samples:,})",
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
    """Which part of it."""
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


def add_limits(parser: argparse.ArgumentParser) -> None:
    """How much of it at most."""
    limits = parser.add_argument_group("how much at most", "What is beyond is counted, and listed in the run.")
    limits.add_argument("--max-tensors", type=int, metavar="N", help="so many tensors in all")
    limits.add_argument("--max-tensors-per-step", type=int, metavar="N", help="so many tensors in each step")
    limits.add_argument("--max-bytes", metavar="SIZE", help="so many bytes of values in all, such as 2GB or 500MiB")
    limits.add_argument(
        "--queue-bytes",
        metavar="SIZE",
        help=f"what may wait for the disk before the program does (default {USUAL.queue_bytes >> 20} MiB)",
    )


def settings_of(options: argparse.Namespace) -> RecordingOptions:
    """The settings among the options; None for each that is not given, or that the command does not have."""
    return cast(RecordingOptions, {name: getattr(options, name, None) for name in RecordingOptions.__optional_keys__})
