"""`astray show`: what one run holds, and the statistics of its tensors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

SORTABLE = ("absmax", "l2", "max", "min", "mean", "std", "nan", "inf", "zeros", "count")


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "show",
        help="list the tensors of a run and their statistics",
        description="Says what a run holds and lists its tensors, in the order they were observed or sorted.",
    )
    parser.add_argument("run", metavar="RUN", help="the run")
    parser.add_argument("--steps", metavar="B:E:S", help="only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank (default: all)")
    parser.add_argument("--match", metavar="REGEX", help="only sites in which this is found")
    parser.add_argument("--phase", choices=("forward", "backward", "update"), help="only this phase")
    parser.add_argument(
        "--role", choices=("input", "output", "parameter", "gradient", "state"), help="only tensors in this role"
    )
    parser.add_argument("--sort", choices=SORTABLE, help="largest magnitude first, instead of the order of observation")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="how many rows (default 25; 0 for all)")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.cli.terminal import say, wants_colour, width
    from astray.report.listing import Wanted, render
    from astray.steps import Steps
    from astray.store import open_run

    wanted = Wanted(
        steps=Steps.parse(options.steps),
        rank=options.rank,
        match=options.match,
        phase=options.phase,
        role=options.role,
        sort=options.sort,
        top=options.top,
    )
    say(render(open_run(options.run), wanted, width=width(), colour=wants_colour(sys.stdout)))
    return 0
