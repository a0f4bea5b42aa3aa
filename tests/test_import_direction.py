"""Every import points one way: a room imports rooms above it in this list alone. Lazy imports and types count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "astray"

LAYERS = (  # in this order; names in one line do not import each other
    "errors records interrupts log wording safe_text",
    "steps part process",
    "stats formatting",
    "checkpoints",
    "store",
    "device graph",
    "nonfinite capture",
    "guarding comparison",
    "headroom state experiment report",
    "transformers",
    "foreign",
    "web compat",
    "cli",
    "__main__",
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms.split()}
UPWARD = {
    ("capture", "guarding"),  # Recorder(guard=…)
    ("comparison", "report"),  # Comparison.to_csv and the like
    ("comparison", "web"),  # Comparison.to_html
    ("store", "nonfinite"),  # Run.alarms
    ("store", "headroom"),  # Run.risk
    ("compat", "cli"),
}
"""What users call on a result asks the rooms that render it, inside functions. Nothing may be added here."""

WITH_FRAMEWORK = (
    "capture/pytorch",
    "device",
    "state",
    "compat",
    "foreign",
    "transformers.py",
    "checkpoints/checkpoint",
)
"""Where torch is imported: of the last four for a program that has loaded it."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The modules that a module imports, wherever in it, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            whole = node.module or ""
            yield from ((node.lineno, f"{whole}.{alias.name}" if whole == "astray" else whole) for alias in node.names)


FILES = [file for file in sorted(SOURCE.rglob("*.py")) if file.parent != SOURCE or file.stem != "__init__"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file: Path) -> None:
    inside = file.relative_to(SOURCE)
    room = inside.parts[0].removesuffix(".py")
    for line, name in imports(file):
        top, _, rest = name.partition(".")
        if top in {"torch", "paddle", "triton"}:
            assert str(inside).startswith(WITH_FRAMEWORK), f"{file}:{line} needs {top}"
        other = rest.partition(".")[0]
        if top != "astray" or not other or other == room:
            continue
        assert other in LEVEL, f"{file}:{line}: {other} is in no layer"
        if (room, other) not in UPWARD:
            assert LEVEL[other] < LEVEL[room], f"{file}:{line}: {room} imports {other}"


def test_what_points_upward_does_so_inside_functions() -> None:
    """So that loading a room loads no room that stands on it."""
    for file in FILES:
        room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and room != "compat":
                assert (room, (node.module or "").removeprefix("astray.").partition(".")[0]) not in UPWARD, file


def test_only_the_server_needs_what_serves() -> None:
    """The page as a file can be written without the extra `web`."""
    serving = {"starlette", "uvicorn"}
    files = (SOURCE / "web").rglob("*.py")
    found = {file.stem for file in files if any(name.split(".")[0] in serving for _, name in imports(file))}
    assert found == {"connections", "server", "safety"}
    others = (SOURCE / "cli").glob("*.py")
    assert not any("astray.web.server import" in file.read_text() for file in others)
