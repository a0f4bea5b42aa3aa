"""Every import points one way: a room imports rooms above it in this list alone. Lazy imports and types count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    "headroom report recorder replay",
    "web",
    "results",
    "state experiment transformers loading locate",
    "foreign",
    "compat",
    "cli",
    "__main__",
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms.split()}

WITH_FRAMEWORK = {
    "torch": (
        "capture/pytorch",
        "device",
        "state",
        "loading/torch_models",
        "replay",
        "compat",
        "foreign",
        "transformers.py",
        "checkpoints/checkpoint",
    ),
    "triton": ("device",),
    "paddle": ("capture/paddle", "state", "loading/paddle_models", "compat", "foreign", "checkpoints/checkpoint"),
}
"""Where each framework is imported: outside of its adapter for a program that has loaded it."""

ADAPTERS = ("capture/pytorch", "capture/paddle")
CHOOSING = ("capture/adapters.py", "capture/imports.py", "experiment.py")
"""Who may import adapters of both frameworks: it chooses one."""


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


def test_imports_point_one_way() -> None:
    wrong = []
    for file in FILES:
        inside = file.relative_to(SOURCE)
        room = inside.parts[0].removesuffix(".py")
        for line, name in imports(file):
            top, _, rest = name.partition(".")
            if top in WITH_FRAMEWORK and not str(inside).startswith(WITH_FRAMEWORK[top]):
                wrong.append(f"{inside}:{line} needs {top}")
            other = rest.partition(".")[0]
            if top != "astray" or not other or other == room:
                continue
            if other not in LEVEL:
                wrong.append(f"{inside}:{line}: {other} is in no layer")
            elif LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{inside}:{line}: {room} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_while_they_load() -> None:
    """So that each can be loaded first, as a reader is by `open_run`."""
    wanted = {file: set(loaded_by(file)) for file in FILES}
    while ready := [file for file, others in wanted.items() if not others & wanted.keys()]:
        for file in ready:
            del wanted[file]
    assert not wanted, "modules in a circle, or above one: " + ", ".join(str(file) for file in wanted)


def loaded_by(path: Path) -> Iterator[Path]:
    """The modules of astray that a module imports when it is loaded."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                file = SOURCE.parent.joinpath(*name.split(".")).with_suffix(".py")
                if file.is_file():
                    yield file


def test_only_the_server_needs_what_serves() -> None:
    """The page as a file can be written without the extra `web`."""
    serving = {"starlette", "uvicorn"}
    files = (SOURCE / "web").rglob("*.py")
    found = {file.stem for file in files if any(name.split(".")[0] in serving for _, name in imports(file))}
    assert found == {"server", "safety"}
    others = (SOURCE / "cli").glob("*.py")
    assert not any("astray.web.server import" in file.read_text() for file in others)


def test_tests_import_no_tests() -> None:
    """What several of them need stands in a module of its own, so that each can be read, moved and run by itself."""
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                last = node.module.rpartition(".")[2]
                assert not last.startswith("test_"), f"{file}:{node.lineno} imports {node.module}"
                assert last != "conftest", f"{file}:{node.lineno} imports {node.module}"


def test_adapters_know_nothing_of_each_other() -> None:
    """What both need is shared, and knows neither."""
    wrong = []
    for file in FILES:
        inside = file.relative_to(SOURCE).as_posix()
        own = next((adapter for adapter in ADAPTERS if inside.startswith(adapter)), None)
        shared = inside.startswith("capture/") and own is None and inside not in CHOOSING
        for line, name in imports(file):
            adapter = next((one for one in ADAPTERS if name.startswith(f"astray.{one.replace('/', '.')}")), None)
            if adapter is not None and (shared or own not in (None, adapter)):
                wrong.append(f"{inside}:{line}: {name}")
    assert not wrong, "\n".join(wrong)
