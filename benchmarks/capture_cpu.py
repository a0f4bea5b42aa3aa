"""What recording costs a training step on the CPU: astray beside msprobe and torch's DebugMode, in one run.

A GPT of 6 layers (d = 384, T = 256, B = 4) with AdamW, one thread. For each case astray and its peer have a fresh
process each (peers/), and they take turns: a few bare steps, a few recorded ones, then the other. So all four times
come from the same minutes of the same machine. msprobe has an environment of its own, which `make peers` makes; what
cannot be run leaves its columns empty, and is said at the end.

With `--alone`, astray alone, module by module, for each `keep`. With `--tiny` the same for a chain of 400 small layers:
there a step is nothing but calls, which shows the cost of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from peers.processes import Side, Tool, TurnTaking, tell_missing
from peers.tools import astray, debug_mode, msprobe
from tables import markdown, provenance

KEEPS = ("stats", "fingerprint", "sample", "tensors")


class Case(NamedTuple):
    what: str
    astray: Tool
    peer: Tool
    rounds: int = 4


BOTH = ["module", "function"]
CASES = {
    "module": Case("statistics, modules", astray(level="module"), msprobe("L0")),
    "function": Case("statistics, functions", astray(level="function"), msprobe("L1")),
    "both": Case("statistics, both", astray(level=BOTH), msprobe("mix")),
    "tensors": Case("tensors, both", astray(level=BOTH, keep="tensors"), msprobe("mix", "tensor"), rounds=2),
    "op": Case("fingerprints, ops", astray(level="op", keep="fingerprint"), debug_mode()),
    "none": Case("steps not selected", astray(level=BOTH, steps="1000"), msprobe("mix", step=[1000])),
}

RATIOS = {"ratio": "**{ratio:.2f}**", "of medians": "{of_medians:.2f}"}
TIMES = {"bare ms": "{bare:.0f}", "recorded ms": "{recorded:.0f}"}
AMOUNTS = {
    "tensors a step": "{tensors:,.0f}",
    "MB a step": "{megabytes:,.1f}",
    "files of {steps} steps": "{files:,.0f}",
    "MB of memory": "{more_memory:+,.0f}",
}
WAITING = {"ms waited": "{waited:.0f}", "ms behind": "{behind:.0f}"}

TIMED = "Step time over bare step time, by the best of each; beside it by the medians."
LEFT = """\
What a step leaves, and how much more memory it takes than the bare training, at the peak. Of astray also how long a
step waited for the disk, and how long its writer went on after the last one."""

Results = dict[str, list[Side | None]]


def cell(side: Side | None, text: str) -> str:
    """A measure of one side, best of all steps where it is a time."""
    if side is None:
        return "missing"
    return text.format(
        bare=min(side.bare) * 1e3,
        recorded=min(side.recorded) * 1e3,
        ratio=min(side.recorded) / min(side.bare),
        of_medians=median(side.recorded) / median(side.bare),
        tensors=side.left["tensors"] / side.steps,
        megabytes=side.left["bytes"] / side.steps / 1e6,
        files=side.left["files"] / side.turns,
        more_memory=side.more_memory / 1e6,
        waited=side.left["waited"] / side.steps * 1e3,
        behind=side.left["behind"] / side.turns * 1e3,
    )


def table(results: Results, pairs: dict[str, str], of_astray: dict[str, str], steps: int) -> str:
    """A row for each case; for each measure a column of astray and beside it one of the peer."""
    heads = ["recorded", "peer"]
    for name in pairs:
        heads += [f"astray: {name.format(steps=steps)}", "peer"]
    heads += [f"astray: {name}" for name in of_astray]
    lines = []
    for name, (own, peer) in results.items():
        line = [CASES[name].what, CASES[name].peer.name]
        for text in pairs.values():
            line += [cell(own, text), cell(peer, text)]
        lines.append(line + [cell(own, text) for text in of_astray.values()])
    return markdown(heads, lines, words=2)


def side_by_side(cases: list[str], rounds: int | None, steps: int, folder: str | None) -> None:
    results: Results = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        turns = TurnTaking(Path(scratch), steps)
        for name in cases:
            print(f"{name} …", file=sys.stderr, flush=True)
            case = CASES[name]
            results[name] = turns.run([case.astray, case.peer], rounds or case.rounds)
    print(f"{provenance(turns.versions)}\n")
    print(f"{TIMED}\n")
    print(table(results, RATIOS | TIMES, {}, steps))
    print(f"\n{LEFT}\n")
    print(table(results, AMOUNTS, WAITING, steps))
    tell_missing(turns.missing)
    if "astray" in turns.missing:
        sys.exit(1)


def alone(tiny: bool, rounds: int, steps: int, folder: str | None) -> None:
    """astray alone, in this process."""
    import resource
    import shutil

    import torch
    from gpt import chain, gpt
    from peers.turns import timed

    import astray
    from astray.stats import set_threads

    torch.set_num_threads(1)
    set_threads(1)
    training = chain() if tiny else gpt()
    timed(training.step, steps)
    print("| keep | bare ms | recorded ms | ratio | tensors a step | MB a step | µs a tensor |")
    print("|---|---|---|---|---|---|---|")
    for keep in KEEPS:
        bare = recorded = float("inf")
        for _ in range(rounds):
            scratch = Path(tempfile.mkdtemp(dir=folder))
            bare = min(bare, *timed(training.step, steps))
            with astray.record(scratch / "run", training.model, keep=keep) as rec:
                recorded = min(recorded, *timed(lambda rec=rec: (training.step(), rec.step()), steps))
            end = astray.open(scratch / "run").ranks[0].end
            shutil.rmtree(scratch)
        assert end is not None
        tensors = end.tensors / end.steps
        print(
            f"| {keep} | {bare * 1e3:.1f} | {recorded * 1e3:.1f} | {recorded / bare:.2f} | {tensors:.0f} | "
            f"{end.value_bytes / end.steps / 1e6:.1f} | {(recorded - bare) / tensors * 1e6:.1f} |"
        )
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="astray alone, for each keep")
    parser.add_argument("--tiny", action="store_true", help="the same for a chain of small layers")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, help="turns of each side; by default 4, and 2 for whole tensors")
    parser.add_argument("--steps", type=int, help="bare and recorded steps in a turn; 3, or 10 of the tiny ones")
    parser.add_argument(
        "--folder", help="where to write, on the disk to be measured; by default where temporary files go"
    )
    options = parser.parse_args()
    steps = options.steps or (10 if options.tiny else 3)
    if options.alone or options.tiny:
        alone(options.tiny, options.rounds or 4, steps, options.folder)
    else:
        side_by_side(options.cases, options.rounds, steps, options.folder)


if __name__ == "__main__":
    main()
