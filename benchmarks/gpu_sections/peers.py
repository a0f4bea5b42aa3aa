"""The same training recorded by msprobe and under torch's DebugMode, each in a process of its own."""

from __future__ import annotations

import zipfile
from pathlib import Path
from statistics import median

from peers import processes
from peers.processes import Side, Tool, TurnTaking, tell_missing
from peers.tools import debug_mode, msprobe

from gpu_sections.work import Report, Work


def run(work: Work, report: Report, packages: Path | None) -> None:
    """`packages` is msprobe's wheel, or a folder with it and others, or one of installed packages."""
    found = unpacked(packages, work.scratch()) if packages is not None else None
    tools = {
        "statistics, modules": msprobe("L0", packages=found),
        "statistics, functions": msprobe("L1", packages=found),
        "statistics, both": msprobe("mix", packages=found),
        "fingerprints, ops": debug_mode(),
    }
    steps = work.times(2, 1)
    training = processes.Work(work.size, str(work.device), mixed=True)
    turns = TurnTaking(work.scratch(), steps, training, memory=False)
    rows = []
    for name, tool in tools.items():
        side = turns.run([tool], work.times(2, 1))[0]
        rows.append(row(name, tool, side, report.ratios.get(name)))
    versions = ", ".join(f"{name} {version}" for name, version in turns.versions.items())
    report.write(
        f"### Peers\n\nThe same training under other tools ({versions}), {steps} bare and {steps} recorded steps in "
        "turn. astray's are from the steps above."
    )
    report.table(
        ["recorded", "peer", "astray", "step ÷ bare step", "bare ms", "recorded ms", "tensors a step"], rows, 2
    )
    for tool_name, why in turns.missing.items():
        report.write(f"**MISSING: {tool_name}, which could not be run: {why}**")
    tell_missing(turns.missing)


def row(name: str, tool: Tool, side: Side | None, own: float | None) -> list[str]:
    ours = "–" if own is None else f"**{own:.2f}**"
    if side is None:
        return [name, tool.name, ours, "missing", "", "", ""]
    return [
        name,
        tool.name,
        ours,
        f"{min(side.recorded) / min(side.bare):.1f}",
        f"{median(side.bare) * 1e3:.1f}",
        f"{median(side.recorded) * 1e3:,.0f}",
        f"{side.left['tensors'] / side.steps:,.0f}",
    ]


def unpacked(packages: Path, into: Path) -> Path:
    """A folder to import from."""
    wheels = [packages] if packages.suffix == ".whl" else sorted(packages.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return into if wheels else packages
