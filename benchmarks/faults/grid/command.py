"""The command `python benchmarks/faults grid`: records the grid into a folder, and judges what is in one."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tables import installed, provenance

from faults.grid.cases import LEVELS, VALUES_BESIDE, cases_of, cells
from faults.grid.catalogue import KINDS
from faults.grid.controls import controls_table, judge_controls
from faults.grid.judging import judge_all
from faults.grid.models import MODELS
from faults.grid.proving import prove_all
from faults.grid.recording import read_index, record_all
from faults.grid.report import print_report
from faults.grid.sensitivity import DEPTHS, NOISES, curve, curve_table
from faults.grid.training import STEPS
from faults.grid.variants import DIFFERENCES
from faults.proving import proof_table, proof_totals

DESCRIPTION = """Faults in 15 models, beside honest differences of dtype, kernels and device.

    python benchmarks/faults grid record DIR [--half seen|unseen|all] [--models …] [--noise …] [--faults …]
    python benchmarks/faults grid judge DIR [--half …] [--details] [--json FILE]
    python benchmarks/faults grid controls DIR --seeds 1:9 [--models …] [--noise …]
    python benchmarks/faults grid prove [--half …] [--models …] [--noise …] [--faults …] [--details]
    python benchmarks/faults grid sensitivity
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="faults grid", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="record references and candidates, and write DIR/index.json")
    record.add_argument("folder", type=Path, metavar="DIR")
    record.add_argument("--half", choices=("seen", "unseen", "all"), default="all")
    record.add_argument("--models", metavar="NAME,…", help=f"of {', '.join(MODELS)}")
    record.add_argument("--noise", metavar="NAME,…", help=f"of {', '.join(DIFFERENCES)}")
    record.add_argument("--faults", metavar="NAME,…", help="these faults; `control` for the controls")
    record.add_argument("--levels", metavar="NAME,…", default="module", help=f"of {', '.join(LEVELS)}")
    record.add_argument(
        "--values", metavar="NAME,…", default=",".join(VALUES_BESIDE), help="keep values too beside these differences"
    )
    record.add_argument("--processes", type=int, default=2)
    judge = commands.add_parser("judge", help="compare the runs of all cases, and print how many faults are named")
    judge.add_argument("folder", type=Path, metavar="DIR")
    judge.add_argument("--half", choices=("seen", "unseen", "all"), default="all")
    judge.add_argument("--only", metavar="REGEX", help="cases with this in their names: MODEL/NOISE/FAULT/LEVEL/KEEP")
    judge.add_argument("--noise-runs", type=int, default=1, metavar="N", help="use so many noise runs, where any are")
    judge.add_argument("--details", action="store_true", help="list what was not named, of the unseen half too")
    judge.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    judge.add_argument("--processes", type=int, default=2)
    controls = commands.add_parser("controls", help="compare right runs with many seeds, none of which may be wrong")
    controls.add_argument("folder", type=Path, metavar="DIR", help="where runs are, or go to")
    controls.add_argument("--seeds", metavar="FROM:TO", default="1:9")
    controls.add_argument("--models", metavar="NAME,…", help=f"of {', '.join(MODELS)}")
    controls.add_argument("--noise", metavar="NAME,…", help=f"of {', '.join(DIFFERENCES)}")
    controls.add_argument("--steps", type=int, default=STEPS, help="of each run: chance has so many more tries")
    controls.add_argument("--keep", choices=("stats", "tensors"), default="stats")
    controls.add_argument("--noise-runs", type=int, default=0, metavar="N", help="compare with so many noise runs")
    controls.add_argument("--processes", type=int, default=2)
    prove = commands.add_parser("prove", help="run `astray locate` on cases, and print how many faults it proves")
    prove.add_argument("--half", choices=("seen", "unseen", "all"), default="all")
    prove.add_argument("--models", metavar="NAME,…", help=f"of {', '.join(MODELS)}")
    prove.add_argument("--noise", metavar="NAME,…", default=",".join(VALUES_BESIDE))
    prove.add_argument("--faults", metavar="NAME,…", help="these faults; `control` for the controls")
    prove.add_argument("--details", action="store_true", help="list each case, of the unseen half too")
    prove.add_argument("--processes", type=int, default=2)
    sensitivity = commands.add_parser("sensitivity", help="find the smallest error of a weight that is named")
    sensitivity.add_argument("--noise", metavar="NAME,…", default=",".join(NOISES))
    sensitivity.add_argument("--depths", metavar="N,…", default=",".join(map(str, DEPTHS)))
    sensitivity.add_argument("--keep", metavar="NAME,…", default="stats,tensors")
    options = parser.parse_args(arguments)
    if options.command == "record":
        _record(parser, options)
    elif options.command == "judge":
        _judge(parser, options)
    elif options.command == "controls":
        _controls(parser, options)
    elif options.command == "prove":
        _prove(parser, options)
    else:
        _sensitivity(parser, options)


