"""`astray replay`: executes recorded calls again, in float64 and in their own dtype, and ranks them by their error."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from astray.errors import UsageError

_DONE, _STANDS_OUT = 0, 1


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="execute recorded calls again, and find those whose results their inputs do not explain",
        description="Executes the calls of a run of PyTorch again from their kept inputs, in float64 and in their own "
        "dtype, forward and backward, and says how far each recorded result is from the exact one: a check of one run, "
        "without a reference. Record it with --level function --keep tensors.",
        epilog="Exit code 0: nothing stands out, 1: something does, 2: no call could be replayed.",
    )
    parser.add_argument("run", metavar="RUN", help="the run")
    parser.add_argument(
        "site",
        metavar="SITE[#CALL]",
        nargs="?",
        help="only the calls of this site or inside this module; with a number, that call in detail: h.2.mlp/gelu#0",
    )
    parser.add_argument("--steps", metavar="B:E:S", help="only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank (default: all)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many calls (default 10; 0 for all)")
    parser.add_argument("--json", action="store_true", help="print every call and tensor as JSON")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import COULD_NOT, Progress, print_report, table_width, wants_colour, width
    from astray.results.run import Run
    from astray.store import open_run

    if options.top < 0:
        raise UsageError(f"--top {options.top} is negative. Give how many calls to show, or 0 for all.")
    run = Run.of(open_run(options.run))
    with Progress("replaying") as progress:
        replay = run.replay(options.site, steps=options.steps, rank=options.rank, progress=progress)
    from astray.replay.report import as_json, render  # after the check that torch is there

    if options.json:
        print_report(as_json(replay))
    else:
        detailed = options.site is not None and "#" in options.site
        print_report(
            render(
                replay, top=options.top, detailed=detailed, width=width(), table_width=table_width(),
                colour=wants_colour(sys.stdout),
            )
        )  # fmt: skip
    if not replay.calls:
        return COULD_NOT
    return _STANDS_OUT if replay.stands_out else _DONE
