"""How fast two dumps of one step are compared, beside msprobe: `python benchmarks/compare.py`.

The 6-layer GPT at both levels, modules and functions, twice: the second time all weights are larger by a millionth, so
that nothing is bit-identical and every value must be read. Each tool compares its own dumps, as a command that a person
types, start-up and report included; the rates are without the start-up. That is what msprobe's `--help` takes, which
loads all it needs, and for astray, whose `--help` loads nothing, the comparison of two runs of one layer. astray's
statistics are of 20 steps, for one takes it no time; msprobe compares the dump of one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from gpt import gpt
from peers.tools import OWN_ENVIRONMENT
from tables import markdown, provenance

import astray

FACTORS = ("1.0", "1.000001")
ROUNDS = 3
STEPS = {"stats": 20, "tensors": 1}


class Timed(NamedTuple):
    """A comparison: seconds in all and for starting up, how many tensors, and their bytes on one side."""

    seconds: float
    start: float
    rows: int
    bytes: int

    @property
    def net(self) -> float:
        return max(self.seconds - self.start, 1e-3)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task, keep in (("statistics", "stats"), ("tensor", "tensors")):
            ours = with_astray(Path(folder) / f"astray-{keep}", keep)
            theirs = with_msprobe(Path(folder) / f"msprobe-{task}", task) if OWN_ENVIRONMENT.exists() else None
            rows += [row(keep, "astray", ours, theirs), *([row(keep, "msprobe", theirs, None)] if theirs else [])]
    print(provenance({"astray": astray.__version__, "torch": torch.__version__}))
    heads = [
        "kept",
        "tool",
        "tensors",
        "GB",
        "seconds",
        "start-up",
        "tensors a second",
        "MB a second",
        "ratio of rates",
    ]
    print("\n" + markdown(heads, rows, words=2))
    if not OWN_ENVIRONMENT.exists():
        print("\nMISSING: msprobe is not installed; `make peers` does that.", file=sys.stderr)


def row(keep: str, tool: str, timed: Timed, other: Timed | None) -> list[str]:
    rate, bytes_rate = timed.rows / timed.net, timed.bytes / timed.net
    ratio = "–"
    if other is not None:
        measure = bytes_rate / (other.bytes / other.net) if keep == "tensors" else rate / (other.rows / other.net)
        ratio = f"**{measure:.0f}**"
    return [
        keep, tool, f"{timed.rows:,}", f"{timed.bytes / 1e9:.2f}", f"{timed.seconds:.2f}", f"{timed.start:.2f}",
        f"{rate:,.0f}", f"{bytes_rate / 1e6:,.0f}", ratio,
    ]  # fmt: skip


def with_astray(folder: Path, keep: str) -> Timed:
    for factor in FACTORS:
        torch.manual_seed(0)
        training = gpt("small", "cpu")
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(float(factor))
        with astray.record(folder / factor, training.model, level=["module", "function"], keep=keep) as rec:
            for _ in range(STEPS[keep]):
                training.step()
                rec.step()
    command = [sys.executable, "-m", "astray", "compare"]
    layer = torch.nn.Linear(2, 2)
    for name in ("one", "other"):
        with astray.record(folder / name, layer, phases="forward"):
            layer(torch.ones(1, 2))
    found = astray.compare(folder / FACTORS[0], folder / FACTORS[1])
    tensors = found.reference.ranks[0].tensors
    stored = tensors.numbers("blob_bytes")
    runs, idle = ([str(folder / name) for name in names] for names in (FACTORS, ("one", "other")))
    return timed(command, runs, idle, len(found.pairs), int(stored[stored > 0].sum()))


def with_msprobe(folder: Path, task: str) -> Timed:
    script = Path(__file__).parent / "peers" / "dump.py"
    for factor in FACTORS:
        subprocess.run([OWN_ENVIRONMENT, script, folder / factor, task, factor], check=True, capture_output=True)
    dumps = [next((folder / factor / "dump").rglob("dump.json")) for factor in FACTORS]
    command = [str(OWN_ENVIRONMENT.with_name("msprobe")), "compare"]
    arguments = ["-gp", str(dumps[0]), "-tp", str(dumps[1]), "-o", str(folder / "out")]
    stored = sum(file.stat().st_size for file in dumps[0].parent.rglob("*.pt"))
    found = timed(command, arguments, ["--help"], 0, stored)
    tables = sorted((folder / "out").rglob("*.csv")) + sorted((folder / "out").rglob("*.xlsx"))
    return found._replace(rows=lines(tables[-1]))


def lines(table: Path) -> int:
    """How many rows a table has; msprobe writes a workbook or CSV."""
    if table.suffix == ".csv":
        return len(table.read_text().splitlines()) - 1
    from openpyxl import load_workbook

    return int(load_workbook(table, read_only=True).active.max_row) - 1


def timed(command: list[str], arguments: list[str], idle: list[str], rows: int, stored: int) -> Timed:
    """The best of some rounds; each starts the command anew. With the arguments `idle` it only starts up."""
    start = min(run([*command, *idle]) for _ in range(ROUNDS))
    return Timed(min(run([*command, *arguments]) for _ in range(ROUNDS)), start, rows, stored)


def run(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return seconds


if __name__ == "__main__":
    main()