def _record(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    models = chosen(parser, options.models, MODELS)
    noises = chosen(parser, options.noise, DIFFERENCES)
    faults = chosen(parser, options.faults, {"control": None, **KINDS})
    levels = chosen(parser, options.levels, LEVELS)
    values = chosen(parser, options.values, DIFFERENCES) if options.values else []
    for model in (MODELS[name] for name in models):
        if not model.available:
            print(f"{model.name} is left out: transformers is not installed.")
    for difference in (DIFFERENCES[name] for name in noises):
        if not difference.available:
            print(f"{difference.name} is left out: there is no GPU.")
    needed = [
        one for cell in cells(models, noises, faults, options.half) for one in cases_of(*cell, levels, values)
    ]  # fmt: skip
    failures = record_all(options.folder, needed, options.processes)
    print(f"{len(needed)} cases in {options.folder}")
    if failures:
        sys.exit("\n".join([f"{len(failures)} runs failed:", *failures]))


def _judge(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    halves = ("seen", "unseen") if options.half == "all" else (options.half,)
    cases = [case for case in read_index(options.folder, halves) if re.search(options.only or "", case.name)]
    if not cases:
        parser.error(f"There is no such case in {options.folder}.")
    begin = time.perf_counter()
    judged = judge_all(options.folder, cases, options.processes, options.noise_runs)
    print_report(judged, options.details)
    print(_made(begin))
    if options.json is not None:
        options.json.write_text(json.dumps([one.as_dict() for one in judged], indent=1) + "\n")


def _controls(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    models, noises = chosen(parser, options.models, MODELS), chosen(parser, options.noise, DIFFERENCES)
    seeds = range(*(int(number) for number in options.seeds.split(":")))
    begin = time.perf_counter()
    controls = judge_controls(
        options.folder, models, noises, seeds, options.keep, options.processes, options.steps, options.noise_runs
    )
    print(f"{controls_table(list(controls))}\n")
    print(_made(begin))


def _prove(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    models, noises = chosen(parser, options.models, MODELS), chosen(parser, options.noise, DIFFERENCES)
    faults = chosen(parser, options.faults, {"control": None, **KINDS})
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="astray-proofs-") as folder:
        proofs = prove_all(Path(folder), list(cells(models, noises, faults, options.half)), options.processes)
    for half in dict.fromkeys(half for half, _ in proofs):
        of_half = [proof for each, proof in proofs if each == half]
        print(f"### Proven by astray locate, {half} half\n")
        if half == "seen" or options.details:
            print(f"{proof_table(of_half)}\n")
        print(f"{proof_totals(of_half)}\n")
    print(_made(begin))


def _sensitivity(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    noises = chosen(parser, options.noise, DIFFERENCES)
    keeps = chosen(parser, options.keep, {"stats": None, "tensors": None})
    depths = [int(depth) for depth in options.depths.split(",")]
    begin = time.perf_counter()
    print(f"{curve_table(list(curve(noises, depths, keeps)))}\n")  # type: ignore[arg-type]
    print(_made(begin))


def _made(begin: float) -> str:
    """How long it took since `begin`, and with what."""
    return f"{time.perf_counter() - begin:.0f} s · {provenance(installed('astray', 'torch'))}"


def chosen(parser: argparse.ArgumentParser, text: str | None, known: Mapping[str, object]) -> list[str]:
    """The names in a comma-separated text; all of them without one. Ends the command at an unknown name."""
    if text is None:
        return list(known)
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not known. There are: {', '.join(known)}.")
    return names
