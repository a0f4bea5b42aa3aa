"""`astray map`: drafts what the modules of one run are called in another, and how its tensors lie there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "map",
        help="draft which modules of two models belong together",
        description="Drafts a mapping for `astray compare --map`: for two models whose modules have different names, "
        "and for two frameworks, which call things differently and store some weights transposed.",
        epilog="Read the draft before you use it: it pairs modules by their parameters' shapes and their order, and "
        "says why each weight that lies otherwise is taken for one.",
    )
    parser.add_argument("reference", metavar="REFERENCE", help="the run that is right")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run in question")
    parser.add_argument("-o", "--output", metavar="FILE", help="write it into this file instead of printing it")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.comparison.pair.mapping_draft import draft
    from astray.formatting.terminal import print_note, print_report
    from astray.store import open_run
    from astray.wording import as_utf8

    mapping = draft(open_run(options.reference), open_run(options.candidate))
    if options.output is None:
        print_report(str(mapping))
    else:
        Path(options.output).write_bytes(as_utf8(f"{mapping}\n"))
        print_note(f"written   {options.output}")
    return 0
