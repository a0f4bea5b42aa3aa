"""Imports point one way, and compare and report never need a framework."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "astray"

MAY_IMPORT = {
    "record": set(),
    "errors": set(),
    "steps": {"errors"},
    "part": {"errors"},
    "placement": {"plain_json"},
    "wording": set(),
    "numerals": set(),
    "interrupts": set(),
    "paths": set(),
    "limits": {"errors"},
    "plain_json": set(),
    "plain_yaml": set(),
    "stats": {"record", "errors", "limits"},
    "checkpoints": {"record", "errors", "stats", "wording"},
    "store": {
        "record",
        "errors",
        "stats",
        "checkpoints",
        "steps",
        "part",
        "wording",
        "numerals",
        "alarms",
        "risk",
        "interrupts",
        "paths",
        "limits",
        "plain_json",
        "registry",
    },
    "device": {"record", "stats", "store", "interrupts"},
    "capture": {
        "device",
        "record",
        "errors",
        "stats",
        "store",
        "steps",
        "part",
        "placement",
        "wording",
        "guard",
        "interrupts",
        "paths",
        "plain_yaml",
        "registry",
    },
    "graph": {"record", "store"},
    "compare": {
        "graph",
        "record",
        "errors",
        "limits",
        "plain_json",
        "plain_yaml",
        "stats",
        "store",
        "steps",
        "part",
        "wording",
        "numerals",
        "report",
        "web",
    },
    "alarms": {
        "graph",
        "record",
        "errors",
        "stats",
        "store",
        "steps",
        "part",
        "placement",
        "plain_json",
        "wording",
        "report",
    },
    "risk": {"graph", "record", "errors", "stats", "store", "steps", "part", "wording", "report"},
    "state": {"record", "errors", "stats", "device", "capture", "checkpoints", "wording", "report"},
    "compat": {
        "state",
        "record",
        "errors",
        "stats",
        "store",
        "capture",
        "compare",
        "guard",
        "report",
        "paths",
        "plain_json",
        "wording",
        "cli",
    },
    "updates": {"errors", "capture", "report", "wording"},
    "monitor": {"record", "errors", "store", "capture", "report", "wording", "paths"},
    "guard": {"record", "errors", "stats", "store", "capture", "alarms", "wording", "interrupts", "paths"},
    "report": {
        "record",
        "errors",
        "checkpoints",
        "store",
        "stats",
        "compare",
        "alarms",
        "risk",
        "steps",
        "part",
        "wording",
    },
    "web": {
        "graph",
        "record",
        "errors",
        "stats",
        "store",
        "compare",
        "alarms",
        "risk",
        "report",
        "part",
        "plain_json",
        "wording",
    },
}
"""Who may import whom. `report` renders what `compare`, `alarms` and `risk` found; these reach back for it only inside
methods, and so does `Run` for the last two, and `Recorder` for the guard of a recording. `web` shows what all of them
found; only `Comparison.to_html` reaches for it."""


def imports(path: Path) -> set[str]:
    """The parts of astray that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        if isinstance(node, ast.ImportFrom) and node.module == "astray":
            names = [f"astray.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("astray.")}
        found |= {"torch" for name in names if name.split(".")[0] in {"torch", "paddle"}}
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    files = [SOURCE / f"{part}.py"] if (SOURCE / f"{part}.py").exists() else list((SOURCE / part).rglob("*.py"))
    assert files
    for file in files:
        allowed = MAY_IMPORT[part] | {part}
        if {"pytorch", "device", "state", "compat", "updates", "monitor"} & set(file.parts) or file.stem == "as_torch":
            allowed = allowed | {"torch"}
        assert imports(file) <= allowed, file


def test_only_the_server_needs_what_serves() -> None:
    """The page as a file can be written without the extra `web`."""
    found = set()
    for file in (SOURCE / "web").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & {"starlette", "uvicorn"}:
                found.add(file.stem)
    assert found == {"connections", "server", "safety"}
    others = (SOURCE / "cli").glob("*.py")
    assert not any("astray.web.server import" in file.read_text() for file in others)
