"""`astray convert`: writes a run as another tool would have, or another tool's dump as a run."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "convert",
        help="write a run in another tool's format, or its dump as a run",
        description="Reads a run in any format that astray knows and writes it in another. What the other format has "
        "no place for is listed.",
        epilog="Nothing needs to be converted to be compared: `astray compare` takes any two formats.",
    )
    parser.add_argument("run", metavar="IN", help="the run, or another tool's dump")
    parser.add_argument("output", metavar="OUT", help="where to write")
    parser.add_argument(
        "--to", required=True, metavar="FORMAT", help="astray, msprobe, torch_npu, saving_hook, hooktools"
    )
    parser.add_argument("--steps", metavar="B:E:S", help="only these steps, such as 0:10:2 or 3,7")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    from astray.formatting.terminal import Progress, print_note, print_report
    from astray.steps import StepSelection
    from astray.store import open_run
    from astray.store.convert import convert
    from astray.wording import counted, printable

    run = open_run(options.run)
    selection = StepSelection.parse(options.steps)
    steps = [step for step in run.steps if step in selection] if selection else None
    with Progress("converting") as progress:
        written = convert(run, options.output, options.to, overwrite=options.force, steps=steps, progress=progress)
    for problem in run.problems:
        print_note(f"note      {printable(problem)}")
    counts = {"step": written.steps, "rank": written.ranks, "call": written.calls, "tensor": written.tensors}
    print_report(f"written   {written.path}: {', '.join(counted(count, noun) for noun, count in counts.items())}")
    for what, count in written.lost.most_common():
        times = f": {count:,} times" if count > 1 else ""
        print_report(f"lost      {printable(what)}{times}")
    return 0
