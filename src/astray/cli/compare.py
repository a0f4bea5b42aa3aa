"""`astray compare`: two runs, and where they part."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="find where two runs part",
        description="Compares two runs and names the first call whose result is wrong while its inputs were right.",
        epilog="Exit code: 0 the runs agree, 1 they diverge, 2 they could not be compared.",
    )
    parser.add_argument("reference", metavar="REFERENCE", help="the run that is right")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run in question")
    parser.add_argument("--steps", metavar="B:E:S", help="compare only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--csv", metavar="DIR", help="also write every pair and a summary as CSV into this folder")
    parser.add_argument("--json", metavar="FILE", help="also write the whole result as JSON")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.cli.terminal import Progress, say, wants_colour, width
    from astray.compare.comparison import compare
    from astray.report.text import render

    with Progress("comparing values") as progress:
        comparison = compare(options.reference, options.candidate, steps=options.steps, progress=progress)
    say(render(comparison, width=width(), colour=wants_colour(sys.stdout)))
    if options.csv:
        comparison.to_csv(options.csv)
        print(f"written   {Path(options.csv)}", file=sys.stderr)
    if options.json:
        comparison.to_json(options.json)
        print(f"written   {Path(options.json)}", file=sys.stderr)
    return comparison.exit_code
