"""`astray replay`: executes recorded calls again, in float64 and in their own dtype, and ranks them by their error."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from astray.errors import UsageError

if TYPE_CHECKING:
    from astray.results.run import Run

_DONE, _STANDS_OUT = 0, 1


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="execute recorded calls again, and find those whose results their inputs do not explain",
        description="Executes the calls of a run of PyTorch again from their kept inputs, in float64 and in their own "
        "dtype, forward and backward, and says how far each recorded result is from the exact one: a check of one run, "
        "without a reference. Record it with --level function --keep tensors.",
        epilog="Exit code 0: nothing stands out, 1: something does, 2: no call could be replayed. "
        "With --export 0: the script was written, 2: it was not.",
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
    export = parser.add_argument_group("to attach a call to a bug report")
    export.add_argument(
        "--export",
        metavar="FILE.py",
        help="write this one call as a script, and its tensors beside it as FILE.safetensors: they need torch alone",
    )
    export.add_argument("--micro", type=int, metavar="N", help="the call of this micro step")
    export.add_argument("--phase", choices=("forward", "backward"), help="the operator called in this phase")
    export.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import COULD_NOT, Progress, print_report, table_width, wants_colour, width
    from astray.results.run import Run
    from astray.store import open_run

    if options.top < 0:
        raise UsageError(f"--top {options.top} is negative. Give how many calls to show, or 0 for all.")
    run = Run.of(open_run(options.run))
    if options.export is not None:
        return _export(run, options)
    for name in ("micro", "phase", "force"):
        if getattr(options, name) not in (None, False):
            raise UsageError(f"--{name} is for a call that is exported. Give --export FILE.py too, or leave it out.")
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


def _export(run: Run, options: argparse.Namespace) -> int:
    from astray.formatting.terminal import print_report

    if options.site is None or options.json:
        problem = "--json is for a replay" if options.site else "--export needs the call to export"
        raise UsageError(f"{problem}. Give: astray replay {options.run} SITE#CALL --export FILE.py")
    exported = run.export_call(
        options.site, options.export, steps=options.steps, rank=options.rank, micro=options.micro, phase=options.phase,
        force=options.force,
    )  # fmt: skip
    print_report(str(exported))
    return _DONE
