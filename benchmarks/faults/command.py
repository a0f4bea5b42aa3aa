"""The command `python benchmarks/faults`: runs what was chosen, and prints and writes what came of it."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from tables import installed, provenance

from faults import proving
from faults.catalogue import CONTROLS, FAULTS
from faults.declared import SETTINGS, Control, Fault, Setting
from faults.report import Result, control_table, fault_table, totals
from faults.running import Bench


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> None:
    """Run the benchmark and print its tables."""
    everything: dict[str, Fault | Control] = {**FAULTS, **CONTROLS}
    parser = argparse.ArgumentParser(
        prog="faults", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME,…", help="these faults and controls")
    parser.add_argument("--setting", metavar="NAME,…", help=f"of {', '.join(SETTINGS)}; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    parser.add_argument("--prove", action="store_true", help="instead: what `astray locate` proves of them")
    options = parser.parse_args(arguments)
    settings = [SETTINGS[name] for name in chosen(parser, options.setting, SETTINGS)]
    planted = [everything[name] for name in chosen(parser, options.only, everything)]
    begin = time.perf_counter()
    if options.prove:
        print_proofs(planted)
        print(f"\n{time.perf_counter() - begin:.0f} s · {provenance(installed('astray', 'torch'))}")
        return
    with tempfile.TemporaryDirectory(prefix="astray-faults-") as folder, closing(Bench(Path(folder))) as bench:
        results = []
        for setting in settings:
            for one in (one for one in planted if applies(one, setting)):
                show_progress(f"{setting.name}: {one.name}")
                results.append(Result(one, setting, bench.measure(one, setting)))
    show_progress("")
    print_tables(results)
    print(f"\n{time.perf_counter() - begin:.0f} s · {provenance(installed('astray', 'torch'))}")
    if options.json is not None:
        options.json.write_text(json.dumps([result.as_dict() for result in results], indent=1) + "\n")


def print_proofs(planted: Sequence[Fault | Control]) -> None:
    proofs = []
    with tempfile.TemporaryDirectory(prefix="astray-proofs-") as folder:
        for one in filter(proving.applies, planted):
            show_progress(one.name)
            proofs.append(proving.prove_planted(one, Path(folder) / one.name))
    show_progress("")
    print(f"### Proven by astray locate\n\n{proving.proof_table(proofs)}\n\n{proving.proof_totals(proofs)}")


def print_tables(results: Sequence[Result]) -> None:
    if any(result.score is not None for result in results):
        for setting in dict.fromkeys(result.setting.name for result in results):
            print(f"### {setting}: {SETTINGS[setting].what}\n\n{fault_table(results, SETTINGS[setting])}\n")
        print(f"### Totals\n\n{totals(results)}\n")
    if any(result.score is None for result in results):
        print(f"### Controls\n\n{control_table(results)}")


def applies(planted: Fault | Control, setting: Setting) -> bool:
    """Whether there is something to measure: beside a background, the only control is the background itself."""
    return isinstance(planted, Fault) or setting.background is None or planted.name == "rerun"


def show_progress(doing: str) -> None:
    """Show on one line of a terminal what is being done."""
    if sys.stderr.isatty():
        print(f"\r{doing:60}\r", end="", file=sys.stderr, flush=True)


def chosen(parser: argparse.ArgumentParser, text: str | None, known: Mapping[str, object]) -> list[str]:
    """The names in a comma-separated text; all of them without one. Ends the command at an unknown name."""
    if text is None:
        return list(known)
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not known. There are: {', '.join(known)}.")
    return names
