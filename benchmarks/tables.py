"""What every recording benchmark prints: markdown tables, and the line that says when, where and with what."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> str:
    """A table whose first columns, so many, are words and the others numbers."""
    heads = list(heads)
    lines = [heads, ["---"] * words + ["---:"] * (len(heads) - words), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(versions: Mapping[str, str], device: str = "") -> str:
    """When, where, with what and how this is measured."""
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items())
    where = f"{machine()}, {device}" if device else machine()
    return f"{datetime.date.today()}, {where}, {with_what}: `{shlex.join(['python', *sys.argv])}`"


def installed(*names: str) -> dict[str, str]:
    """The versions of some packages; one that is run from its sources has none."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from its sources"


def machine() -> str:
    """This machine, as far as Linux tells."""
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({processor}), {memory:.0f} GB, {platform.system()}, {python}"
