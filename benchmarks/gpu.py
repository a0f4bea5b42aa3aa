"""What recording costs on a GPU: steps, kernels, values, memory, bits and peers, in one command of under ten minutes.

    python benchmarks/gpu.py [--only steps,kernels,…] [--out FILE] [--msprobe WHEEL] [--folder FOLDER]
    python benchmarks/gpu.py --small        # a tiny model, on the CPU where there is no GPU: does the script work?

Trains GPT-2's medium model and prints markdown tables for RESULTS.md, each section as soon as it is done. msprobe is
taken from its wheel (or a folder of wheels), with this environment's torch; else from what `make peers` made.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from gpu_sections import bits, defaults, kernels, memory, peers, steps, values
from gpu_sections.work import Report, Work
from programs import PROGRAMS
from tables import provenance

SECTIONS = ("defaults", "kernels", "steps", "memory", "bits", "values", "peers")
"""In this order: the profiler at the end of the steps may slow down launches after it, which the kernels count."""

MODULES = {"steps": steps, "kernels": kernels, "memory": memory, "bits": bits, "values": values}
PACKAGES = ("astray", "torch", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=chosen(SECTIONS, "section"), default=SECTIONS, metavar="SECTION,…", help=", ".join(SECTIONS)
    )
    parser.add_argument(
        "--programs", type=chosen(PROGRAMS, "program"), metavar="NAME,…", help=f"of the defaults: {', '.join(PROGRAMS)}"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--out", type=Path, help="write the tables into this file too")
    parser.add_argument("--msprobe", type=Path, metavar="WHEEL", help="its wheel, or a folder of wheels or packages")
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to be measured")
    parser.add_argument("--untitled", action="store_true", help=argparse.SUPPRESS)  # for sections in their own process
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        print(
            f"{'!' * 100}\nNOT MEASURED: there is no CUDA device here. --small tries the script.\n{'!' * 100}",
            file=sys.stderr,
        )
        return
    report = Report(options.out)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if not gpu:
        torch.set_num_threads(1)
    if not options.untitled:
        report.write(provenance({name: version_of(name) for name in PACKAGES}, gpu or "no GPU"))
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        work = Work(torch.device("cuda", 0) if gpu else torch.device("cpu"), Path(scratch), options.small)
        failed = [name for name in options.only if not attempt(name, work, report, options)]
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


def attempt(name: str, work: Work, report: Report, options: argparse.Namespace) -> bool:
    """Runs a section. Its failure is told, and does not keep the others from running."""
    started = time.perf_counter()
    try:
        if name == "peers":
            peers.run(work, report, options.msprobe)
        elif name == "bits" and not options.untitled:
            report.write(in_own_process(name, options))
        elif name == "defaults":
            defaults.run(work, report, options.programs)
        else:
            MODULES[name].run(work, report)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are still wanted
        traceback.print_exc()
        report.write(f"**FAILED: {name}: {type(error).__name__}: {error}**")
        return False
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return True


def in_own_process(name: str, options: argparse.Namespace) -> str:
    """The tables of a section that needs another environment."""
    command = [sys.executable, __file__, "--untitled", "--only", name]
    command += ["--small"] * options.small + (["--folder", str(options.folder)] if options.folder else [])
    environment = os.environ | bits.ENVIRONMENT
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def chosen(names: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """Reads some of these names, in this order, from a command line."""

    def read(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not a {what}; there are {', '.join(names)}")
        return [name for name in names if name in given]

    return read


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
