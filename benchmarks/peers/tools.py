"""The tools that recording benchmarks run beside each other, with settings that make them record the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peers.processes import Tool

OWN_ENVIRONMENT = Path(__file__).parents[2] / ".venv-msprobe/bin/python"
"""What `make peers` makes."""


def astray(**settings: Any) -> Tool:
    return Tool("astray", "with_astray.py", settings)


def msprobe(level: str, task: str = "statistics", *, packages: Path | None = None, **settings: Any) -> Tool:
    """msprobe, from its own environment, or with this one's torch from a folder of packages."""
    of_task: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
    if task == "statistics":
        of_task["summary_mode"] = "statistics"
    settings = {"task": task, "level": level, task: of_task, **settings}
    python = OWN_ENVIRONMENT if packages is None else Path(sys.executable)
    return Tool(f"msprobe {level}", "with_msprobe.py", settings, python, packages)


def front_door(level: str, task: str = "statistics", **settings: Any) -> Tool:
    """astray in msprobe's place, by the same program and the same settings."""
    return Tool("astray.compat.msprobe", "with_front_door.py", msprobe(level, task, **settings).settings)


def debug_mode() -> Tool:
    return Tool("DebugMode", "with_debug_mode.py", {"hash_fn": "hash_tensor", "hash_inputs": True})
