"""`astray show`: what one run holds, and the statistics of its tensors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from astray.errors import UsageError

SORTABLE = ("absmax", "l2", "max", "min", "mean", "std", "nan", "inf", "zeros", "count")
RISKS = ("absmax", "headroom", "growth", "zeros", "subnormal", "unmoved", "update", "gradient")


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "show",
        help="list the tensors of a run or a checkpoint and their statistics",
        description="Says what a run holds and lists its tensors, in the order they were observed or sorted. RUN may "
        "be a dump of msprobe, torch_npu.hooks, the saving hook or hooktools, or a checkpoint: safetensors, a file of "
        "torch.save, a Hugging Face folder, a distributed checkpoint.",
    )
    parser.add_argument("run", metavar="RUN", help="the run, another tool's dump, or a checkpoint")
    parser.add_argument("--steps", metavar="B:E:S", help="only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank (default: all)")
    parser.add_argument("--match", metavar="REGEX", help="only sites in which this is found")
    parser.add_argument("--phase", choices=("forward", "backward", "update"), help="only this phase")
    parser.add_argument(
        "--role", choices=("input", "output", "parameter", "gradient", "state"), help="only tensors in this role"
    )
    parser.add_argument(
        "--sort",
        choices=(*SORTABLE, *(name for name in RISKS if name not in SORTABLE)),
        metavar="COLUMN",
        help=f"largest magnitude first, instead of the order of observation: {', '.join(SORTABLE)}",
    )
    parser.add_argument(
        "--alarms",
        action="store_true",
        help="where NaN and infinity come from, and what they reached (`astray help guard`)",
    )
    parser.add_argument("--top", type=int, default=25, metavar="N", help="how many rows (default 25; 0 for all)")
    risk = parser.add_argument_group(
        "risk",
        "How close the numbers come to trouble, from the statistics of all steps and ranks; see `astray help risk`.",
    )
    risk.add_argument("--risk", action="store_true", help=f"rank the sites by it, or with --sort by {', '.join(RISKS)}")
    risk.add_argument(
        "--as",
        dest="what_if",
        action="append",
        metavar="DTYPE",
        help="what would become of them in this dtype, such as float16,bfloat16 or float8_e4m3fn (with --risk)",
    )
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    if options.alarms:
        return _alarms(options)
    if options.risk or options.what_if:
        return _risk(options)
    if options.sort is not None and options.sort not in SORTABLE:
        raise UsageError(f"--sort {options.sort} goes with --risk. Tensors are sorted by {', '.join(SORTABLE)}.")
    from astray.formatting.terminal import print_report, table_width, wants_colour, width
    from astray.report.listing import ListingOptions, render
    from astray.steps import StepSelection
    from astray.store import open_run

    listing_options = ListingOptions(
        steps=StepSelection.parse(options.steps),
        rank=options.rank,
        match=options.match,
        phase=options.phase,
        role=options.role,
        sort=options.sort,
        top=options.top,
    )
    colour = wants_colour(sys.stdout)
    print_report(
        render(open_run(options.run), listing_options, width=width(), table_width=table_width(), colour=colour)
    )
    return 0


def _alarms(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import print_report, wants_colour, width
    from astray.nonfinite.findings import alarms, render
    from astray.store import CheckpointData, open_run

    run = open_run(options.run)
    if isinstance(run, CheckpointData):
        raise UsageError(
            f"{run.path} is a checkpoint, in which nothing was computed. `astray show {run.path} --sort nan` lists the "
            "tensors that hold NaN, and --sort inf those with infinity."
        )
    findings = alarms(run, options.rank, options.steps)
    print_report(render(findings, width=width(), colour=wants_colour(sys.stdout)))
    return 1 if findings else 0


def _risk(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import print_report, table_width, wants_colour, width
    from astray.headroom.report import RiskOptions, render
    from astray.headroom.risk import risk
    from astray.steps import StepSelection
    from astray.store import open_run

    if options.sort is not None and options.sort not in RISKS:
        raise UsageError(f"--sort {options.sort} does not go with --risk. Sites are sorted by {', '.join(RISKS)}.")
    result = risk(
        open_run(options.run),
        steps=StepSelection.parse(options.steps),
        ranks=None if options.rank is None else [options.rank],
        what_if=",".join(options.what_if or ()),
    )
    risk_options = RiskOptions(
        match=options.match, phase=options.phase, role=options.role, sort=options.sort, top=options.top
    )
    print_report(
        render(result, risk_options, width=width(), table_width=table_width(), colour=wants_colour(sys.stdout))
    )
    return 0
